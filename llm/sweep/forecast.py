"""What a sweep would cost, before it runs: jobs, tokens, GPU-hours, and what the hours are reckoned from."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from llm.columns import in_columns
from llm.config import TrainConfig
from llm.errors import UserError
from llm.finished import is_finished
from llm.identity import mixer_label
from llm.layout import layer_names
from llm.metrics import TRAINING_FLOPS, named_peak_flops
from llm.runfolder import read_config
from llm.schedules import total_steps
from llm.session import check
from llm.sweep.jobs import Job, axes
from llm.sweep.settings import SweepConfig
from llm.tokenizer import load_tokenizer

ASSUMED_GPU, ASSUMED_MFU = "H100", 0.3  # where nothing was measured


def forecast(settings: SweepConfig, jobs: Sequence[Job]) -> str:
    """The table of a dry run. UserError for settings that do not fit together, as training would raise it."""
    rows = [("job", "state", "tokens", "tokens/s a GPU", "GPU-hours", "run folder")]
    varied, notes, hours, tokens = axes(jobs), {}, 0.0, 0
    for job in jobs:
        speed, source = speed_of(job.config, settings.tokens_per_second)
        left = 0 if is_finished(job.config, job.run_dir) else tokens_left(job)
        hours, tokens = hours + left / speed / 3600, tokens + left
        mark = notes.setdefault(source, f"[{len(notes) + 1}]")
        what = " ".join(f"{k}={job.values()[k]}" for k in varied if k in job.values()) or mixer_label(job.config)
        figures = (f"{left:,}", f"{speed:,.0f} {mark}", f"{left / speed / 3600:.2f}")
        rows.append((what, state_of(job), *figures, str(job.run_dir)))
    lines = [f"{len(jobs)} jobs, {tokens:,} tokens to train, {hours:,.1f} GPU-hours", "", in_columns(rows), ""]
    return "\n".join([*lines, *(f"{mark} {source}" for source, mark in notes.items())])


def state_of(job: Job) -> str:
    """new, finished, or how far it is."""
    if is_finished(job.config, job.run_dir):
        return "finished"
    step = newest_step(job.run_dir)
    return f"step {step}/{total_steps(job.config)}" if step else "new"


def tokens_left(job: Job) -> int:
    """Tokens that the job has still to train, up to its last step."""
    return max(0, total_steps(job.config) - newest_step(job.run_dir)) * job.config.batch_tokens


def newest_step(run_dir: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    names = [path.name.removeprefix("step_") for path in run_dir.glob("checkpoints/step_*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def speed_of(config: TrainConfig, given: float | None) -> tuple[float, str]:
    """Tokens a second of one GPU, and where the figure comes from."""
    vocab_size = config.tokenizer.vocab_size or len(load_tokenizer(config.tokenizer.path))
    model = check(config, vocab_size, world_size=1)  # mistakes come to light here
    if given is not None:
        return given, "given by tokens_per_second"
    measured = [found for run in Path("runs").glob("*/") if (found := measured_speed(run, config))]
    if measured:
        return max(measured)
    flops = TRAINING_FLOPS * model.flops(config.context, config.context**2) / config.context
    speed = ASSUMED_MFU * named_peak_flops(ASSUMED_GPU) / flops
    return speed, (
        f"assumed: {ASSUMED_MFU:.0%} of an {ASSUMED_GPU}'s dense bf16 peak, which small models do not reach; nothing "
        "like it was measured in runs/. Give tokens_per_second=... to reckon with another figure."
    )


def measured_speed(run_dir: Path, config: TrainConfig) -> tuple[float, str] | None:
    """Tokens a second of one device in a run of the same model and context; None where `run_dir` is no such run."""
    try:
        other = read_config(run_dir)
        alike = all(part(other) == part(config) for part in (lambda c: c.model, lambda c: c.context, layer_names))
        if not alike:
            return None
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        devices = json.loads((run_dir / "environment.json").read_text())[-1]["devices"]
    except (UserError, OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    if not speeds:
        return None
    return statistics.median(speeds) / _world_size(run_dir), f"measured in {run_dir} on {(devices or ['a CPU'])[0]}"


def _world_size(run_dir: Path) -> int:
    """Processes of a run; 1 where its checkpoints do not say."""
    states = sorted(run_dir.glob("checkpoints/step_*/state.json"))
    try:
        return json.loads(states[-1].read_text())["world_size"]
    except (IndexError, OSError, ValueError, KeyError):
        return 1
