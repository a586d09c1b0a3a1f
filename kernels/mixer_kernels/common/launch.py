"""How kernels are launched: with committed configurations, never with ones tuned in a user's run."""

from __future__ import annotations

import functools
import hashlib
import warnings
from typing import Any

import torch
from torch import Tensor

from mixer_kernels.common.stored import stored_configurations


@functools.cache
def configurations(op: str) -> dict[str, Any]:
    """The operator's `configs.json`: per kernel, element size and K the block sizes, warps and pipeline stages."""
    return stored_configurations(op)


def operator_name(name: str) -> str:
    """The name under which torch knows a custom operator.

    A process may hold copies of this package beside it, inside exported models: each has a namespace of its own.
    """
    home = (__package__ or "").removesuffix(".common")
    if home == "mixer_kernels":
        return f"mixer_kernels::{name}"
    return f"mixer_kernels_{hashlib.sha256(__name__.encode()).hexdigest()[:12]}::{name}"


def configuration(op: str, kernel: str, like: Tensor, key_dim: int, value_dim: int) -> dict[str, int]:
    """Launch settings of a kernel for inputs of `like`'s dtype and device; BV, if it has one, divides `value_dim`."""
    if like.is_cuda:
        _warn_if_unverified(op, like.device.index)
    chosen = configurations(op)["kernels"][kernel][f"{like.element_size()} bytes"][f"K {key_dim}"]
    if "BV" in chosen:
        chosen = chosen | {"BV": min(chosen["BV"], value_dim & -value_dim)}
    return chosen


@functools.cache
def _warn_if_unverified(op: str, device: int) -> None:
    import triton

    major, minor = torch.cuda.get_device_capability(device)
    here = f"sm{major}{minor} triton {'.'.join(triton.__version__.split('.')[:2])}"
    verified = configurations(op)["verified"]
    if here not in verified:
        warnings.warn(
            f"{op}: its Triton kernels were checked on {', '.join(verified)}, not on {here}. Run `make verify-kernels` "
            "before you trust them here, or use impl='chunked'.",
            stacklevel=2,
        )


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU, 1 on a CPU: how many programs run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
