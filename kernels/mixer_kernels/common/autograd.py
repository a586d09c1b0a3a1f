"""How gradients find their way, for operators that run as torch's custom operators and without its library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

RESULTS = 2  # o and the final state; what an operator puts out behind them is saved for backward


def differentiable(
    forward: Callable[..., tuple],
    forward_op: torch.library.CustomOpDef,
    setup_context: Callable[[Any, tuple, tuple], None],
    backward: Callable[..., tuple[Tensor | None, ...]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Give `forward_op` gradients, and return the same for eager mode, without torch's library.

    `forward` is what `forward_op` runs, whose last argument says whether to save; what is returned takes all arguments
    but that and returns the results alone. `backward(ctx, do, dfinal, ...)` returns a gradient for each argument.
    """

    def setup_traced(ctx: Any, inputs: tuple, output: tuple) -> None:
        setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[RESULTS:])

    forward_op.register_autograd(backward, setup_context=setup_traced)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
            output = forward(*inputs, save=True)
            setup_context(ctx, (*inputs, True), output)
            return output[:RESULTS]

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return backward(ctx, *grads)[:-1]

    return Eager.apply
