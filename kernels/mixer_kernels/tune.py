"""Finds launch configurations for a new card: each candidate is checked against fp64, then timed; the fastest wins.

An operator's `configs.json` lists under "candidates" the settings to try for each kernel. Kernels are tuned one after
the other, with the others at the best settings so far.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib import resources
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from mixer_kernels.bench import inputs_for_time, kernel_times
from mixer_kernels.common.launch import configurations
from mixer_kernels.spec import Case, OperatorSpec, all_specs
from mixer_kernels.verify import check

Settings = dict[str, int]


class Trial(NamedTuple):
    """A candidate: milliseconds of all kernels of forward and backward, worst error as a share of its budget."""

    kernel: str
    settings: Settings
    time: float
    share: float


def candidates(op: str, kernel: str, case: Case) -> list[Settings]:
    """Settings to try for a kernel on a case: all combinations listed, with blocks no larger than the case."""
    listed = configurations(op)["candidates"].get(kernel, {})
    grid = [dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values())]
    limits = {"BK": case.key_dim, "BV": case.value_dim}
    return [c for c in grid if listed and all(c.get(name, 0) <= limit for name, limit in limits.items())]


def use(op: str, kernel: str, case: Case, settings: Settings) -> None:
    """Let the operator launch `kernel` with these settings from now on, in this process."""
    configurations(op)["kernels"][kernel]["2 bytes"][f"K {case.key_dim}"] = settings


def save(op: str) -> None:
    """Write the operator's settings in use to its `configs.json`."""
    text = json.dumps(configurations(op), indent=2)
    for leaf in set(re.findall(r"[{\[][^{}\[\]]*[}\]]", text)):  # on one line each
        text = text.replace(leaf, leaf[0] + re.sub(r"\s+", " ", leaf[1:-1]).strip() + leaf[-1])
    resources.files(f"mixer_kernels.{op}").joinpath("configs.json").write_text(text + "\n")


def tune(spec: OperatorSpec, cases: Iterable[Case]) -> dict[tuple[str, str], list[Trial]]:
    """The trials of each case and kernel; afterwards the best settings are in use in this process.

    Candidates are compiled and checked in processes of their own, since one that is miscompiled may take its process
    down. They are timed one by one.
    """
    jobs = [
        (spec.name, case, kernel, settings)
        for case in cases
        for kernel in configurations(spec.name)["candidates"]
        if not kernel.endswith("_scalar" if case.decay == "channel" else "_channel")
        for settings in candidates(spec.name, kernel, case)
    ]
    workers = max(1, min(14, (os.cpu_count() or 1) - 1))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        shares = list(pool.map(_check_in_worker, jobs))
    trials: dict[tuple[str, str], list[Trial]] = {}
    for case in cases:
        inputs = inputs_for_time(spec, case)
        right = [(job[2:], share) for job, share in zip(jobs, shares, strict=True) if job[1] is case and share <= 1]
        for kernel, group in itertools.groupby(right, key=lambda x: x[0][0]):
            tried = [_time(spec, case, inputs, kernel, settings, share) for (_, settings), share in group]
            use(spec.name, kernel, case, min(tried, key=lambda t: t.time).settings)
            trials[case.name, kernel] = tried
    return trials


def _time(
    spec: OperatorSpec, case: Case, inputs: dict[str, Any], kernel: str, settings: Settings, share: float
) -> Trial:
    """Time on the device alone: what the host takes to launch varies by more than candidates differ."""
    use(spec.name, kernel, case, settings)
    return Trial(kernel, settings, sum(kernel_times(spec, inputs).values()) / 1000, share)


def _check_in_worker(job: tuple[str, Case, str, Settings]) -> float:
    """The worst error of the operator with a candidate as a share of its budget; infinite if it does not run."""
    op, case, kernel, settings = job
    use(op, kernel, case, settings)
    small = replace(case, batch=2, tokens=500, documents="many", continued=True)
    try:
        share = max(r.error / r.budget for r in check(all_specs()[op], small, torch.bfloat16, "cuda"))
    except Exception as error:  # too much shared memory, say: the candidate is out
        reason = str(error).partition("\n")[0][:80]
        print(f"  {case.name} {kernel} {settings}: {type(error).__name__} {reason}", flush=True)
        return float("inf")
    if not share <= 1:
        print(f"  {case.name} {kernel} {settings}: wrong, error {share:.1f} of the budget", flush=True)
    return share
