"""Which implementation of an operator runs: one rule for all of them."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

IMPLEMENTATIONS = ("auto", "triton", "chunked", "reference")


def choose(impl: str, like: Tensor, op: str, lacks: str = "") -> str:
    """Resolve `impl` for an operator whose inputs live where `like` does.

    ``auto`` is Triton on a CUDA device when it is installed and the kernels take the inputs, else the
    chunkwise form in plain torch. A named implementation is taken at its word and never silently replaced.
    `lacks` says what about these inputs the Triton kernels do not take; "" if they take them.

    Raises ValueError for an unknown name, or for ``triton`` where it cannot run.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r}: choose one of {', '.join(IMPLEMENTATIONS)}")
    if impl == "auto":
        return "triton" if like.is_cuda and not lacks and has_triton() else "chunked"
    if impl == "triton" and not has_triton():
        raise ValueError(f"impl='triton': {op} cannot use Triton here, which is not installed; use impl='auto'")
    if impl == "triton" and lacks:
        raise ValueError(f"impl='triton': {op} does not take {lacks} in Triton; use impl='auto' or 'chunked'")
    return impl


@torch.compiler.assume_constant_result
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
