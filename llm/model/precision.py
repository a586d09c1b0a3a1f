"""The one rule for where bf16 is not enough."""

from __future__ import annotations

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 if it already is: for gates, norms and angles, which bf16 would spoil."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
