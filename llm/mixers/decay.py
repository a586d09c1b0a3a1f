"""The decay gate that Mamba-2, Gated DeltaNet and Kimi Delta Attention share, and its initialisation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.model.precision import widen


def log_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """``-exp(A_log) * softplus(x + dt_bias)``, in at least fp32: the logarithm of the decay of one step, <= 0."""
    # -softplus(y) as logsigmoid(-y): torch.compile's eager backend gets the strides of softplus's gradient wrong
    return widen(A_log).exp() * F.logsigmoid(-(widen(x) + widen(dt_bias)))


def bounded_log_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """``lower_bound * sigmoid(exp(A_log) * (x + dt_bias))``, in at least fp32: between `lower_bound` < 0 and 0."""
    return lower_bound * torch.sigmoid(widen(A_log).exp() * (widen(x) + widen(dt_bias)))


@torch.no_grad()
def init_A_log(A_log: Tensor, low: float, high: float) -> None:
    """A uniform between `low` and `high`, kept away from 0, where the logarithm would lose the head for good."""
    A_log.uniform_(low, high).clamp_(min=1e-4).log_()


@torch.no_grad()
def init_dt_bias(dt_bias: Tensor, low: float = 1e-3, high: float = 1e-1, floor: float = 1e-4) -> None:
    """softplus(dt_bias) log-uniform between `low` and `high`, as in Mamba (arXiv 2312.00752)."""
    dt_bias.uniform_(math.log(low), math.log(high)).exp_().clamp_(min=floor)
    dt_bias.add_(torch.log(-torch.expm1(-dt_bias)))  # the inverse of softplus
