"""The Triton kernels as custom operators: what is launched, what is saved, and how gradients find their way."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from mixer_kernels.common.launch import configuration, operator_name
from mixer_kernels.common.sizes import CHUNK, Sizes
from mixer_kernels.delta_rule import backward as backward_kernels
from mixer_kernels.delta_rule import forward as forward_kernels


class Saved(NamedTuple):
    """What backward needs beside the inputs, as `forward.py` has it; empty tensors where a kind of decay needs none.

    In the inputs' dtype A and P [B, HV, N, C, C], the states [B, HV, N, V, K] that enter chunks and the residuals R
    [B, HV, N, V, C], and under channel decay q_in, e_in and k_out [B, HV, N * C, K]; in fp32 row vectors
    [B, HV, N, 3, C] and gamma [B, HV, N, K].
    """

    A: Tensor
    P: Tensor
    vectors: Tensor
    states: Tensor
    residuals: Tensor
    q_in: Tensor
    e_in: Tensor
    k_out: Tensor
    gamma: Tensor

    @classmethod
    def empty(cls, like: Tensor, s: Sizes, save: bool) -> Saved:
        """Unwritten buffers. Without `save`, states and residuals are not kept: backward alone reads them."""
        heads, channel = (s.B, s.HV, s.N), s.decay == 2

        def new(*shape: int, wanted: bool = True, dtype: torch.dtype = like.dtype) -> Tensor:
            return like.new_empty(shape if wanted else (0,), dtype=dtype)

        return cls(
            A=new(*heads, CHUNK, CHUNK),
            P=new(*heads, CHUNK, CHUNK),
            vectors=new(*heads, 3, CHUNK, dtype=torch.float32),
            states=new(*heads, s.V, s.K, wanted=save),
            residuals=new(*heads, s.V, CHUNK, wanted=save),
            q_in=new(*heads[:2], s.N * CHUNK, s.K, wanted=channel),
            e_in=new(*heads[:2], s.N * CHUNK, s.K, wanted=channel),
            k_out=new(*heads[:2], s.N * CHUNK, s.K, wanted=channel),
            gamma=new(*heads, s.K, wanted=channel, dtype=torch.float32),
        )


def delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    row_start: Tensor,
    initial_state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Tied: q, k [B, T, H, K], v [B, T, HV, V], fp32 g [B, T, HV, K or 1], beta [B, T, HV] -> o, final state."""
    if beta is None:
        beta = v.new_ones(v.shape[:3], dtype=torch.float32)
    inputs = (q, k, v, g, beta, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return forward_op(q, k, v, g, beta, row_start, initial_state, scale, save)[:2]


@torch.library.custom_op(operator_name("delta_rule_forward"), mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    row_start: Tensor,
    initial_state: Tensor,
    scale: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, final state, and the tensors of `Saved`."""
    s = Sizes.of(q, v, g)
    q, k, v, beta, row_start, initial_state = (x.contiguous() for x in (q, k, v, beta, row_start, initial_state))
    g = beta if g is None else g.contiguous()  # without decay a placeholder
    saved = Saved.empty(q, s, save)
    _launch_prepare(s, q, k, g, beta, row_start, saved, scale)
    o, final = torch.empty_like(v), torch.empty_like(initial_state)
    settings = _configuration("scan", v, s)
    forward_kernels.scan[(s.B * s.HV * (s.V // settings["BV"]),)](
        *_scan_operands(s, q, k, saved), v, saved.A, saved.P, saved.vectors, saved.gamma, initial_state, o,
        saved.states, saved.residuals, final, s.T, s.N, scale,
        H=s.H, HV=s.HV, K=s.K, V=s.V, C=CHUNK, CHANNEL_DECAY=s.decay == 2, SAVE=save, **settings,
    )  # fmt: skip
    return o, final, *saved


@forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    row_start: Tensor,
    initial_state: Tensor,
    scale: float,
    save: bool,
) -> tuple[Tensor, ...]:
    s = Sizes.of(q, v, g)
    return v.new_empty(v.shape), v.new_empty(s.state, dtype=torch.float32), *Saved.empty(q, s, save)


@torch.library.custom_op(operator_name("delta_rule_backward"), mutates_args=())
def backward_op(
    do: Tensor,
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    row_start: Tensor,
    A: Tensor,
    P: Tensor,
    vectors: Tensor,
    states: Tensor,
    residuals: Tensor,
    q_in: Tensor,
    e_in: Tensor,
    k_out: Tensor,
    gamma: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g (empty without g), beta and the initial state."""
    s = Sizes.of(q, v, g)
    saved = Saved(A, P, vectors, states, residuals, q_in, e_in, k_out, gamma)
    do, dfinal, q, k, v, beta, row_start = (x.contiguous() for x in (do, dfinal, q, k, v, beta, row_start))
    g = beta if g is None else g.contiguous()
    dz, dstates, dinitial = torch.empty_like(residuals), torch.empty_like(states), torch.empty_like(dfinal)
    settings = _configuration("reverse_scan", v, s)
    backward_kernels.reverse_scan[(s.B * s.HV * (s.V // settings["BV"]),)](
        *_scan_operands(s, q, k, saved), do, A, P, vectors, gamma, dfinal, dz, dstates, dinitial, s.T, s.N, scale,
        H=s.H, HV=s.HV, K=s.K, V=s.V, C=CHUNK, CHANNEL_DECAY=s.decay == 2, **settings,
    )  # fmt: skip
    dq, dk, dv, dg, dbeta = _launch_gradients(s, q, k, v, g, beta, row_start, do, dz, dstates, saved, scale)
    return dq, dk, dv, dg, dbeta, dinitial


@backward_op.register_fake
def _(
    do: Tensor,
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    row_start: Tensor,
    *saved_and_scale: Any,
) -> tuple[Tensor, ...]:
    dg = beta.new_empty((0,)) if g is None else g.new_empty(g.shape)
    same = (x.new_empty(x.shape) for x in (q, k, v))
    return *same, dg, beta.new_empty(beta.shape), dfinal.new_empty(dfinal.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, g, beta, row_start, _, scale, _ = inputs
    ctx.save_for_backward(q, k, v, g, beta, row_start, *output[2:])
    ctx.scale = scale
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)  # else autograd would fill zeros of the saved tensors' sizes


def _backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    q, k, v, g, beta, row_start, *saved = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(v)
    if dfinal is None:
        dfinal = v.new_zeros(Sizes.of(q, v, g).state, dtype=torch.float32)
    grads = backward_op(do, dfinal, q, k, v, g, beta, row_start, *saved, ctx.scale)
    dq, dk, dv, dg, dbeta, dinitial = grads
    return dq, dk, dv, None if g is None else dg, dbeta, None, dinitial, None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)


def _launch_prepare(
    s: Sizes, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, row_start: Tensor, saved: Saved, scale: float
) -> None:
    """All that the scans need and that does not depend on the state."""
    sizes = {"H": s.H, "HV": s.HV, "K": s.K, "C": CHUNK, "PRECISION": _precision(q)}
    sizes |= _configuration("prepare", q, s)
    inputs, out = (q, k, g, beta, row_start), (saved.A, saved.P, saved.vectors)
    if s.decay == 2:
        out += (saved.q_in, saved.e_in, saved.k_out, saved.gamma)
        forward_kernels.prepare_channel[(s.chunks,)](*inputs, *out, s.T, s.N, scale, **sizes)
    else:
        forward_kernels.prepare_scalar[(s.chunks,)](
            *inputs, *out, s.T, s.N, scale, DECAY=s.decay, WIDE=_wide(q), **sizes
        )


def _scan_operands(s: Sizes, q: Tensor, k: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and e of the scans: decayed copies, or as they are where decay is a scaling of rows."""
    return (saved.q_in, saved.k_out, saved.e_in) if s.decay == 2 else (q, k, k)


def _launch_gradients(
    s: Sizes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    row_start: Tensor,
    do: Tensor,
    dz: Tensor,
    dstates: Tensor,
    saved: Saved,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg (empty without decay) and dbeta, in the shapes and dtypes of what they are gradients of."""
    settings = _configuration("gradients", q, s)
    blocks, groups = s.K // settings["BK"], s.HV // s.H
    dq, dk = (q.new_empty(s.B, s.T, s.HV, s.K, dtype=q.dtype if groups == 1 else torch.float32) for _ in range(2))
    dv, dbeta = torch.empty_like(v), beta.new_empty(blocks, *beta.shape)
    dg = beta.new_empty(((0,), (blocks, *beta.shape, 1), (*beta.shape, s.K))[s.decay])
    backward_kernels.gradients[(s.chunks * blocks,)](
        q, k, v, g, beta, row_start, saved.gamma, do, saved.states, dstates, saved.residuals, dz, dq, dk, dv, dg, dbeta,
        s.T, s.N, scale, beta.numel(),
        H=s.H, HV=s.HV, K=s.K, V=s.V, C=CHUNK, DECAY=s.decay, WIDE=_wide(q), **settings,
    )  # fmt: skip
    dbeta = dbeta.sum(0) if blocks > 1 else dbeta.squeeze(0)
    if s.decay == 1:
        dg = dg.sum(0) if blocks > 1 else dg.squeeze(0)
    if groups > 1:  # value heads that share a query and key head: summed in a fixed order
        dq, dk = (x.unflatten(2, (s.H, groups)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta


def _configuration(kernel: str, like: Tensor, s: Sizes) -> dict[str, int]:
    kind = "channel" if s.decay == 2 else "scalar"
    return configuration("delta_rule", f"{kernel}_{kind}", like, s.K, s.V)


def _precision(like: Tensor) -> str:
    """Of the inverse's products: exact to 2^-16 where the inverse is rounded to bf16, else fp32.

    Three tf32 products are not enough there: their errors add up over the levels, up to 1.75 times the error budget.
    """
    return "bf16x3" if like.dtype == torch.bfloat16 else "ieee"


def _wide(like: Tensor) -> tl.dtype:
    """The dtype of sums whose differences are taken: exact enough not to show in the results' dtype."""
    return tl.float32 if like.dtype == torch.bfloat16 else tl.float64
