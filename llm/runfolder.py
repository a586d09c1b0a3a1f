"""The folder of a run: its configuration, environment, metrics and checkpoints, and whose run it is.

run_dir/
    config.yaml         the resolved configuration and its schema_version
    environment.json    a list: versions, machine, git commit and command of each start
    model.json          sizes of the model, as `llm.report.model_facts` gives them
    metrics.jsonl       one line for each logged step
    checkpoints/        see llm/checkpoint.py
    run.lock            see llm/runlock.py
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from llm.checkpoint import Checkpoints
from llm.config import TrainConfig
from llm.durable import replace_file
from llm.errors import UserError
from llm.identity import SCHEMA_VERSION, SWEEP_VARIABLE, default_run_dir, differences, identity
from llm.runlock import RunLock

REPORTED_PACKAGES = ("torch", "triton", "accelerate", "transformers", "tokenizers", "datasets", "numpy", "safetensors")


class RunFolder:
    """An open run folder, locked against other processes until `close`.

    Made on the main process only; other ranks read `checkpoints` through `RunFolder.watch`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path)
        self.lock: RunLock | None = None

    @classmethod
    def open(cls, path: Path | str, config: TrainConfig) -> RunFolder:
        """Create or continue the run of `config`, as `config.resume` allows. Raises UserError otherwise."""
        run = cls(Path(path))
        _check_resume(config.resume, run)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run_dir={path}: cannot be created ({error.strerror}). Choose another folder.") from error
        run.lock = RunLock(run.path)
        run.lock.acquire()
        try:
            run._refuse_other_run(config)
            run._write_config(config)
            run._append_environment()
            run.checkpoints.recover()
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def watch(cls, path: Path | str) -> RunFolder:
        """The folder as ranks other than the main one see it: nothing is written, nothing locked."""
        return cls(Path(path))

    def close(self) -> None:
        """Let others use the folder."""
        if self.lock is not None:
            self.lock.release()

    def record_model(self, facts: dict[str, Any]) -> None:
        """Write model.json, for those who compare runs without building models."""
        replace_file(self.path / "model.json", json.dumps(facts, indent=1).encode())

    def _refuse_other_run(self, config: TrainConfig) -> None:
        if not (self.path / "config.yaml").exists():
            return
        found = differences(identity(config), identity(read_config(self.path)))
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise UserError(
                f"run_dir={self.path} holds another run: {'; '.join(found[:5])}{more}. "
                "Choose another run_dir, or use the settings of that run to continue it."
            )

    def _write_config(self, config: TrainConfig) -> None:
        text = OmegaConf.to_yaml({"schema_version": SCHEMA_VERSION, **plain_config(config)})
        path = self.path / "config.yaml"
        if not path.exists() or path.read_text() != text:
            replace_file(path, text.encode())

    def _append_environment(self) -> None:
        path = self.path / "environment.json"
        try:
            starts = json.loads(path.read_text())
        except (OSError, ValueError):
            starts = []
        replace_file(path, json.dumps([*starts, describe_environment()], indent=1).encode())


def open_run(config: TrainConfig, *, main: bool) -> RunFolder:
    """The folder of the run of `config`: opened and locked on the main process, watched on the others."""
    path = config.run_dir or default_run_dir(config)
    return RunFolder.open(path, config) if main else RunFolder.watch(path)


def _check_resume(resume: str, run: RunFolder) -> None:
    if resume == "must" and not run.checkpoints.steps():
        raise UserError(
            f"resume=must, but run_dir={run.path} has no checkpoint. Check run_dir, or start with resume=auto."
        )
    if resume == "never" and (run.path / "config.yaml").exists():
        raise UserError(
            f"resume=never, but run_dir={run.path} holds a run. Choose another run_dir, or continue with resume=auto."
        )


def plain_config(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain dictionaries, lists and values."""
    return OmegaConf.to_container(OmegaConf.structured(config), resolve=True)


def read_config(run_dir: Path) -> TrainConfig:
    """The configuration of a run. Raises UserError where it is missing, or of a version that this one cannot read."""
    path = run_dir / "config.yaml"
    try:
        stored = OmegaConf.load(path)
        version = stored.pop("schema_version")
    except (OSError, ValueError, KeyError, AttributeError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path} is missing or unreadable: {run_dir} is no run of mixlab.") from error
    if version != SCHEMA_VERSION:
        raise UserError(f"{path} has schema_version {version}, but this version of mixlab reads {SCHEMA_VERSION}.")
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), stored))
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]}") from error


def describe_environment() -> dict[str, Any]:
    """Versions, machine, git commit and command of this process."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.orig_argv,
        "sweep": os.environ.get(SWEEP_VARIABLE),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in REPORTED_PACKAGES},
        "cuda": torch.version.cuda,
        "devices": devices,
        "git": _git_state(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit of the code, and the files that differ from it; None outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": git("status", "--porcelain").splitlines()}
    except (OSError, subprocess.SubprocessError):
        return None
