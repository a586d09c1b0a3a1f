"""flash-linear-attention, beside which the operators are timed: its functions, and how its autotuners choose."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from unittest import mock

from torch import Tensor

from mixer_kernels.spec import Case

Function = Callable[..., tuple[Tensor, Tensor]]

CHOICE = "*/*.autotune.json"  # in Triton's cache: the times of an autotuner's candidates for one key
LOWER_BOUND = -5.0  # of a bounded gate: what its authors recommend; ordinary gates here lie within


def functions(op: str, case: Case) -> dict[str, Function]:
    """Its functions for a case of an operator, by the name to list them under; none if it is not installed.

    It refuses gated backward on Hopper with Triton 3.4 to 3.7.0, where one of its kernels is miscompiled for key blocks
    of 64. That guard is lifted here: so check what comes out before its time counts.
    """
    try:
        from fla.ops.common import chunk_o
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.gla import chunk_gla
        from fla.ops.kda import chunk_kda
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        return {}
    if case.options:  # its functions for these take other arguments
        return {}
    chunk_o.TRITON_ABOVE_3_7_1 = True
    bounded = partial(chunk_kda, safe_gate=True, lower_bound=LOWER_BOUND)
    known = {
        ("linear_attention", "none"): {"fla": chunk_simple_gla},
        ("linear_attention", "scalar"): {"fla": chunk_simple_gla},
        ("linear_attention", "channel"): {"fla": chunk_gla},
        ("delta_rule", "none"): {"fla": chunk_delta_rule},
        ("delta_rule", "scalar"): {"fla": chunk_gated_delta_rule},
        ("delta_rule", "channel"): {"fla": chunk_kda, "fla, gates bounded": bounded},
    }
    return {who: _by_name(function) for who, function in known.get((op, case.decay), {}).items()}


def _by_name(function: Function) -> Function:
    names = ("q", "k", "v", "g", "beta")
    return lambda **x: function(**{n: x[n] for n in names if n in x}, output_final_state=True)


def version() -> str:
    """What is measured against, to be said wherever its times are."""
    try:
        return f"flash-linear-attention {metadata.version('flash-linear-attention')}, its guard for Hopper lifted"
    except metadata.PackageNotFoundError:
        return "none installed"


def tune(calls: Sequence[Callable[[], object]], kept: Path | None = None) -> tuple[int, int]:
    """Let its autotuners choose for `calls`, from all of their candidates, compiled in parallel beforehand.

    A candidate is timed for 20 ms, after 5 ms, instead of the 100 and 25 of a user's first call. The choices are found
    and left in the folder `kept`, so that a later run on such a machine, even with an empty cache, compiles and times
    no candidate again. Returns how many kernels were compiled, and how many of them could not be.
    """
    import triton
    from triton.testing import do_bench

    from mixer_kernels.precompile import compile_ahead

    cache = Path(triton.knobs.cache.dir)
    if kept is not None:
        _copy_choices(kept, cache)
    counts = compile_ahead(calls)
    brief = partial(do_bench, warmup=5, rep=20)
    try:
        with mock.patch.object(triton.runtime.driver.active, "get_benchmarker", return_value=brief):
            for call in calls:
                call()
    finally:
        if kept is not None:
            _copy_choices(cache, kept)
    return counts


def _copy_choices(source: Path, target: Path) -> None:
    """Triton finds a choice by its folder's name: a hash of its own version, the GPU's architecture and the kernel."""
    for path in source.glob(CHOICE):
        folder = target / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder)
