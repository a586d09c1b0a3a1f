"""The public delta rule: arguments are checked and cast here, and an implementation is chosen."""

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
from mixer_kernels.delta_rule.chunked import chunked, in_micro_steps
from mixer_kernels.delta_rule.reference import reference
from mixer_kernels.dispatch import choose
from mixer_kernels.segments import Segments

TRITON_KEY_DIMS = (16, 32, 64, 128, 256)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    e: Tensor | None = None,
    *,
    segments: Segments | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    stride: int = 1,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S_t = (I - k_t e_t^T) Diag(exp g_t) S_{t-1} + k_t z_t^T and o_t = scale * S_t^T q_t over whole rows.

    Tied, e = beta * k and z = beta * v: DeltaNet (no decay), Gated DeltaNet (one a head), Kimi Delta Attention (one a
    channel). Free, e is given and z = v.

    Args:
        q, k: [B, T, H, K], of one floating dtype with v and e. Keys are taken as they are: normalise them first
            (the erase is stable while beta * |k|^2 is at most 2).
        v: [B, T, HV, V], HV a multiple of H; value head i reads head i // (HV / H) of q and k.
        g: log decay, at most 0: [B, T, HV], or [B, T, HV, K] for one a channel; None is no decay.
        beta: [B, T, HV]; None with e None is 1.
        e: erase keys [B, T, HV, K], instead of beta.
        segments: where documents begin; None is one document a row, continued iff `initial_state` is given.
        initial_state: [B, HV, K, V], what documents with ``row_start`` -1 continue from; None is zeros.
        scale: of the output; None is K ** -0.5.
        stride: n micro-steps a token: k, v, g, beta and e have T * n rows, and q reads after each n-th.
        impl: see `mixer_kernels.dispatch`. Triton takes bf16 and fp32, and ``auto`` leaves the rest to the chunkwise
            form.

    Returns:
        o [B, T, HV, V] in v's dtype, and the state after the last token of each row, [B, HV, K, V] in fp32 (fp64 for
        fp64 inputs). Gates and the state are never below fp32; q, k, v and e take autocast's dtype where it is on.

    Raises:
        ValueError: an argument's shape or dtype does not fit, or `impl` cannot run.
    """
    _validate(q, k, v, g, beta, e, stride)
    q, k, v, e = _operands(q, k, v, e)
    batch, tokens, _, key_dim = q.shape
    row_start = resolve_segments(segments, batch, tokens, initial_state is not None, q.device)
    scale = key_dim**-0.5 if scale is None else scale
    chosen = choose(impl, q, "delta_rule", lacks=_listed(_lacking(v, key_dim)))
    shape = (batch, v.shape[2], key_dim, v.shape[3])
    if chosen == "triton":
        state = None if initial_state is None else resolve_state(initial_state, shape, v, "initial_state")
        return _run_triton(q, k, v, g, beta, e, row_start, state, scale, stride)
    run = chunked if chosen == "chunked" else reference
    with autocast_off(q):
        g, beta = _gates(g, beta, v)
        state = resolve_state(initial_state, shape, v, "initial_state")
        return run(q, k, v, g, beta, e, row_start=row_start, initial_state=state, scale=scale, stride=stride)


def _run_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    e: Tensor | None,
    row_start: Tensor,
    state: Tensor | None,
    scale: float,
    stride: int,
) -> tuple[Tensor, Tensor]:
    """By the kernels, in sizes that they take and with a row a micro-step."""
    from mixer_kernels.delta_rule.autograd import delta_rule_triton

    q, row_start = in_micro_steps(q, row_start, stride)
    g, beta = _gates(g, beta, v)
    wide_q, wide_k, wide_v, g, e, state = _to_kernel_sizes(q, k, v, g, e, state)
    o, final = delta_rule_triton(wide_q, wide_k, wide_v, g, beta, e, row_start, state, scale)
    o = o if stride == 1 else o[:, stride - 1 :: stride]
    return narrowed(o, v.shape[-1]), narrowed(final, q.shape[-1], v.shape[-1])


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    e: Tensor | None = None,
    *,
    state: Tensor,
    scale: float | None = None,
    stride: int = 1,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One more token of each row: the arguments of `delta_rule` without the token axis, and the state so far.

    q [B, H, K], k [B, H, K], v [B, HV, V], g [B, HV] or [B, HV, K], beta [B, HV], e [B, HV, K]; with `stride` n above 1
    all but q have their micro-steps as a second axis, [B, n, ...]. state [B, HV, K, V].

    Returns o [B, HV, V] in v's dtype and the new state; the given state is left as it is.
    """
    q = q.unsqueeze(1)
    if stride == 1:
        k, v, g, beta, e = (None if x is None else x.unsqueeze(1) for x in (k, v, g, beta, e))
    _validate(q, k, v, g, beta, e, stride)
    q, k, v, e = _operands(q, k, v, e)
    batch, _, _, key_dim = q.shape
    with autocast_off(q):
        g, beta = _gates(g, beta, v)
        if beta is None and e is None:
            beta = v.new_ones(v.shape[:3], dtype=accumulation_dtype(v.dtype))
        state = resolve_state(state, (batch, v.shape[2], key_dim, v.shape[3]), v, "state")
        scale = key_dim**-0.5 if scale is None else scale
        learns = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (q, k, v, g, beta, e, state)
        )
        lacks = {"inputs that require gradients (a step)": learns, **_lacking(v, key_dim)}
        if choose(impl, q, "delta_rule", lacks=_listed(lacks)) == "triton":
            from mixer_kernels.delta_rule.step import step_triton

            q, k, v_wide, g, e, wide = _to_kernel_sizes(q[:, 0], k, v, g, e, state)
            o, new = step_triton(q, k, v_wide, g, beta, e, wide, scale)
            return narrowed(o, v.shape[-1]), narrowed(new, *state.shape[2:])
        continued = resolve_segments(None, batch, 1, True, q.device)
        o, state = reference(q, k, v, g, beta, e, row_start=continued, initial_state=state, scale=scale, stride=stride)
        return o[:, 0], state


def _validate(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, e: Tensor | None, stride: int
) -> None:
    """Shapes and dtypes; a step has a token axis of length 1 here."""
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"q has shape {list(q.shape)}, expected [B, T, H, K], no axis empty")
    if stride < 1:
        raise ValueError(f"stride={stride}, expected 1 or more micro-steps a token")
    if beta is not None and e is not None:
        raise ValueError("beta and e: give beta (tied erase key and value) or e (a free erase key), not both")
    batch, tokens, heads, key_dim = q.shape
    rows, time = tokens * stride, "T" if stride == 1 else f"T * {stride}"
    expect("k", k, (batch, rows, heads, key_dim), f"[B, {time}, H, K]")
    if v.ndim != 4 or 0 in v.shape:
        raise ValueError(f"v has shape {list(v.shape)}, expected [B, {time}, HV, V], no axis empty")
    value_groups(q, v)
    lead = (batch, rows, v.shape[2])
    expect("v", v, (*lead, v.shape[3]), f"[B, {time}, HV, V]")
    if g is not None:
        channel = g.ndim == 4
        expect("g", g, (*lead, key_dim) if channel else lead, f"[B, {time}, HV{', K' if channel else ''}]")
    if beta is not None:
        expect("beta", beta, lead, f"[B, {time}, HV]")
    if e is not None:
        expect("e", e, (*lead, key_dim), f"[B, {time}, HV, K]")


def _lacking(v: Tensor, key_dim: int) -> dict[str, bool]:
    """Which sizes and dtypes the Triton kernels do not take, and whether these inputs have them."""
    return {
        f"{v.dtype}": v.dtype not in (torch.bfloat16, torch.float32),
        f"K = {key_dim} (at most {TRITON_KEY_DIMS[-1]})": key_dim > TRITON_KEY_DIMS[-1],
    }


def _to_kernel_sizes(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, e: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The inputs with keys and values of a size that the kernels take: channels of zeros, exact, are put behind."""
    key_dim = next(size for size in TRITON_KEY_DIMS if size >= q.shape[-1])
    value_dim = -(-v.shape[-1] // 16) * 16
    if (key_dim, value_dim) == (q.shape[-1], v.shape[-1]):
        return q, k, v, g, e, state
    if g is not None and g.shape[-1] > 1:
        g = widened(g, key_dim)
    e = None if e is None else widened(e, key_dim)
    state = None if state is None else widened(state, key_dim, value_dim)
    return widened(q, key_dim), widened(k, key_dim), widened(v, value_dim), g, e, state


def _listed(lacks: dict[str, bool]) -> str:
    return ", ".join(what for what, missing in lacks.items() if missing)


def _operands(q: Tensor, k: Tensor, v: Tensor, e: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v and e in one dtype: their own, or autocast's."""
    given = {"q": q, "k": k, "v": v} | ({} if e is None else {"e": e})
    cast = dict(zip(given, autocast_inputs(*given.values()), strict=True))
    same_dtype(**cast)
    return cast["q"], cast["k"], cast["v"], cast.get("e")


def _gates(g: Tensor | None, beta: Tensor | None, v: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gates in the accumulation dtype; one decay a head gets an axis of length 1 for the channels."""
    dtype = accumulation_dtype(v.dtype)
    if g is not None:
        g = g.to(dtype) if g.ndim == 4 else g.to(dtype).unsqueeze(-1)
    return g, None if beta is None else beta.to(dtype)
