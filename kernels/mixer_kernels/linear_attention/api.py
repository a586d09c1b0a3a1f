"""Linear attention: the public functions. They validate, cast and choose an implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from mixer_kernels.common.arguments import (
    accumulation_dtype,
    autocast_inputs,
    autocast_off,
    expect,
    narrowed,
    resolve_segments,
    resolve_state,
    same_dtype,
    value_groups,
    widened,
)
from mixer_kernels.dispatch import choose
from mixer_kernels.linear_attention import reference
from mixer_kernels.linear_attention.chunked import chunked
from mixer_kernels.segments import Segments

TRITON_KEY_DIMS = (16, 32, 64, 128, 256)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gv: Tensor | None = None,
    *,
    segments: Segments | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    exclusive: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S_t = Diag(exp g_t) S_{t-1} Diag(exp gv_t) + k_t v_t^T and o_t = scale * S_t^T q_t, over rows of documents.

    q, k [B, T, H, K]; v [B, T, HV, V] with HV a multiple of H: value head i goes with query and key head i // (HV / H).
    g: log-decay <= 0, None, [B, T, HV] a head or [B, T, HV, K] a key channel; gv [B, T, HV, V] a value channel. Gates
    are taken in fp32 or better, also under autocast. `exclusive` reads after the token's decay and before its write.
    `segments` None is one document a row, which continues from `initial_state` [B, HV, K, V] if that is given.
    `scale` None is K ** -0.5.

    Returns o [B, T, HV, V] in v's dtype, and the state after the last token, fp32 [B, HV, K, V] (fp64 for fp64 inputs).
    Raises ValueError for shapes and dtypes that do not fit, and for an `impl` that cannot run here.
    """
    _validate(q, k, v, g, gv, ("B", "T"))
    q, k, v = autocast_inputs(q, k, v)
    batch, tokens, _, key_dim = q.shape
    row_start = resolve_segments(segments, batch, tokens, initial_state is not None, q.device)
    scale = key_dim**-0.5 if scale is None else scale
    chosen = choose(impl, q, "linear_attention", lacks=_lacks(v, key_dim, gv, exclusive))
    shape = (batch, v.shape[2], key_dim, v.shape[3])
    if chosen == "triton":
        from mixer_kernels.linear_attention.autograd import linear_attention_triton

        state = None if initial_state is None else resolve_state(initial_state, shape, v, "initial_state")
        operands = _to_kernel_sizes(q, k, v, _gates(g, gv, v)[0], state)
        o, final = linear_attention_triton(*operands[:4], row_start, operands[4], scale)
        return narrowed(o, v.shape[-1]), narrowed(final, key_dim, v.shape[-1])
    run = chunked if chosen == "chunked" else reference.recurrence
    with autocast_off(q):
        state = resolve_state(initial_state, shape, v, "initial_state")
        return run(q, k, v, *_gates(g, gv, v), row_start, state, scale, exclusive)


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gv: Tensor | None = None,
    *,
    state: Tensor,
    scale: float | None = None,
    exclusive: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One more token of each row: the arguments of `linear_attention` without the token axis, and the state so far.

    Returns o [B, HV, V] in v's dtype and the new state; the given state is left as it is.
    """
    _validate(q, k, v, g, gv, ("B",))
    q, k, v = autocast_inputs(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with autocast_off(q):
        g, gv = _gates(g, gv, v)
        state = resolve_state(state, (q.shape[0], v.shape[1], q.shape[2], v.shape[2]), v, "state")
        lacks = _lacks(v, q.shape[2], gv, exclusive)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, g, gv, state)):
            lacks = lacks or "inputs that require gradients (a step)"
        if choose(impl, q, "linear_attention", lacks) == "triton":
            from mixer_kernels.linear_attention.step import step_triton

            o, new = step_triton(*_to_kernel_sizes(q, k, v, g, state), scale)
            return narrowed(o, v.shape[-1]), narrowed(new, q.shape[-1], v.shape[-1])
        groups = v.shape[1] // q.shape[1]
        q_wide, k_wide = (x.to(state.dtype).repeat_interleave(groups, dim=1) for x in (q, k))  # [B, HV, K]
        o, state = reference.step(q_wide, k_wide, v.to(state.dtype), g, gv, state, scale, exclusive)
        return o.to(v.dtype), state


def _lacks(v: Tensor, key_dim: int, gv: Tensor | None, exclusive: bool) -> str:
    """What the Triton kernels do not take; "" if they take these inputs."""
    found = {
        "gv": gv is not None,
        "exclusive=True": exclusive,
        "float16 or float64": v.dtype in (torch.float16, torch.float64),
        f"K = {key_dim} (at most {TRITON_KEY_DIMS[-1]})": key_dim > TRITON_KEY_DIMS[-1],
    }
    return ", ".join(what for what, missing in found.items() if missing)


def _to_kernel_sizes(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The inputs with keys and values of a size that the kernels take: channels of zeros, exact, are put behind."""
    key_dim = next(size for size in TRITON_KEY_DIMS if size >= q.shape[-1])
    value_dim = -(-v.shape[-1] // 16) * 16
    if (key_dim, value_dim) == (q.shape[-1], v.shape[-1]):
        return q, k, v, g, state
    if g is not None and g.shape[-1] > 1:
        g = widened(g, key_dim)
    state = None if state is None else widened(state, key_dim, value_dim)
    return widened(q, key_dim), widened(k, key_dim), widened(v, value_dim), g, state


def _validate(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, lead: tuple[str, ...]) -> None:
    """Shapes and dtypes; `lead` names the axes before the heads."""
    axes = ", ".join(lead)
    if q.ndim != len(lead) + 2:
        raise ValueError(f"q has shape {list(q.shape)}, expected [{axes}, H, K]")
    if 0 in q.shape:
        raise ValueError(f"q has shape {list(q.shape)}: no axis may be empty")
    expect("k", k, tuple(q.shape), f"[{axes}, H, K]")
    if v.ndim != q.ndim or 0 in v.shape:
        raise ValueError(f"v has shape {list(v.shape)}, expected [{axes}, HV, V]")
    expect("v", v, (*q.shape[:-2], *v.shape[-2:]), f"[{axes}, HV, V]")
    value_groups(q, v)
    same_dtype(q=q, k=k, v=v)
    if g is not None:
        channel = g.ndim == q.ndim
        shape = (*v.shape[:-1], q.shape[-1]) if channel else tuple(v.shape[:-1])
        expect("g", g, shape, f"[{axes}, HV, K]" if channel else f"[{axes}, HV]")
    if gv is not None:
        expect("gv", gv, tuple(v.shape), f"[{axes}, HV, V]")


def _gates(g: Tensor | None, gv: Tensor | None, v: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gates in the accumulation dtype, a scalar one with an axis of length 1 for the channels."""
    dtype = accumulation_dtype(v.dtype)
    if g is not None:
        g = g.to(dtype) if g.ndim == v.ndim else g.to(dtype).unsqueeze(-1)
    return g, None if gv is None else gv.to(dtype)
