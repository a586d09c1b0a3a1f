"""How fast the operators are: the cases that each `spec.py` lists, beside the chunkwise form, a peer and softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixer_kernels.spec import Case, OperatorSpec
from mixer_kernels.verify import in_double, leaves, outputs_and_gradients, relative_error

CHECK_ROWS, CHECK_TOKENS = 1, 1024  # a peer's answer is checked on this much of a case before its time counts
PEER_ERROR = 0.02

Function = Callable[..., tuple[Tensor, Tensor]]


class Timing(NamedTuple):
    """Medians in milliseconds, peak memory of forward and backward in MiB, microseconds of each kernel of the two.

    Where `both` is well above `busy` the GPU waits for the host to launch, as it does not inside a model that keeps it
    busy or under CUDA graphs.
    """

    op: str
    case: str
    who: str
    forward: float
    both: float
    memory: float
    kernels: dict[str, float]

    @property
    def busy(self) -> float:
        """Milliseconds of all kernels of forward and backward."""
        return sum(self.kernels.values()) / 1000


def measure(op: str, case: str, who: str, forward: Callable[[], Tensor], wanted: list[Tensor]) -> Timing:
    """Time `forward`, and it with the gradients of `wanted` for a random gradient of its output."""
    from triton.testing import do_bench

    do = torch.randn_like(forward())

    def both() -> None:
        torch.autograd.grad(forward(), wanted, do, allow_unused=True)

    both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    memory = (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.no_grad():
        alone = do_bench(forward, warmup=50, rep=200, return_mode="median")
    together = do_bench(both, warmup=50, rep=200, return_mode="median")
    return Timing(op, case, who, alone, together, memory, by_kernel(both))


def inputs_for_time(spec: OperatorSpec, case: Case) -> dict[str, Any]:
    """bf16 inputs of whole rows, as peers take them: no segments."""
    inputs = spec.make_inputs(case, torch.bfloat16, "cuda", 0)
    inputs.pop("segments")
    return inputs


def time_operator(spec: OperatorSpec, case: Case, who: str, function: Function) -> Timing:
    """One implementation of an operator on one case."""
    inputs = inputs_for_time(spec, case)
    return measure(spec.name, case.name, who, lambda: function(**inputs)[0], list(leaves(inputs).values()))


def implementations(spec: OperatorSpec, case: Case, *, peer: bool) -> dict[str, Function]:
    """What can be timed on a case, by name; the peer only if its outputs and gradients are right."""
    found: dict[str, Function] = {
        "triton": lambda **x: spec.function(**x, impl="triton"),
        "chunked": spec.chunked,
    }
    rival = peer_function(spec.name, case.decay) if peer else None
    if rival is not None and is_right(spec, case, rival):
        found["fla"] = rival
    return found


def is_right(spec: OperatorSpec, case: Case, function: Function) -> bool:
    """Whether outputs and gradients agree with fp64 on a short row of the case."""
    inputs = inputs_for_time(spec, replace(case, batch=CHECK_ROWS, tokens=CHECK_TOKENS))
    exact = outputs_and_gradients(spec.chunked, in_double(inputs))
    found = outputs_and_gradients(function, inputs)
    errors = {name: relative_error(found[name], want) for name, want in exact.items()}
    print(f"  {spec.name} {case.name}: peer's errors", {name: f"{error:.1e}" for name, error in errors.items()})
    return all(error < PEER_ERROR for error in errors.values())


def peer_function(op: str, decay: str) -> Function | None:
    """flash-linear-attention's operator for the same recurrence; None if it is not installed or has none."""
    try:
        from fla.ops.common import chunk_o
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.gla import chunk_gla
        from fla.ops.kda import chunk_kda
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        return None
    # It refuses gated backward on Hopper with Triton 3.4 to 3.7.0; at head size 128 its gradients are right there.
    chunk_o.TRITON_ABOVE_3_7_1 = True
    known = {
        ("linear_attention", "none"): chunk_simple_gla,
        ("linear_attention", "scalar"): chunk_simple_gla,
        ("linear_attention", "channel"): chunk_gla,
        ("delta_rule", "none"): chunk_delta_rule,
        ("delta_rule", "scalar"): chunk_gated_delta_rule,
        ("delta_rule", "channel"): chunk_kda,
    }
    if (op, decay) not in known:
        return None
    names = ("q", "k", "v", "g", "beta")
    return lambda **x: known[op, decay](**{n: x[n] for n in names if n in x}, output_final_state=True)


def time_softmax(batch: int, tokens: int, heads: int, head_dim: int) -> list[Timing]:
    """torch's causal softmax attention in bf16, by backend."""
    shape = (batch, heads, tokens, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def forward() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    found = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            case = f"B {batch} T {tokens} H {heads} D {head_dim}"
            found.append(measure("softmax", case, backend.name.lower(), forward, [q, k, v]))
    return found


def kernel_times(spec: OperatorSpec, inputs: dict[str, Any]) -> dict[str, float]:
    """Microseconds of each kernel in one forward and backward of an operator in Triton."""
    do = torch.randn_like(inputs["v"])
    wanted = list(leaves(inputs).values())
    return by_kernel(lambda: torch.autograd.grad(spec.function(**inputs, impl="triton")[0], wanted, do))


def by_kernel(function: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each kernel in one call, by torch's profiler."""
    for _ in range(3):
        function()
    rounds = 10
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            function()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            name = event.key[:48]  # torch's own have names of pages
            found[name] = found.get(name, 0.0) + event.self_device_time_total / rounds
    return found
