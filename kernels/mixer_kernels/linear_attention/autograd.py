"""The Triton kernels as custom operators: what is launched, what is saved, and how gradients find their way."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixer_kernels.common.launch import configuration, operator_name, processors
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
    initial_state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, H, K], v [B, T, HV, V], g fp32 [B, T, HV, K or 1] -> o in v's dtype and the final state in fp32."""
    inputs = (q, k, v, g, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return forward_op(q, k, v, g, row_start, initial_state, scale, save)[:2]


@torch.library.custom_op(operator_name("linear_attention_forward"), mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    row_start: Tensor,
    initial_state: Tensor,
    scale: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, final state, and the tensors of `Saved`."""
    s = Sizes.of(q, v, g)
    q, k, v, row_start, initial_state = (x.contiguous() for x in (q, k, v, row_start, initial_state))
    g = q if g is None else g.contiguous()
    saved = Saved.empty(q, s, save)
    _launch_scores(s, q, k, g, row_start, saved, scale)
    o, final = _launch_scan(s, q, k, v, initial_state, saved, saved.states, reverse=False)
    return o, final, *saved


@forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    row_start: Tensor,
    initial_state: Tensor,
    scale: float,
    save: bool,
) -> tuple[Tensor, ...]:
    s = Sizes.of(q, v, g)
    o, final = v.new_empty(v.shape), v.new_empty(s.state, dtype=torch.float32)
    return o, final, *Saved.empty(q, s, save)


@torch.library.custom_op(operator_name("linear_attention_backward"), mutates_args=())
def backward_op(
    do: Tensor,
    dfinal: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g (empty without g) and the initial state."""
    s = Sizes.of(q, v, g)
    saved = Saved(states, scores, read, write, through, steep)
    do, dfinal, q, k, v, row_start = (x.contiguous() for x in (do, dfinal, q, k, v, row_start))
    g = q if g is None else g.contiguous()
    dstates = torch.empty_like(states)
    dv, dinitial = _launch_scan(s, q, k, do, dfinal, saved, dstates, reverse=True)
    dq, dk, dg = _launch_gradients(s, q, k, v, g, row_start, do, dstates, saved, scale)
    return dq, dk, dv, dg, dinitial


@backward_op.register_fake
def _(
    do: Tensor,
    dfinal: Tensor,
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
) -> tuple[Tensor, ...]:
    dg = q.new_empty((0,), dtype=torch.float32) if g is None else g.new_empty(g.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dg, dfinal.new_empty(dfinal.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, g, row_start, _, scale, _ = inputs
    ctx.save_for_backward(q, k, v, g, row_start, *output[2:])
    ctx.scale = scale
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)  # else autograd would fill zeros of the saved tensors' sizes


def _backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    q, k, v, g, row_start, *saved = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(v)
    if dfinal is None:
        dfinal = v.new_zeros(Sizes.of(q, v, g).state, dtype=torch.float32)
    dq, dk, dv, dg, dinitial = backward_op(do, dfinal, q, k, v, g, row_start, *saved, ctx.scale)
    return dq, dk, dv, None if g is None else dg, None, dinitial, None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)


def _launch_scores(s: Sizes, q: Tensor, k: Tensor, g: Tensor, row_start: Tensor, saved: Saved, scale: float) -> None:
    """The scores of each chunk, and the keys and queries as the scan needs them."""
    sizes = {"H": s.H, "HV": s.HV, "K": s.K, "C": CHUNK}
    forward_kernels.scores[(s.chunks,)](
        q, k, g, row_start, saved.scores, saved.read, saved.write, saved.through, saved.steep, s.T, s.N, scale,
        DECAY=s.decay, **sizes, **_configuration(f"scores_{s.gates}", q, s),
    )  # fmt: skip
    if s.decay == 2:
        forward_kernels.scores_steep[(s.chunks, CHUNK // forward_kernels.LEAF.value)](
            q, k, g, row_start, saved.scores, saved.steep, s.T, s.N, scale, **sizes,
            **_configuration("steep_scores_channel", q, s),
        )  # fmt: skip


def _launch_scan(
    s: Sizes,
    q: Tensor,
    k: Tensor,
    values: Tensor,
    enter: Tensor,
    saved: Saved,
    states: Tensor,
    *,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """The scan over chunks, in one segment or several at once: what it puts out, and the state that leaves the row."""
    settings = _configuration(f"scan_{s.gates}", values, s)
    blocks = s.V // settings["BV"]
    segments, per = _segments(s, blocks, values.device)
    out, leave = torch.empty_like(values), torch.empty_like(enter)
    operands = (saved.read, saved.write) if s.decay == 2 else (q, k)
    x, y = reversed(operands) if reverse else operands
    on_out, on_values = (saved.write, saved.read) if reverse else (saved.read, saved.write)

    def launch(enter: Tensor, leave: Tensor, decay: Tensor, **flags: bool) -> None:
        forward_kernels.scan[(s.B * s.HV * segments * blocks,)](
            x, y, on_out, on_values, values, saved.scores, saved.through, enter, out, states, leave, decay,
            s.T, s.N, segments, per,
            H=s.H, HV=s.HV, K=s.K, V=s.V, C=CHUNK, CHANNEL_DECAY=s.decay == 2, REVERSE=reverse, **flags, **settings,
        )  # fmt: skip

    decay = enter  # a placeholder, for with one segment its decay is of no interest
    if segments > 1:
        made = enter.new_empty(s.B, s.HV, segments, s.K, s.V)
        decay = enter.new_empty(s.B, s.HV, segments, s.K)
        launch(enter, made, decay, OUTPUT=False, SAVE=False)
        first, enter = enter, torch.empty_like(made)
        forward_kernels.prefix[(s.B * s.HV, blocks)](
            decay, made, first, enter, segments, K=s.K, V=s.V, BV=settings["BV"], REVERSE=reverse
        )
    launch(enter, leave, decay, OUTPUT=True, SAVE=states.numel() > 0)
    return out, leave


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
    backward_kernels.gradients[(s.chunks, blocks)](
        q, k, v, g, row_start, do, saved.states, dstates, saved.steep, dq, dk, dg, s.T, s.N, scale,
        DECAY=s.decay, **sizes, **settings,
    )  # fmt: skip
    if s.decay == 2:
        settings = _configuration("steep_gradients_channel", q, s)
        backward_kernels.gradients_steep[(s.chunks, s.K // settings["BK"])](
            q, k, v, g, row_start, do, saved.steep, dq, dk, dg, s.T, s.N, scale, **sizes, **settings
        )
    if s.decay == 1:
        dg = dg.sum(0) if blocks > 1 else dg.squeeze(0)
    if s.HV > s.H:  # value heads that share a query and key head: summed in a fixed order
        dq, dk = (x.unflatten(2, (s.H, -1)).sum(3) for x in (dq, dk))
    return dq, dk, dg


def _configuration(kernel: str, like: Tensor, s: Sizes) -> dict[str, int]:
    return configuration("linear_attention", kernel, like, s.K, s.V)
