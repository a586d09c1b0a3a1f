"""Finds launch configurations for a new card: each candidate is checked against fp64, then timed; the fastest wins.

An operator's `configs.json` lists under "candidates" the settings to try for each kernel. Kernels are tuned one after
the other, with the others at the best settings so far.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import NamedTuple

import torch

from mixer_kernels.bench import inputs_for_time, leaves
from mixer_kernels.common.launch import configurations
from mixer_kernels.spec import Case, OperatorSpec, all_specs
from mixer_kernels.verify import check

Settings = dict[str, int]


class Trial(NamedTuple):
    """A candidate for a kernel: milliseconds of forward and backward, and the worst error as a share of its budget."""

    kernel: str
    settings: Settings
    time: float
    share: float


def candidates(op: str, kernel: str, case: Case) -> list[Settings]:
    """Settings to try for a kernel: every combination of the values listed, blocks no larger than the case."""
    listed = configurations(op)["candidates"].get(kernel, {})
    grid = [dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values())]
    limits = {"BK": case.key_dim, "BV": case.value_dim}
    matters = listed and kernel.endswith("channel") == (case.decay == "channel")
    return [c for c in grid if matters and all(c.get(name, 0) <= limit for name, limit in limits.items())]


def use(op: str, kernel: str, case: Case, settings: Settings) -> None:
    """Let the operator launch `kernel` with these settings from now on, in this process."""
    configurations(op)["kernels"][kernel]["2 bytes"][f"K {case.key_dim}"] = settings


def _forward_backward(spec: OperatorSpec, case: Case) -> Callable[[], None]:
    inputs = inputs_for_time(spec, case)
    do = torch.randn_like(inputs["v"])

    def run() -> None:
        o, _ = spec.function(**inputs, impl="triton")
        torch.autograd.grad(o, list(leaves(inputs).values()), do)

    return run


def _compile(job: tuple[str, Case, str, Settings]) -> str:
    """In a worker: run once, so that the compiled kernel is on disk when its turn to be timed comes."""
    op, case, kernel, settings = job
    use(op, kernel, case, settings)
    try:
        _forward_backward(all_specs()[op], replace(case, batch=1, tokens=256))()
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, say: the candidate is out
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return ""


def tune(spec: OperatorSpec, cases: Iterable[Case]) -> dict[tuple[str, str], list[Trial]]:
    """The trials of each case and kernel; afterwards the best settings are in use in this process."""
    kernels = configurations(spec.name)["candidates"]
    jobs = [
        (spec.name, case, kernel, c)
        for case in cases
        for kernel in kernels
        for c in candidates(spec.name, kernel, case)
    ]
    workers = max(1, min(14, (os.cpu_count() or 1) - 1))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        failures = list(pool.map(_compile, jobs))
    trials: dict[tuple[str, str], list[Trial]] = {}
    for (_, case, kernel, settings), failure in zip(jobs, failures, strict=True):
        tried = trials.setdefault((case.name, kernel), [])
        if failure:
            print(f"  {kernel} {settings}: {failure}", flush=True)
            continue
        use(spec.name, kernel, case, settings)
        tried.append(_try(spec, case, kernel, settings))
        right = [t for t in tried if t.share <= 1]
        if right:
            use(spec.name, kernel, case, min(right, key=lambda t: t.time).settings)
    return trials


def _try(spec: OperatorSpec, case: Case, kernel: str, settings: Settings) -> Trial:
    from triton.testing import do_bench

    small = replace(case, batch=2, tokens=500, documents="many", continued=True)
    share = max(r.error / r.budget for r in check(spec, small, torch.bfloat16, "cuda"))
    time = do_bench(_forward_backward(spec, case), warmup=20, rep=100, return_mode="median")
    return Trial(kernel, settings, time, share)
