"""The keys of a sweep itself: what to sweep over, and where its jobs run. They count with ``-m`` only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from llm.compose import SWEEP_GROUPS, groups
from llm.config import check_values, option
from llm.errors import UserError, suggest
from llm.paths import configs_dir


@dataclass
class SlurmConfig:
    """What `launcher=slurm` asks of sbatch for each job."""

    partition: str | None = option("sbatch --partition", None)
    account: str | None = option("sbatch --account", None)
    time: str = option("wall time of a job; one that is not done by then saves and is queued again", "24h")
    warning: int = option("seconds before that in which it saves", 300, low=1)
    cpus_per_gpu: int = option("CPU cores a GPU", 8, low=1)
    memory_gb_per_gpu: int | None = option("memory a GPU; null: the cluster's default", None, low=1)
    at_once: int | None = option("most jobs that run at the same time; null: as many as Slurm lets", None, low=1)
    setup: list[str] = option("shell lines before a job: module load, source .venv/bin/activate", [])
    options: list[str] = option("further options of sbatch, for instance [--exclude=node7,--qos=long]", [])


@dataclass
class SweepConfig:
    """Settings of a sweep (configs/sweep, configs/launcher)."""

    name: str = option("name of the sweep, used in its folder's name", "sweep")
    common: list[str] = option("words of every job, in files of configs/sweep", [])
    grids: list[list[str]] = option("words of each of several products of values, in files of configs/sweep", [])
    launcher: str = option("where jobs run: local, slurm", "local", choices=("local", "slurm"))
    n_gpus: int | None = option("cards to share out among the jobs; null: gpus_per_job", None, low=1)
    gpus_per_job: int = option("cards of a job; several of them train as one, through torchrun", 1, low=1)
    jobs_per_gpu: int = option("jobs on a card at the same time (without a GPU: on this machine)", 1, low=1)
    preload: bool = option("fork jobs off a process that has loaded torch already: for many short ones", False)
    sweep_dir: str | None = option(
        "folder of the sweep's record and logs; null: sweeps/<name>-<hash of the jobs>", None
    )
    tokens_per_second: float | None = option(
        "dry runs: tokens/s of a GPU to reckon with; null: measured", None, above=0
    )
    slurm: SlurmConfig = field(default_factory=SlurmConfig)


def split_words(words: Sequence[str]) -> tuple[SweepConfig, list[str]]:
    """The sweep's own settings, and the words that are left for its jobs.

    Raises UserError for an unknown choice or value; unknown keys are left to the jobs.
    """
    names = {spec.name for spec in fields(SweepConfig)}
    own = [word for word in words if _key(word).partition(".")[0] in names | set(SWEEP_GROUPS)]
    rest = [word for word in words if word not in own]
    chosen = dict(word.split("=", 1) for word in own if _key(word) in SWEEP_GROUPS)
    merged = OmegaConf.structured(SweepConfig)
    try:
        for group in SWEEP_GROUPS:
            if group in chosen:
                merged = OmegaConf.merge(merged, _load(group, chosen[group]))
        merged = OmegaConf.merge(
            merged, OmegaConf.from_dotlist([word for word in own if _key(word) not in SWEEP_GROUPS])
        )
        settings = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(
            f"{error.full_key}: {str(error).splitlines()[0]} See --help for the keys of a sweep."
        ) from error
    check_values(settings)
    if settings.n_gpus is not None and settings.n_gpus % settings.gpus_per_job:
        raise UserError(
            f"n_gpus={settings.n_gpus} is no multiple of gpus_per_job={settings.gpus_per_job}: change either."
        )
    if settings.gpus_per_job > 1 and (settings.jobs_per_gpu > 1 or settings.preload):
        raise UserError(
            f"gpus_per_job={settings.gpus_per_job}: such jobs have their cards alone and start through torchrun. "
            "Leave out jobs_per_gpu and preload."
        )
    return settings, rest


def _load(group: str, name: str) -> DictConfig:
    """A file of configs/<group>, or one of the user's own that ends in .yaml."""
    path = Path(name) if name.endswith(".yaml") else configs_dir() / group / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"{group}={name}: there is no such file.{suggest(name, groups(of_sweeps=True)[group])}")
    try:
        loaded = OmegaConf.load(path)
    except YAMLError as error:
        raise UserError(f"{group}={name}: {path} is no yaml ({str(error).splitlines()[0]}).") from error
    return OmegaConf.merge({"name": path.stem} if group == "sweep" else {}, loaded)


def _key(word: str) -> str:
    return word.partition("=")[0]
