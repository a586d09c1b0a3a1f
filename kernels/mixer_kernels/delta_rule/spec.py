"""The delta rule's inputs, extremes and costs as data."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import normalize

from mixer_kernels.common.arguments import accumulation_dtype
from mixer_kernels.common.inputs import Draw, make_decay, make_keys, make_segments
from mixer_kernels.delta_rule.api import delta_rule, delta_rule_step
from mixer_kernels.spec import Case, OperatorSpec


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int) -> dict[str, Any]:
    """Inputs of `delta_rule` by name, with unit queries and keys.

    Options: "free" (an erase key of its own instead of beta), "stride", and "beta", the largest value of beta (1 if
    absent). A stress that ends in "beta 2" has beta 2 everywhere.
    """
    draw = Draw(seed, device)
    stride, value_heads = case.options.get("stride", 1), case.value_heads or case.heads
    rows, gate_dtype = (case.batch, case.tokens * stride), accumulation_dtype(dtype)
    segments = make_segments(case, draw)
    keys = make_keys(replace(case, stress=case.stress.removesuffix(", beta 2")), draw, *rows, case.heads, case.key_dim)
    tensors = {
        "q": normalize(draw(case.batch, case.tokens, case.heads, case.key_dim), dim=-1).to(dtype),
        "k": keys.to(dtype),
        "v": draw(*rows, value_heads, case.value_dim).to(dtype),
    }
    strength = draw(*rows, value_heads).sigmoid() * case.options.get("beta", 1)
    if case.options.get("free"):
        share = draw(*rows, value_heads, case.key_dim).sigmoid()
        tensors["e"] = (share * keys.repeat_interleave(value_heads // case.heads, dim=2)).to(dtype)
    else:
        tensors["beta"] = (torch.full_like(strength, 2) if case.stress.endswith("beta 2") else strength).to(gate_dtype)
    if case.decay != "none":
        channels = case.key_dim if case.decay == "channel" else 1
        g = make_decay(case, draw, *rows, value_heads, channels).to(gate_dtype)
        tensors["g"] = g if case.decay == "channel" else g.squeeze(-1)
    if case.continued:
        tensors["initial_state"] = draw(case.batch, value_heads, case.key_dim, case.value_dim).to(gate_dtype)
    tensors = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    return tensors | {"segments": segments, "stride": stride}


def flops(case: Case) -> dict[str, float]:
    """Matmul FLOPs of the recurrence: erase and write a micro-step, read a token; backward twice as many."""
    product = 2.0 * case.batch * case.tokens * (case.value_heads or case.heads) * case.key_dim * case.value_dim
    forward = product * (2 * case.options.get("stride", 1) + 1)
    return {"forward": forward, "forward_backward": 3 * forward}


def bytes_moved(case: Case, element: int = 2) -> dict[str, float]:
    """Bytes if forward and backward each read every input once and write every result once (bf16, gates fp32)."""
    value_heads, stride = case.value_heads or case.heads, case.options.get("stride", 1)
    tokens = case.batch * case.tokens
    keys, values = tokens * case.heads * case.key_dim * element, tokens * value_heads * case.value_dim * element
    erase = tokens * value_heads * (case.key_dim * element if case.options.get("free") else 4)
    gate = 4 * tokens * value_heads * {"none": 0, "scalar": 1, "channel": case.key_dim}[case.decay]
    inputs = keys + stride * (keys + values + erase + gate)
    return {"forward": inputs + values, "forward_backward": 3 * inputs + 2 * values}


def _cases() -> tuple[Case, ...]:
    plain = [Case(name=decay, decay=decay) for decay in ("none", "scalar", "channel")]
    found = list(plain)
    for case in plain:
        name, packed = case.name, replace(case, documents="many", continued=True)
        found += [
            replace(case, name=f"{name}, one token", tokens=1, continued=True),
            replace(case, name=f"{name}, odd rows", tokens=37, continued=True),
            replace(case, name=f"{name}, not a multiple of the chunk", tokens=203, continued=True),
            replace(packed, name=f"{name}, many documents", tokens=203, continued=False),
            replace(packed, name=f"{name}, continued documents", tokens=150),
            replace(case, name=f"{name}, one-token documents", tokens=70, documents="single"),
            replace(packed, name=f"{name}, grouped heads", heads=1, value_heads=2, tokens=100),
            replace(packed, name=f"{name}, small heads", key_dim=16, value_dim=16),
            *(
                replace(packed, name=f"{name}, {size} channels", key_dim=size, value_dim=64, heads=1, tokens=130)
                for size in (64, 128, 256)
            ),
            replace(case, name=f"{name}, wide values", key_dim=16, value_dim=48, heads=1, continued=True),
            replace(packed, name=f"{name}, odd sizes", key_dim=24, value_dim=20),
            replace(case, name=f"{name}, one head of a long row", batch=1, heads=1, tokens=1700, documents=3),
            replace(case, name=f"{name}, identical keys", stress="keys identical"),
            replace(case, name=f"{name}, correlated keys, beta to 2", stress="keys correlated", options={"beta": 2}),
            replace(case, name=f"{name}, identical keys, beta 2", stress="keys identical, beta 2"),
            replace(packed, name=f"{name}, free erase key", tokens=100, options={"free": True}),
            replace(packed, name=f"{name}, stride 2", tokens=50, options={"stride": 2, "beta": 2}),
        ]
        if case.decay != "none":
            stresses = ("decay 0", "decay -20", "decay mixed")
            found += [replace(packed, name=f"{name}, {s}", stress=s, tokens=150, options={"beta": 2}) for s in stresses]
    free = replace(plain[2], heads=1, value_heads=2, documents="many", continued=True, stress="decay mixed")
    return (*found, replace(free, name="channel, free, stride 3", tokens=50, options={"free": True, "stride": 3}))


def _bench_cases() -> tuple[Case, ...]:
    gdn = Case("gdn", batch=8, tokens=4096, heads=8, key_dim=128, value_dim=128, decay="scalar")
    kda = replace(gdn, name="kda", decay="channel")
    rows = [(64, 512), (32, 1024), (16, 2048), (4, 8192), (2, 16384), (1, 32768)]  # 32,768 tokens in all
    return (
        gdn,
        replace(gdn, name="gdn, wide values", heads=4, value_dim=256),
        kda,
        replace(gdn, name="deltanet", decay="none"),
        replace(kda, name="free erase key", options={"free": True}),
        replace(gdn, name="stride 2", options={"stride": 2}),
        *(replace(case, name=f"{case.name}, T {t}", batch=b, tokens=t) for case in (gdn, kda) for b, t in rows),
        *(replace(case, name=f"{case.name}, T 65536", batch=1, tokens=65536) for case in (gdn, kda)),
    )


SPEC = OperatorSpec(
    name="delta_rule",
    function=delta_rule,
    chunked=partial(delta_rule, impl="chunked"),
    reference=partial(delta_rule, impl="reference"),
    step=delta_rule_step,
    make_inputs=make_inputs,
    cases=_cases(),
    bench_cases=_bench_cases(),
    flops=flops,
    bytes_moved=bytes_moved,
)
