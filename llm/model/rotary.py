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
    half = x.shape[-1] // 2
    angle = positions[..., None, None].to(widen(x).dtype) * frequencies(half, theta, x)  # [..., 1, K/2]
    return rotate_by(x, angle)


def rotate_by(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate pairs (i, i + K/2) of the last dimension of x [..., H, K] by angle [..., H or 1, K/2]; x's dtype."""
    first, second = widen(x).chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def frequencies(count: int, theta: float, like: Tensor) -> Tensor:
    """theta ** (-i / count) for i < count, in at least fp32, where `like` is."""
    return theta ** (-torch.arange(count, device=like.device, dtype=widen(like).dtype) / count)
