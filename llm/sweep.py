"""``-m``: every combination of comma-separated values, each job in a process tree of its own."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from llm.compose import compose
from llm.errors import UserError
from llm.identity import default_run_dir


def jobs(words: Sequence[str]) -> list[list[str]]:
    """The command-line words of every job: the product of the values of words such as ``seed=1,2``."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        raise UserError(f"cannot read the command line: {str(error).splitlines()[0]}") from error
    choices = []
    for word, override in zip(words, parsed, strict=True):
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([word])
    return [list(combination) for combination in itertools.product(*choices)]


def sweep(words: Sequence[str]) -> int:
    """Train every job in turn. A job that fails leaves the others alone; the exit code is 1 if any failed."""
    planned = jobs(words)
    folders = [_run_dir(job) for job in planned]  # composes every job: mistakes surface before any training
    repeated = {folder for folder in folders if folders.count(folder) > 1}
    if repeated:
        raise UserError(
            f"run_dir={sorted(repeated)[0]}: several jobs of the sweep share it. Leave run_dir to its default."
        )
    results = []
    for i, (job, folder) in enumerate(zip(planned, folders, strict=True)):
        print(f"[{i + 1}/{len(planned)}] {' '.join(job)} -> {folder}", flush=True)
        begin = time.monotonic()
        code = subprocess.run([sys.executable, "-m", "llm.train", *job], check=False).returncode
        results.append((folder, code, time.monotonic() - begin))
    for folder, code, seconds in results:
        print(f"{'done  ' if code == 0 else 'failed'}  exit code {code:3d}  {seconds:7.0f} s  {folder}")
    return int(any(code for _, code, _ in results))


def _run_dir(job: Sequence[str]) -> str:
    config = compose(job)
    return config.run_dir or str(default_run_dir(config))
