"""Checks and casts that every operator's `api.py` makes before it computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.functional import pad

from mixer_kernels.segments import Segments

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def expect(name: str, x: Tensor, shape: tuple[int, ...], legend: str) -> None:
    """Raise ValueError unless `x` has `shape`; `legend` spells it out, like "[B, T, H, K]"."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {list(x.shape)}, expected {legend} = {list(shape)}")


def value_groups(q: Tensor, v: Tensor) -> int:
    """How many value heads read each query and key head; ValueError if they do not divide."""
    heads, value_heads = q.shape[-2], v.shape[-2]
    if value_heads % heads:
        raise ValueError(f"v has {value_heads} heads, which must be a multiple of the {heads} heads of q and k")
    return value_heads // heads


def same_dtype(**tensors: Tensor) -> None:
    """Raise ValueError unless all have one floating-point dtype."""
    found = {name: x.dtype for name, x in tensors.items()}
    if len(set(found.values())) > 1 or not set(found.values()) <= set(FLOATS):
        raise ValueError(f"{', '.join(found)} must share one floating-point dtype, found {found}")


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, cast fp32 inputs of the matmuls as torch's own operators would; else return them as they are."""
    kind = tensors[0].device.type
    if not _has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def autocast_off(like: Tensor) -> AbstractContextManager:
    """A context in which nothing is cast behind the operator's back: gates and state stay in fp32."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


@torch.compiler.assume_constant_result  # torch.compile cannot look into it before torch 2.12
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gates, sums and states for inputs of `dtype`: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(x: Tensor, *sizes: int) -> Tensor:
    """x with zeros behind, so that its last axes have these sizes; x itself if they have them."""
    missing = [size - n for size, n in zip(sizes, x.shape[-len(sizes) :], strict=True)]
    if not any(missing):
        return x
    return pad(x, [n for m in reversed(missing) for n in (0, m)])


def narrowed(x: Tensor, *sizes: int) -> Tensor:
    """The first so many channels of x's last axes; x itself if that is all, for a view would cost a copy backward."""
    for axis, size in enumerate(sizes, start=-len(sizes)):
        x = x if x.shape[axis] == size else x.narrow(axis, 0, size)
    return x


def resolve_segments(
    segments: Segments | None, batch: int, tokens: int, continued: bool, device: torch.device
) -> Tensor:
    """`row_start` int32 [B, T]. Without segments: one document a row, `continued` or not."""
    if segments is None:
        return Segments.whole_rows(batch, tokens, device, continued=continued).row_start
    expect("segments.row_start", segments.row_start, (batch, tokens), "[B, T]")
    return segments.row_start


def resolve_state(state: Tensor | None, shape: tuple[int, ...], like: Tensor, name: str) -> Tensor:
    """The state [B, HV, K, V] in the accumulation dtype of `like`; zeros if absent."""
    dtype = accumulation_dtype(like.dtype)
    if state is None:
        return torch.zeros(shape, dtype=dtype, device=like.device)
    expect(name, state, shape, "[B, HV, K, V]")
    return state.to(dtype)
