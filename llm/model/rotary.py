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
    first, second = widen(x).split(half, dim=-1)
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=first.dtype) / half)
    angle = positions[..., None, None].to(first.dtype) * frequency  # [..., 1, K/2]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
