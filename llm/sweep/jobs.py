"""What a sweep trains: the products of comma-separated values."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from llm.compose import compose
from llm.config import TrainConfig
from llm.errors import UserError
from llm.identity import default_run_dir
from llm.sweep.settings import SweepConfig

JOBS_A_WORKER = 8


@dataclass(frozen=True)
class Job:
    """One run of a sweep: the words of its command line, what they mean, and its folder."""

    words: list[str]
    config: TrainConfig
    run_dir: Path

    def values(self) -> dict[str, str]:
        """The words as key -> value."""
        pairs = (word.partition("=") for word in self.words)
        return {key.lstrip("+~"): value.replace("\\", "") for key, _, value in pairs}


def plan_jobs(settings: SweepConfig, words: Sequence[str]) -> list[Job]:
    """The jobs of the sweep: every product of its grids, each with the command line's `words` in place of its own.

    Raises UserError where a job's settings are wrong, or two jobs would share a run folder.
    """
    planned: list[list[str]] = []
    for outer in products(replaced(settings.common, words)):  # in this order, what is cut short is whole for a seed
        mine: list[list[str]] = []
        for grid in settings.grids or [[]]:
            inner = [word for word in grid if _key(word) not in map(_key, words)]
            product = products(replaced(outer, inner))
            mine += [job for job in product if job not in mine]  # grids may overlap
        planned += mine
    configs = _composed(planned)
    folders = [Path(config.run_dir or default_run_dir(config)) for config in configs]
    _refuse_shared_folders(planned, folders)
    return [Job(*parts) for parts in zip(planned, configs, folders, strict=True)]


def products(words: Sequence[str]) -> list[list[str]]:
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


def replaced(words: Sequence[str], by: Sequence[str]) -> list[str]:
    """`words` and then `by`, without those words whose key `by` gives anew."""
    keys = {_key(word) for word in by}
    return [*(word for word in words if _key(word) not in keys), *by]


def axes(jobs: Sequence[Job]) -> dict[str, list[str | None]]:
    """The keys in which the jobs differ, each with its values in the order of the jobs; None where a job has none."""
    every = [job.values() for job in jobs]
    keys = dict.fromkeys(key for values in every for key in values)
    found = {key: list(dict.fromkeys(values.get(key) for values in every)) for key in keys}
    return {key: values for key, values in found.items() if len(values) > 1}


def _composed(planned: list[list[str]]) -> list[TrainConfig]:
    """The configuration of each job. Composing takes a quarter of a second, so many are shared out among processes."""
    workers = min(os.cpu_count() or 1, len(planned) // JOBS_A_WORKER)
    if workers < 2:
        return [compose(job) for job in planned]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(compose, planned, chunksize=-(-len(planned) // workers)))


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _refuse_shared_folders(planned: list[list[str]], folders: list[Path]) -> None:
    for i, folder in enumerate(folders):
        if folder in folders[:i]:
            first = " ".join(planned[folders.index(folder)])
            raise UserError(
                f"run_dir={folder}: the jobs '{first}' and '{' '.join(planned[i])}' would share it. Sweep over "
                "settings that make different runs (micro_batch, for one, does not), and leave run_dir to its default."
            )
