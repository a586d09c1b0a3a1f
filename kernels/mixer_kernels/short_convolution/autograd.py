"""The Triton kernels of the short convolution as custom operators."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from mixer_kernels.common.launch import configurations, launch, operator_name, warn_if_unverified
from mixer_kernels.short_convolution import backward as backward_kernels
from mixer_kernels.short_convolution import forward as forward_kernels


@torch.library.custom_op(operator_name("short_convolution_forward"), mutates_args=())
def forward_op(x: Tensor, weight: Tensor, row_start: Tensor, silu: bool) -> Tensor:
    """y [B, T, D] of x [B, T, D], weight [D, S], row_start [B, T]."""
    x, weight, row_start = x.contiguous(), weight.contiguous(), row_start.contiguous()
    y, constants = torch.empty_like(x), _constants("convolve", weight, silu)
    launch(forward_kernels.convolve, _grid(x, constants), x, weight, row_start, y, x.shape[1], **constants)
    return y


@forward_op.register_fake
def _(x: Tensor, weight: Tensor, row_start: Tensor, silu: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op(operator_name("short_convolution_backward"), mutates_args=())
def backward_op(dy: Tensor, x: Tensor, weight: Tensor, row_start: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    dy, x, weight, row_start = dy.contiguous(), x.contiguous(), weight.contiguous(), row_start.contiguous()
    constants = _constants("gradients", weight, silu)
    grid = _grid(x, constants)
    dx, shares = torch.empty_like(x), x.new_empty(grid[1] * grid[2], *weight.T.shape, dtype=torch.float32)
    launch(backward_kernels.gradients, grid, x, weight, row_start, dy, dx, shares, x.shape[1], **constants)
    return dx, shares.sum(0).T.to(weight.dtype).contiguous()


@backward_op.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, row_start: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.silu = inputs[3]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *backward_op(dy, *ctx.saved_tensors, ctx.silu), None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)


def _constants(kernel: str, weight: Tensor, silu: bool) -> dict[str, Any]:
    if weight.is_cuda:
        warn_if_unverified("short_convolution", weight.device.index)
    sizes = {"D": weight.shape[0], "S": weight.shape[1], "SILU": silu}
    return sizes | configurations("short_convolution")["kernels"][kernel]


def _grid(x: Tensor, constants: dict[str, Any]) -> tuple[int, int, int]:
    return triton.cdiv(x.shape[2], constants["BD"]), triton.cdiv(x.shape[1], constants["BT"]), x.shape[0]
