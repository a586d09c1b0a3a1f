"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from llm.model.precision import widen


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate pairs (i, i + K/2) of the last dimension by angles that grow with the position.

    x [..., H, K] with K even; positions int [...], one for each of x's leading entries. RoFormer (arXiv 2104.09864) in
    the half-split layout of Llama checkpoints. Angles are computed in at least fp32 and nothing is cached, so there is
    no buffer to lose when a model is loaded from a file.
    """
    cos, sin = rotation(positions, x.shape[-1] // 2, theta, widen(x).dtype)
    return _turned(x, cos[..., None, :], sin[..., None, :])


def rotate_by(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate pairs (i, i + K/2) of the last dimension of x [..., H, K] by angle [..., H or 1, K/2]; x's dtype."""
    return _turned(x, angle.cos(), angle.sin())


def frequencies(count: int, theta: float, like: Tensor) -> Tensor:
    """theta ** (-i / count) for i < count, in at least fp32, where `like` is."""
    return theta ** (-torch.arange(count, device=like.device, dtype=widen(like).dtype) / count)


# a copy of this module, as exported models bring one, is not to replace the operator of the original
@torch.library.custom_op(f"{__name__.replace('.', '_')}::rotation", mutates_args=())
def rotation(positions: Tensor, half: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of int `positions` [...]: [..., half] in `dtype`.

    An operator of its own, so that a compiler does not compute powers and sines anew for every head and in backward,
    which takes ten times as long as the rotation.
    """
    frequency = frequencies(half, theta, positions.new_empty(0, dtype=dtype))
    angle = positions[..., None].to(dtype) * frequency
    return angle.cos(), angle.sin()


@rotation.register_fake
def _(positions: Tensor, half: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos = torch.empty(*positions.shape, half, device=positions.device, dtype=dtype)
    return cos, torch.empty_like(cos)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., K] with each pair (i, i + K/2) rotated by cos, sin [..., K/2]; in x's dtype.

    Halves are swapped rather than cut and joined: so backward is as simple as forward, and fuses with its neighbours.
    """
    halves = widen(x).unflatten(-1, (2, -1))  # [..., 2, K/2]
    turned = halves * cos.unsqueeze(-2) + halves.flip(-2) * torch.stack([-sin, sin], dim=-2)
    return turned.flatten(-2).to(x.dtype)
