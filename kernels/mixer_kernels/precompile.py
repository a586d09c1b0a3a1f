"""Compiling ahead, on all cores, what calls are about to launch in Triton: every candidate of an autotuner included.

A call is made once with its launches left out and noted down. Worker processes then compile what was noted into
Triton's cache on disk, so that the call itself, or the autotuner within it, finds everything there.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest import mock

import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.cache import FileCacheManager

WORKERS = os.cpu_count() or 1


class Launch(NamedTuple):
    """A kernel by its place, and what it is compiled for as Triton writes it down (types, constants, options)."""

    module: str
    kernel: str
    specialization: str


@contextmanager
def noting(noted: set[Launch]) -> Iterator[None]:
    """Within, kernels that this process has not compiled are added to `noted` instead of being compiled and launched.

    What they would write stays unwritten. An autotuner that has no choice on disk takes every candidate in turn; it has
    forgotten afterwards.
    """
    tuned: set[Autotuner] = set()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # Triton's names
        noted.add(Launch(fn.module, fn.name, compile["specialization_data"]))
        return True  # as if another had compiled it: Triton launches nothing then

    def take(self: Autotuner, *args: Any, config: triton.Config, **meta: Any) -> list[float]:
        tuned.add(self)
        self.fn.run(*args, **meta | config.all_kwargs())
        return [0.0] * 3

    _ = triton.runtime.driver.active  # its first use puts helpers of its own into the cache, which is closed below
    with ExitStack() as stack:
        hook = triton.knobs.runtime.jit_cache_hook
        stack.callback(lambda: setattr(triton.knobs.runtime, "jit_cache_hook", hook))
        triton.knobs.runtime.jit_cache_hook = note
        stack.enter_context(mock.patch.object(Autotuner, "_bench", take))
        stack.enter_context(mock.patch.object(FileCacheManager, "put", return_value=""))  # no choice made here
        yield
    for tuner in tuned:
        tuner.cache.clear()


def compile_ahead(calls: Iterable[Callable[[], object]], workers: int = WORKERS) -> tuple[int, int]:
    """Compile in parallel all that `calls` launch; returns how many kernels were noted and how many would not compile.

    Each call must run without an error when nothing it launches writes anything.
    """
    noted: set[Launch] = set()
    with noting(noted):
        for call in calls:
            call()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        done = list(pool.map(_compile, sorted(noted), chunksize=2))
    return len(done), done.count(False)


def _compile(launch: Launch) -> bool:
    """In a worker process. A candidate that cannot be compiled is the autotuner's own business."""
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    while not isinstance(kernel, triton.JITFunction):
        kernel = kernel.fn  # through its autotuner and heuristics
    try:
        kernel.preload(launch.specialization)
    except Exception:
        return False
    return True
