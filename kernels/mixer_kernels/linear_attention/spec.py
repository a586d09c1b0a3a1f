"""Linear attention's inputs, extremes and costs as data."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mixer_kernels.common.inputs import Draw, make_decay, make_keys, make_segments
from mixer_kernels.linear_attention.api import linear_attention, linear_attention_step
from mixer_kernels.spec import Case, OperatorSpec


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int) -> dict[str, Any]:
    """Inputs of `linear_attention` by name. Options: "gv" (a decay on the value axis) and "exclusive"."""
    draw = Draw(seed, device)
    batch, tokens, heads = case.batch, case.tokens, case.heads
    value_heads = case.value_heads or heads
    gate_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    segments = make_segments(case, draw)
    tensors = {
        "q": draw(batch, tokens, heads, case.key_dim).to(dtype),
        "k": make_keys(case, draw, batch, tokens, heads, case.key_dim).to(dtype),
        "v": draw(batch, tokens, value_heads, case.value_dim).to(dtype),
    }
    if case.decay != "none":
        channels = case.key_dim if case.decay == "channel" else 1
        g = make_decay(case, draw, batch, tokens, value_heads, channels).to(gate_dtype)
        tensors["g"] = g if case.decay == "channel" else g.squeeze(-1)
    if case.options.get("gv"):
        tensors["gv"] = make_decay(case, draw, *tensors["v"].shape).to(gate_dtype)
    if case.continued:
        tensors["initial_state"] = draw(batch, value_heads, case.key_dim, case.value_dim).to(gate_dtype)
    tensors = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    return tensors | {"segments": segments, "exclusive": bool(case.options.get("exclusive"))}


def flops(case: Case) -> dict[str, float]:
    """Matmul FLOPs of the recurrence: a write and a read; backward two products for each, and the state again."""
    product = 2.0 * case.batch * case.tokens * (case.value_heads or case.heads) * case.key_dim * case.value_dim
    return {"forward": 2 * product, "forward_backward": 7 * product}


def bytes_moved(case: Case, element: int = 2) -> dict[str, float]:
    """Bytes if forward and backward each read their inputs once and write their outputs once (bf16, gates fp32)."""
    value_heads = case.value_heads or case.heads
    rows = case.batch * case.tokens
    keys, values = rows * case.heads * case.key_dim * element, rows * value_heads * case.value_dim * element
    gate = 4 * rows * value_heads * {"none": 0, "scalar": 1, "channel": case.key_dim}[case.decay]
    inputs, output = 2 * keys + values + gate, values
    return {"forward": inputs + output, "forward_backward": 3 * inputs + 2 * output}


def _cases() -> tuple[Case, ...]:
    plain = [Case(name=decay, decay=decay) for decay in ("none", "scalar", "channel")]
    found = list(plain)
    for case in plain:
        found += [
            replace(case, name=f"{case.name}, one token", tokens=1, continued=True),
            replace(case, name=f"{case.name}, odd rows", tokens=37, continued=True),
            replace(case, name=f"{case.name}, not a multiple of the chunk", tokens=203, continued=True),
            replace(case, name=f"{case.name}, many documents", tokens=203, documents="many"),
            replace(case, name=f"{case.name}, continued documents", tokens=150, documents="many", continued=True),
            replace(case, name=f"{case.name}, one-token documents", tokens=70, documents="single"),
            replace(case, name=f"{case.name}, grouped heads", heads=1, value_heads=2, tokens=100, documents="many"),
            replace(case, name=f"{case.name}, small heads", key_dim=16, value_dim=16, documents="many"),
            *(
                replace(case, name=f"{case.name}, K {k}", key_dim=k, value_dim=64, tokens=130, documents="many")
                for k in (64, 128, 256)
            ),
            replace(case, name=f"{case.name}, wide values", key_dim=16, value_dim=48, heads=1, continued=True),
            replace(case, name=f"{case.name}, odd sizes", key_dim=24, value_dim=20, documents="many", continued=True),
            replace(case, name=f"{case.name}, large heads", key_dim=128, value_dim=256, tokens=130, documents="many"),
            replace(case, name=f"{case.name}, one head of a long row", batch=1, heads=1, tokens=1100, documents=3),
            replace(case, name=f"{case.name}, identical keys", stress="keys identical"),
            replace(case, name=f"{case.name}, exclusive", tokens=100, documents="many", options={"exclusive": True}),
            replace(case, name=f"{case.name}, value decay", tokens=100, documents="many", options={"gv": True}),
        ]
        if case.decay != "none":
            found += [
                replace(
                    case, name=f"{case.name}, {stress}", stress=stress, tokens=150, documents="many", continued=True
                )
                for stress in ("decay 0", "decay -20", "decay mixed")
            ]
    mixed = replace(plain[2], stress="decay mixed", tokens=150, documents="many", continued=True)
    return (*found, replace(mixed, name="channel and value, mixed, exclusive", options={"gv": True, "exclusive": True}))


def _bench_cases() -> tuple[Case, ...]:
    scalar = Case("scalar", batch=8, tokens=4096, heads=8, key_dim=128, value_dim=128, decay="scalar")
    channel = Case("channel", batch=8, tokens=4096, heads=4, key_dim=128, value_dim=256, decay="channel")
    rows = [(64, 512), (32, 1024), (16, 2048), (4, 8192), (2, 16384), (1, 32768)]  # 32,768 tokens in all
    return (
        scalar,
        channel,
        replace(scalar, name="none", decay="none"),
        *(replace(case, name=f"{case.name}, T {t}", batch=b, tokens=t) for case in (scalar, channel) for b, t in rows),
        *(replace(case, name=f"{case.name}, T 65536", batch=1, tokens=65536) for case in (scalar, channel)),
    )


SPEC = OperatorSpec(
    name="linear_attention",
    function=linear_attention,
    chunked=partial(linear_attention, impl="chunked"),
    reference=partial(linear_attention, impl="reference"),
    step=linear_attention_step,
    make_inputs=make_inputs,
    cases=_cases(),
    bench_cases=_bench_cases(),
    flops=flops,
    bytes_moved=bytes_moved,
)
