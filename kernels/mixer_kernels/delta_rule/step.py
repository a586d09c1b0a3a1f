"""The delta rule for one token, for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from mixer_kernels.delta_rule.reference import reference


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    e: Tensor | None,
    *,
    state: Tensor,
    scale: float,
    stride: int,
) -> tuple[Tensor, Tensor]:
    """The recurrence on rows of one token: q [B, 1, H, K], the rest [B, stride, ...], state [B, HV, K, V]."""
    row_start = torch.full((q.shape[0], 1), -1, dtype=torch.int32, device=q.device)
    o, state = reference(q, k, v, g, beta, e, row_start=row_start, initial_state=state, scale=scale, stride=stride)
    return o[:, 0], state
