"""`profile=true`: a trace of a few steps, and a table of what they spend their time on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

SKIPPED, WARMUP, TRACED = 3, 1, 3  # steps: the first ones compile and allocate
TRACED_STEPS = SKIPPED + WARMUP + TRACED  # until the trace is written
ROWS = 40


def profiler(enabled: bool, run_dir: Path) -> AbstractContextManager[profile | None]:
    """A profiler, to be told of each step by ``step()``, that writes into run_dir/profile; gives None if not enabled.

    trace.json is for chrome://tracing or ui.perfetto.dev; table.txt has the operators by their own time.
    """
    if not enabled:
        return nullcontext()
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    steps = schedule(skip_first=SKIPPED, wait=0, warmup=WARMUP, active=TRACED, repeat=1)

    def write(result: profile) -> None:
        folder = run_dir / "profile"
        folder.mkdir(exist_ok=True)
        result.export_chrome_trace(str(folder / "trace.json"))
        order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        (folder / "table.txt").write_text(result.key_averages().table(sort_by=order, row_limit=ROWS))

    return profile(activities=activities, schedule=steps, on_trace_ready=write, profile_memory=True)
