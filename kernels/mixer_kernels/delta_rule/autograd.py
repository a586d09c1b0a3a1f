"""The Triton kernels as custom operators: what is launched, what is saved, and how gradients find their way."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from mixer_kernels.common.autograd import differentiable
from mixer_kernels.common.launch import configuration, launch, operator_name, plain, processors
from mixer_kernels.common.sizes import CHUNK, Sizes
from mixer_kernels.delta_rule import backward as backward_kernels
from mixer_kernels.delta_rule import forward as forward_kernels

FEWEST_CHUNKS, MOST_CHUNKS = 8, 512  # of a segment; the longer, the more rounding is in what it does to a state
FEWEST_SEGMENTS = 3  # below this the pass that finds what each segment does costs more than it gains


class Saved(NamedTuple):
    """What backward needs beside the inputs, as `forward.py` has it; empty tensors where a kind of decay needs none.

    In the inputs' dtype A and P [B, HV, N, C, C], the states [B, HV, N, V, K] that enter chunks and the residuals R
    [B, HV, N, V, C], and under channel decay q_in, e_in and k_out [B, HV, N * C, K]; in fp32 row vectors
    [B, HV, N, 3, C], gamma [B, HV, N, K] and halves [B, HV, N, 2, K]; steep int32 [B, HV, N]. Where rows are scanned in
    segments fp32 effects [B, HV, segments, V + K, K].
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
    halves: Tensor
    steep: Tensor
    effects: Tensor

    @classmethod
    def empty(cls, like: Tensor, s: Sizes, save: bool) -> Saved:
        """Unwritten buffers. Without `save`, states and residuals are not kept: backward alone reads them."""
        heads, channel = (s.B, s.HV, s.N), s.decay == 2
        segments, _ = _segments(s, like.device)

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
            halves=new(*heads, 2, s.K, wanted=channel, dtype=torch.float32),
            steep=new(*heads, wanted=channel, dtype=torch.int32),
            effects=new(*heads[:2], segments, s.V + s.K, s.K, wanted=segments > 1, dtype=torch.float32),
        )


def delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    e: Tensor | None,
    row_start: Tensor,
    initial_state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, H, K], v [B, T, HV, V], fp32 g [B, T, HV, K or 1], and for the tied form fp32 beta [B, T, HV] or for
    the free one erase keys e [B, T, HV, K] -> o, final state."""
    if beta is None and e is None:
        beta = v.new_ones(v.shape[:3], dtype=torch.float32)
    inputs = (q, k, v, g, beta, e, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if not plain(*inputs, row_start):
        return forward_op(q, k, v, g, beta, e, row_start, initial_state, scale, save)[:2]
    if save:
        return _eager(q, k, v, g, beta, e, row_start, initial_state, scale)
    return forward(q, k, v, g, beta, e, row_start, initial_state, scale, save)[:2]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    e: Tensor | None,
    row_start: Tensor,
    initial_state: Tensor | None,
    scale: float,
    save: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:
    """o, final state, and the tensors of `Saved`."""
    s = Sizes.of(q, v, g)
    q, k, v, row_start, *gates = _contiguous(q, k, v, row_start, g, beta, e)
    saved = Saved.empty(q, s, save)
    _launch_prepare(s, q, k, *gates, row_start, saved, scale, e is None)
    o, final = _launch_scan(s, q, k, gates[2], v, initial_state, saved, scale, save, e is None)
    return o, final, *saved


forward_op = torch.library.custom_op(operator_name("delta_rule_forward"), forward, mutates_args=())


@forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    e: Tensor | None,
    row_start: Tensor,
    initial_state: Tensor | None,
    scale: float,
    save: bool,
) -> tuple[Tensor, ...]:
    s = Sizes.of(q, v, g)
    return v.new_empty(v.shape), v.new_empty(s.state, dtype=torch.float32), *Saved.empty(q, s, save)


def backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    e: Tensor | None,
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
    halves: Tensor,
    steep: Tensor,
    effects: Tensor,
    scale: float,
    continued: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta, e (empty where absent), initial state (empty unless `continued` from one)."""
    s = Sizes.of(q, v, g)
    saved = Saved(A, P, vectors, states, residuals, q_in, e_in, k_out, gamma, halves, steep, effects)
    tied, do = e is None, do.contiguous()
    q, k, v, row_start, *gates = _contiguous(q, k, v, row_start, g, beta, e)
    dz, dstates, dinitial = _launch_reverse_scan(s, q, k, gates[2], do, dfinal, saved, scale, tied, continued)
    return *_launch_gradients(s, q, k, v, *gates, row_start, do, dz, dstates, saved, scale, tied), dinitial


backward_op = torch.library.custom_op(operator_name("delta_rule_backward"), backward, mutates_args=())


@backward_op.register_fake
def _(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    e: Tensor | None,
    row_start: Tensor,
    *others: Any,
) -> tuple[Tensor, ...]:
    dinitial = q.new_empty(Sizes.of(q, v, g).state if others[-1] else (0,), dtype=torch.float32)
    given = (x.new_empty(x.shape) for x in (q, k, v))
    gates = (q.new_empty((0,), dtype=torch.float32) if x is None else x.new_empty(x.shape) for x in (g, beta))
    return *given, *gates, q.new_empty((0,)) if e is None else e.new_empty(e.shape), dinitial


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, g, beta, e, row_start, initial_state, scale, *_ = inputs
    ctx.save_for_backward(q, k, v, g, beta, e, row_start, *output[2:])
    ctx.scale, ctx.continued = scale, initial_state is not None
    ctx.set_materialize_grads(False)  # else autograd would fill zeros of the saved tensors' sizes


def _backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    q, k, v, g, beta, e, row_start, *saved = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(v)
    run = backward if plain(do, dfinal, q, k, v) else backward_op
    grads = run(do, dfinal, q, k, v, g, beta, e, row_start, *saved, ctx.scale, ctx.continued)
    dq, dk, dv, *dgates, dinitial = grads
    dgates = (None if x is None else dx for x, dx in zip((g, beta, e), dgates, strict=True))
    return dq, dk, dv, *dgates, None, dinitial if ctx.continued else None, None, None


_eager = differentiable(forward, forward_op, _setup_context, _backward)


def _contiguous(q: Tensor, k: Tensor, v: Tensor, row_start: Tensor, *gates: Tensor | None) -> list[Tensor]:
    """The inputs as kernels read them; q stands in for a gate that is not given, which they do not read."""
    return [x.contiguous() for x in (q, k, v, row_start, *(q if x is None else x for x in gates))]


def _launch_prepare(
    s: Sizes,
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    e: Tensor,
    row_start: Tensor,
    saved: Saved,
    scale: float,
    tied: bool,
) -> None:
    """All that the scans need and that does not depend on the state."""
    sizes = {"H": s.H, "HV": s.HV, "K": s.K, "C": CHUNK, "TIED": tied, "EXACT": q.dtype == torch.float32}
    inputs, out, rest = (q, k, e, g, beta, row_start), (saved.A, saved.P, saved.vectors), (s.T, s.N, scale)
    settings = _configuration(f"prepare_{s.gates}", q, s)
    if s.decay < 2:
        constants = {"DECAY": s.decay, "WIDE": _wide(q), **sizes, **settings}
        launch(forward_kernels.prepare_scalar, (s.chunks,), *inputs, *out, *rest, **constants)
        return
    out += (saved.q_in, saved.e_in, saved.k_out, saved.gamma)
    triangle = _triangle(q.dtype, q.device)
    launch(
        forward_kernels.prepare_channel, (s.chunks,), *inputs, triangle, *out, saved.halves, saved.steep, *rest,
        **sizes, **settings,
    )  # fmt: skip
    launch(
        forward_kernels.prepare_steep, (_groups(s),), *inputs, saved.steep, *out, *rest, s.chunks,
        LEAF=_leaf(q), **sizes, **_configuration("steep_prepare_channel", q, s),
    )  # fmt: skip


def _scan_operands(s: Sizes, q: Tensor, k: Tensor, e: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and e of the scans: decayed copies, or as they are where decay is a scaling of rows."""
    return (saved.q_in, saved.k_out, saved.e_in) if s.decay == 2 else (q, k, e)


def _launch_scan(
    s: Sizes,
    q: Tensor,
    k: Tensor,
    e: Tensor,
    v: Tensor,
    initial: Tensor | None,
    saved: Saved,
    scale: float,
    save: bool,
    tied: bool,
) -> tuple[Tensor, Tensor]:
    """The scan over chunks, in one segment or several at once: outputs and the last state. None: a state of zeros."""
    segments, per = _segments(s, v.device)
    settings = _configuration(f"{'segment_' if segments > 1 else ''}scan_{s.gates}", v, s)
    o, final = torch.empty_like(v), saved.vectors.new_empty(s.state)

    def run(rows: int, enter: Tensor | None, leave: Tensor, settings: dict[str, int], **flags: bool) -> None:
        launch(
            forward_kernels.scan, (s.B * s.HV * segments * (rows // settings["BV"]),),
            *_scan_operands(s, q, k, e, saved), v, saved.A, saved.P, saved.vectors, saved.gamma,
            leave if enter is None else enter, o, saved.states, saved.residuals, leave, s.T, s.N, scale, segments, per,
            H=s.H, HV=s.HV, K=s.K, V=s.V, C=CHUNK, CHANNEL_DECAY=s.decay == 2, TIED=tied, ENTER=enter is not None,
            **flags, **settings,
        )  # fmt: skip

    enter = None if initial is None else initial.contiguous()
    if segments > 1:
        narrow = settings | {"BV": min(settings["BV"], s.K)}  # a block is of values or of the map
        run(s.V + s.K, None, saved.effects, narrow, OUTPUT=False, SAVE=False)
        enter = _join(s, saved.effects, saved.effects, enter, segments, reverse=False)
    run(s.V, enter, final, settings, OUTPUT=True, SAVE=save)
    return o, final


def _launch_reverse_scan(
    s: Sizes,
    q: Tensor,
    k: Tensor,
    e: Tensor,
    do: Tensor,
    dfinal: Tensor | None,
    saved: Saved,
    scale: float,
    tied: bool,
    continued: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of z, of the states that leave chunks and of the initial state (empty unless `continued`)."""
    segments, per = _segments(s, do.device)
    settings = _configuration(f"{'segment_' if segments > 1 else ''}reverse_scan_{s.gates}", do, s)
    dz, dstates = torch.empty_like(saved.residuals), torch.empty_like(saved.states)
    dinitial = saved.vectors.new_empty(s.state if continued else (0,))

    def run(enter: Tensor | None, leave: Tensor, **flags: bool) -> None:
        launch(
            backward_kernels.reverse_scan, (s.B * s.HV * segments * (s.V // settings["BV"]),),
            *_scan_operands(s, q, k, e, saved), do, saved.A, saved.P, saved.vectors, saved.gamma,
            leave if enter is None else enter, dz, dstates, leave, s.T, s.N, scale, segments, per,
            H=s.H, HV=s.HV, K=s.K, V=s.V, C=CHUNK, CHANNEL_DECAY=s.decay == 2, TIED=tied, ENTER=enter is not None,
            **flags, **settings,
        )  # fmt: skip

    enter = None if dfinal is None else dfinal.contiguous()
    if segments > 1:
        made = dinitial.new_empty(s.B, s.HV, segments, s.V, s.K)
        run(None, made, OUTPUT=False, LEAVE=True)
        enter = _join(s, made, saved.effects, enter, segments, reverse=True)
    run(enter, dinitial, OUTPUT=True, LEAVE=continued)
    return dz, dstates, dinitial


def _join(s: Sizes, made: Tensor, maps: Tensor, first: Tensor | None, segments: int, *, reverse: bool) -> Tensor:
    """The state, or its gradient, that enters each segment, [B, HV, segments, K, V]."""
    enter = made.new_empty(s.B, s.HV, segments, s.K, s.V)
    settings = configuration("delta_rule", "join", made, s.K, s.V)
    launch(
        forward_kernels.join, (s.B * s.HV, s.V // settings["BV"]),
        made, maps, made if first is None else first, enter, segments,
        K=s.K, V=s.V, MADE=made.shape[-2], FIRST=first is not None, REVERSE=reverse, **settings,
    )  # fmt: skip
    return enter


def _segments(s: Sizes, device: torch.device) -> tuple[int, int]:
    """In how many segments the scans cut a row, and the chunks of each, so that few rows still fill the processors.

    These hold two programs of 64 values each.
    """
    wanted = min(2 * processors(device) // (s.B * s.HV * -(-s.V // 64)), s.N // FEWEST_CHUNKS)
    if wanted < FEWEST_SEGMENTS:
        return 1, s.N
    per = min(-(-s.N // wanted), MOST_CHUNKS)
    return -(-s.N // per), per


def _launch_gradients(
    s: Sizes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    e: Tensor,
    row_start: Tensor,
    do: Tensor,
    dz: Tensor,
    dstates: Tensor,
    saved: Saved,
    scale: float,
    tied: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg, dbeta, de in the shapes and dtypes of what they are gradients of, empty where that is absent."""
    settings = _configuration(f"gradients_{s.gates}", q, s)
    blocks, groups = s.K // settings["BK"], s.HV // s.H
    dq, dk = (q.new_empty(s.B, s.T, s.HV, s.K, dtype=q.dtype if groups == 1 else torch.float32) for _ in range(2))
    rows, new = (s.B, s.T, s.HV), saved.vectors.new_empty  # fp32
    dbeta, de = (new(1 + blocks, *rows), e.new_empty(0)) if tied else (new(0), torch.empty_like(e))
    dv, dg = torch.empty_like(v), new(((0,), (blocks, *rows, 1), (*rows, s.K))[s.decay])
    dP, dT, same = torch.empty_like(saved.A), torch.empty_like(saved.A), new(s.chunks, CHUNK)
    sizes = {"H": s.H, "HV": s.HV, "V": s.V, "C": CHUNK, "TIED": tied}
    launch(
        backward_kernels.pair_gradients, (s.chunks,),
        v, g, beta, row_start, do, saved.residuals, dz, dP, dT, same, dv, dbeta, s.T, s.N, scale,
        SCALAR_DECAY=s.decay == 1, WIDE=_wide(q), **sizes, **_configuration(f"pair_gradients_{s.gates}", q, s),
    )  # fmt: skip
    operands = (do, saved.states, dstates, saved.residuals, dz, dP, dT, same, dq, dk, de, dg, dbeta)
    operands += (s.T, s.N, scale, s.B * s.T * s.HV)
    launch(
        backward_kernels.gradients, (s.chunks * blocks,),
        q, k, e, g, beta, row_start, _triangle(q.dtype, q.device), saved.gamma, saved.halves, saved.steep, *operands,
        K=s.K, DECAY=s.decay, WIDE=_wide(q), **sizes, **settings,
    )  # fmt: skip
    if s.decay == 2:
        steep = _configuration("steep_gradients_channel", q, s) | {"BK": settings["BK"]}
        launch(
            backward_kernels.gradients_steep, (_groups(s) * blocks,),
            q, k, e, g, beta, row_start, saved.gamma, saved.steep, *operands, s.chunks,
            K=s.K, LEAF=_leaf(q), **sizes, **steep,
        )  # fmt: skip
    dbeta = dbeta.sum(0) if tied else dbeta
    if s.decay == 1:
        dg = dg.sum(0) if blocks > 1 else dg.squeeze(0)
    if groups > 1:  # value heads that share a query and key head: summed in a fixed order
        dq, dk = (x.unflatten(2, (s.H, groups)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta, de


def _configuration(kernel: str, like: Tensor, s: Sizes) -> dict[str, int]:
    return configuration("delta_rule", kernel, like, s.K, s.V)


def _groups(s: Sizes) -> int:
    """Programs of a kernel that looks for steep chunks."""
    return -(-s.chunks // forward_kernels.GROUP.value)


@functools.cache
def _triangle(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Ones on and below the diagonal [C, C]."""
    return torch.ones(CHUNK, CHUNK, dtype=dtype, device=device).tril()


def _leaf(like: Tensor) -> int:
    """log2 of half the rows of the smallest groups in halving: fp32 takes smaller ones, for more exact factors."""
    return 2 if like.dtype == torch.bfloat16 else 0


def _wide(like: Tensor) -> tl.dtype:
    """The dtype of sums whose differences are taken: exact enough not to show in the results' dtype."""
    return tl.float32 if like.dtype == torch.bfloat16 else tl.float64
