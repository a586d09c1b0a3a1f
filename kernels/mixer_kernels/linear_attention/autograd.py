"""The Triton kernels as custom operators: what is launched, what is saved, and how gradients find their way."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixer_kernels.common.autograd import differentiable
from mixer_kernels.common.launch import configuration, launch, operator_name, plain, processors
from mixer_kernels.common.sizes import CHUNK, Sizes
from mixer_kernels.linear_attention import backward as backward_kernels
from mixer_kernels.linear_attention import forward as forward_kernels

FEWEST_CHUNKS = 8  # of a segment: below this the second pass over the keys costs more than it gains


class Saved(NamedTuple):
    """What backward needs beside the inputs; empty tensors where it needs nothing.

    `states` [B, HV, N, V, K] entering each chunk and `scores` [B, HV, N, C, C] in the inputs' dtype, and as
    `forward.scores` has them `read`, `write` [B, HV, N * C, K], under channel decay, in the inputs' dtype, else
    [B, HV, N * C, 1] in fp32; `through` [B, HV, N, K or 1] and, under channel decay, `steep` [B, HV, N] in fp32.
    Everything else is formed again.
    """

    states: Tensor
    scores: Tensor
    read: Tensor
    write: Tensor
    through: Tensor
    steep: Tensor

    @classmethod
    def empty(cls, like: Tensor, s: Sizes, save: bool) -> Saved:
        """Unwritten buffers. Without `save` no states are kept, which backward alone reads."""
        heads, channel = (s.B, s.HV, s.N), s.decay == 2
        rows = (s.B, s.HV, s.N * CHUNK, s.K if channel else 1)
        factors = like.dtype if channel else torch.float32

        def new(*shape: int, wanted: bool = True, dtype: torch.dtype = like.dtype) -> Tensor:
            return like.new_empty(shape if wanted else (0,), dtype=dtype)

        return cls(
            states=new(*heads, s.V, s.K, wanted=save),
            scores=new(*heads, CHUNK, CHUNK),
            read=new(*rows, dtype=factors),
            write=new(*rows, dtype=factors),
            through=new(*heads, rows[-1], dtype=torch.float32),
            steep=new(*heads, wanted=channel, dtype=torch.float32),
        )


def linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    row_start: Tensor,
    initial_state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, H, K], v [B, T, HV, V], g fp32 [B, T, HV, K or 1] -> o in v's dtype and the final state in fp32."""
    inputs = (q, k, v, g, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if not plain(*inputs, row_start):
        return forward_op(q, k, v, g, row_start, initial_state, scale, save)[:2]
    if save:
        return _eager(q, k, v, g, row_start, initial_state, scale)
    return forward(q, k, v, g, row_start, initial_state, scale, save)[:2]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    row_start: Tensor,
    initial_state: Tensor | None,
    scale: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, final state, and the tensors of `Saved`."""
    s = Sizes.of(q, v, g)
    q, k, v, row_start = q.contiguous(), k.contiguous(), v.contiguous(), row_start.contiguous()
    g = q if g is None else g.contiguous()
    enter = None if initial_state is None else initial_state.contiguous()
    saved = Saved.empty(q, s, save)
    _launch_scores(s, q, k, g, row_start, saved, scale)
    final = q.new_empty(s.state, dtype=torch.float32)
    o = _launch_scan(s, q, k, v, enter, final, saved, saved.states, reverse=False)
    return o, final, *saved


forward_op = torch.library.custom_op(operator_name("linear_attention_forward"), forward, mutates_args=())


@forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    row_start: Tensor,
    initial_state: Tensor | None,
    scale: float,
    save: bool,
) -> tuple[Tensor, ...]:
    s = Sizes.of(q, v, g)
    o, final = v.new_empty(v.shape), v.new_empty(s.state, dtype=torch.float32)
    return o, final, *Saved.empty(q, s, save)


def backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    row_start: Tensor,
    states: Tensor,
    scores: Tensor,
    read: Tensor,
    write: Tensor,
    through: Tensor,
    steep: Tensor,
    scale: float,
    continued: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g (empty without g) and the initial state (empty unless `continued` from one)."""
    s = Sizes.of(q, v, g)
    saved = Saved(states, scores, read, write, through, steep)
    do, q, k, v, row_start = do.contiguous(), q.contiguous(), k.contiguous(), v.contiguous(), row_start.contiguous()
    g = q if g is None else g.contiguous()
    enter = None if dfinal is None else dfinal.contiguous()
    dstates = torch.empty_like(states)
    dinitial = q.new_empty(s.state if continued else (0,), dtype=torch.float32)
    dv = _launch_scan(s, q, k, do, enter, dinitial if continued else None, saved, dstates, reverse=True)
    dq, dk, dg = _launch_gradients(s, q, k, v, g, row_start, do, dstates, saved, scale)
    return dq, dk, dv, dg, dinitial


backward_op = torch.library.custom_op(operator_name("linear_attention_backward"), backward, mutates_args=())


@backward_op.register_fake
def _(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    row_start: Tensor,
    states: Tensor,
    scores: Tensor,
    read: Tensor,
    write: Tensor,
    through: Tensor,
    steep: Tensor,
    scale: float,
    continued: bool,
) -> tuple[Tensor, ...]:
    dg = q.new_empty((0,), dtype=torch.float32) if g is None else g.new_empty(g.shape)
    dinitial = q.new_empty(Sizes.of(q, v, g).state if continued else (0,), dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dg, dinitial


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, g, row_start, initial_state, scale, *_ = inputs
    ctx.save_for_backward(q, k, v, g, row_start, *output[2:])
    ctx.scale, ctx.continued = scale, initial_state is not None
    ctx.set_materialize_grads(False)  # else autograd would fill zeros of the saved tensors' sizes


def _backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    q, k, v, g, row_start, *saved = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(v)
    run = backward if plain(do, dfinal, q, k, v) else backward_op
    dq, dk, dv, dg, dinitial = run(do, dfinal, q, k, v, g, row_start, *saved, ctx.scale, ctx.continued)
    return dq, dk, dv, None if g is None else dg, None, dinitial if ctx.continued else None, None, None


_eager = differentiable(forward, forward_op, _setup_context, _backward)


def _launch_scores(s: Sizes, q: Tensor, k: Tensor, g: Tensor, row_start: Tensor, saved: Saved, scale: float) -> None:
    """The scores of each chunk, and the keys and queries as the scan needs them."""
    sizes = {"H": s.H, "HV": s.HV, "K": s.K, "C": CHUNK}
    launch(
        forward_kernels.scores, (s.chunks,),
        q, k, g, row_start, saved.scores, saved.read, saved.write, saved.through, saved.steep, s.T, s.N, scale,
        DECAY=s.decay, **sizes, **_configuration(f"scores_{s.gates}", q, s),
    )  # fmt: skip
    if s.decay == 2:
        launch(
            forward_kernels.scores_steep, (s.chunks, CHUNK // forward_kernels.LEAF.value),
            q, k, g, row_start, saved.scores, saved.steep, s.T, s.N, scale,
            **sizes, **_configuration("steep_scores_channel", q, s),
        )  # fmt: skip


def _launch_scan(
    s: Sizes,
    q: Tensor,
    k: Tensor,
    values: Tensor,
    enter: Tensor | None,
    leave: Tensor | None,
    saved: Saved,
    states: Tensor,
    *,
    reverse: bool,
) -> Tensor:
    """The scan over chunks, in one segment or several at once: what it puts out. `enter` None is a state of zeros.

    The state that leaves the row is written to `leave`, if wanted.
    """
    settings = _configuration(f"scan_{s.gates}", values, s)
    blocks = s.V // settings["BV"]
    segments, per = _segments(s, blocks, values.device)
    out = torch.empty_like(values)
    operands = (saved.read, saved.write) if s.decay == 2 else (q, k)
    x, y = reversed(operands) if reverse else operands
    on_out, on_values = (saved.write, saved.read) if reverse else (saved.read, saved.write)

    def run(enter: Tensor | None, leave: Tensor | None, decay: Tensor, **flags: bool) -> None:
        launch(
            forward_kernels.scan, (s.B * s.HV * segments * blocks,),
            x, y, on_out, on_values, values, saved.scores, saved.through, saved.through if enter is None else enter,
            out, states, saved.through if leave is None else leave, decay, s.T, s.N, segments, per,
            H=s.H, HV=s.HV, K=s.K, V=s.V, C=CHUNK, CHANNEL_DECAY=s.decay == 2, REVERSE=reverse,
            ENTER=enter is not None, LEAVE=leave is not None, **flags, **settings,
        )  # fmt: skip

    decay = saved.through  # a placeholder, for with one segment its decay is of no interest
    if segments > 1:
        made = saved.through.new_empty(s.B, s.HV, segments, s.K, s.V)
        decay = saved.through.new_empty(s.B, s.HV, segments, s.K)
        run(None, made, decay, OUTPUT=False, SAVE=False)
        first, enter = enter, torch.empty_like(made)
        launch(
            forward_kernels.prefix, (s.B * s.HV, blocks),
            decay, made, decay if first is None else first, enter, segments,
            K=s.K, V=s.V, BV=settings["BV"], REVERSE=reverse, FIRST=first is not None,
        )  # fmt: skip
    run(enter, leave, decay, OUTPUT=True, SAVE=states.numel() > 0)
    return out


def _segments(s: Sizes, blocks: int, device: torch.device) -> tuple[int, int]:
    """In how many segments the scan cuts a row, and the chunks of each, so that few rows still fill the processors."""
    wanted = min(processors(device) // (s.B * s.HV * blocks), s.N // FEWEST_CHUNKS)
    per = -(-s.N // max(1, wanted))
    return -(-s.N // per), per


def _launch_gradients(
    s: Sizes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    row_start: Tensor,
    do: Tensor,
    dstates: Tensor,
    saved: Saved,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk [B, T, H, K] and dg, like g [B, T, HV, K or 1] (empty without)."""
    settings = _configuration(f"gradients_{s.gates}", q, s)
    blocks = s.K // settings["BK"]
    dq, dk = (q.new_empty(s.B, s.T, s.HV, s.K) for _ in range(2))
    shape = ((0,), (blocks, s.B, s.T, s.HV, 1), (s.B, s.T, s.HV, s.K))[s.decay]
    dg = q.new_empty(shape, dtype=torch.float32)
    sizes = {"H": s.H, "HV": s.HV, "K": s.K, "V": s.V, "C": CHUNK}
    launch(
        backward_kernels.gradients, (s.chunks, blocks),
        q, k, v, g, row_start, do, saved.states, dstates, saved.steep, dq, dk, dg, s.T, s.N, scale,
        DECAY=s.decay, **sizes, **settings,
    )  # fmt: skip
    if s.decay == 2:
        settings = _configuration("steep_gradients_channel", q, s)
        launch(
            backward_kernels.gradients_steep, (s.chunks, s.K // settings["BK"]),
            q, k, v, g, row_start, do, saved.steep, dq, dk, dg, s.T, s.N, scale, **sizes, **settings,
        )  # fmt: skip
    if s.decay == 1:
        dg = dg.sum(0) if blocks > 1 else dg.squeeze(0)
    if s.HV > s.H:  # value heads that share a query and key head: summed in a fixed order
        dq, dk = (x.unflatten(2, (s.H, -1)).sum(3) for x in (dq, dk))
    return dq, dk, dg


def _configuration(kernel: str, like: Tensor, s: Sizes) -> dict[str, int]:
    return configuration("linear_attention", kernel, like, s.K, s.V)
