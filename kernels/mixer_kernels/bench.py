"""How fast the operators are: the cases that each `spec.py` lists, beside the chunkwise form, a peer and softmax."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixer_kernels import peer
from mixer_kernels.spec import Case, OperatorSpec, all_specs, tiled
from mixer_kernels.verify import in_double, leaves, outputs_and_gradients, relative_error

DRAWN_TOKENS = 4096  # of one row: larger inputs repeat them, for drawing takes longer than timing
CHECK_TOKENS = 1024  # a peer's answer is checked on this much of a case before its time counts
PEER_ERROR = 0.02
PLAIN_TOKENS = 4096  # the chunkwise form, slow in plain torch, is timed at this length of rows alone
SOFTMAX = {"heads": 16, "head_dim": 64}  # of a model as wide as those of the operators' cases

Function = Callable[..., tuple[Tensor, Tensor]]
Cases = list[tuple[OperatorSpec, Case]]


class Timing(NamedTuple):
    """Medians in milliseconds, peak memory of forward and backward in MiB, microseconds of each kernel of the two.

    Where `both` is well above `busy` the GPU waits for the host to launch, as it does not inside a model that keeps it
    busy or under CUDA graphs. `first` are the seconds of a first forward and backward with an empty cache, if taken;
    `floor` the milliseconds that `both` must take at least on this card.
    """

    op: str
    case: str
    who: str
    batch: int
    tokens: int
    forward: float
    both: float
    memory: float
    kernels: dict[str, float]
    first: float | None = None
    floor: float | None = None

    @property
    def busy(self) -> float:
        """Milliseconds of all kernels of forward and backward."""
        return sum(self.kernels.values()) / 1000


class Ceilings(NamedTuple):
    """What this card reaches at best: bytes a second copied, counting reads and writes, and bf16 FLOPs a second."""

    bandwidth: float
    arithmetic: float

    def floor(self, spec: OperatorSpec, case: Case) -> float:
        """Milliseconds of forward and backward at the ceilings, whichever is reached first."""
        name = "forward_backward"
        return 1000 * max(spec.bytes_moved(case)[name] / self.bandwidth, spec.flops(case)[name] / self.arithmetic)


def ceilings() -> Ceilings:
    """Measured by a copy of 4 GiB and a product of two 8192 x 8192 matrices of random numbers."""
    from triton.testing import do_bench

    x = torch.empty(2**31, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    copied = do_bench(lambda: y.copy_(x), return_mode="median") / 1000
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    multiplied = do_bench(lambda: a @ b, return_mode="median") / 1000
    return Ceilings(2 * x.nbytes / copied, 2 * 8192**3 / multiplied)


def measure(op: str, case: Case, who: str, forward: Callable[[], Tensor], wanted: list[Tensor]) -> Timing:
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
        alone = do_bench(forward, warmup=25, rep=100, return_mode="median")
    together = do_bench(both, warmup=25, rep=150, return_mode="median")
    return Timing(op, case.name, who, case.batch, case.tokens, alone, together, memory, by_kernel(both))


def inputs_for_time(spec: OperatorSpec, case: Case) -> dict[str, Any]:
    """bf16 inputs of whole rows, as peers take them: no segments."""
    tokens = min(case.tokens, DRAWN_TOKENS)
    inputs = spec.make_inputs(replace(case, batch=1, tokens=tokens), torch.bfloat16, "cuda", 0)
    inputs = tiled(tiled(inputs, case.tokens // tokens, axis=1), case.batch, axis=0)
    inputs.pop("segments")
    return inputs


def time_operator(spec: OperatorSpec, case: Case, who: str, function: Function) -> Timing:
    """One implementation of an operator on one case."""
    inputs = inputs_for_time(spec, case)
    return measure(spec.name, case, who, lambda: function(**inputs)[0], list(leaves(inputs).values()))


def ours(spec: OperatorSpec) -> dict[str, Function]:
    """The operator's own implementations that are timed, by name."""
    return {"triton": lambda **x: spec.function(**x, impl="triton"), "chunked": spec.chunked}


def run_once(spec: OperatorSpec, case: Case, function: Function) -> None:
    """Forward and backward of one case, once."""
    inputs = inputs_for_time(spec, case)
    o = function(**inputs)[0]
    torch.autograd.grad(o, list(leaves(inputs).values()), torch.ones_like(o), allow_unused=True)


def is_right(spec: OperatorSpec, case: Case, who: str, function: Function) -> bool:
    """Whether outputs and gradients agree with fp64 on a short row of the case."""
    inputs = inputs_for_time(spec, replace(case, batch=1, tokens=CHECK_TOKENS))
    exact = outputs_and_gradients(spec.chunked, in_double(inputs))
    found = outputs_and_gradients(function, inputs)
    errors = {name: relative_error(found[name], want) for name, want in exact.items()}
    print(f"{spec.name}, {case.name}: errors of {who}:", ", ".join(f"{n} {error:.1e}" for n, error in errors.items()))
    return all(error < PEER_ERROR for error in errors.values())


def right_peers(cases: Cases, kept: Path | None) -> dict[tuple[str, str], dict[str, Function]]:
    """By operator and case, the peer's functions that are right there, after its autotuners have chosen.

    They choose on the cases as they are, before the short rows of the check: their keys know nothing of rows and
    tokens, so that the first case of its kind decides for those after it. `kept` is the folder of `peer.tune`.
    """
    found = {(s.name, c.name): peer.functions(s.name, c) for s, c in cases}
    calls = [partial(run_once, s, c, function) for s, c in cases for function in found[s.name, c.name].values()]
    if calls:
        print(
            f"{peer.version()}: its kernels tuned,", "{} compiled, {} of them in vain".format(*peer.tune(calls, kept))
        )
    judged: dict[str, bool] = {}
    for spec, case in cases:
        for who, function in list(found[spec.name, case.name].items()):
            short = replace(case, name="", batch=1, tokens=CHECK_TOKENS)
            kind = f"{spec.name} {who} {short}"
            judged[kind] = judged[kind] if kind in judged else is_right(spec, case, who, function)
            if not judged[kind]:
                del found[spec.name, case.name][who]
    return found


def time_softmax(batch: int, tokens: int) -> list[Timing]:
    """torch's causal softmax attention in bf16, by backend."""
    heads, head_dim = SOFTMAX.values()
    shape = (batch, heads, tokens, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    case = Case(f"H {heads} D {head_dim}, T {tokens}", batch, tokens)

    def forward() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    found = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            found.append(measure("softmax", case, backend.name.lower(), forward, [q, k, v]))
    return found


def first_calls(cases: Cases) -> dict[tuple[str, str], float | None]:
    """Seconds of the first forward and backward in Triton, each case in a process of its own with an empty cache.

    None where it failed.

    All at once, on as many cores: the compiler of one case runs on one core.
    """
    jobs = [(spec.name, case) for spec, case in cases]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = [pool.submit(_first_call, job) for job in jobs]
    for (op, case), future in zip(jobs, futures, strict=True):
        if future.exception() is not None:
            print(f"{op}, {case.name}: its first call failed: {str(future.exception())[:200]}")
    seconds = [None if future.exception() is not None else future.result() for future in futures]
    return {(op, case.name): s for (op, case), s in zip(jobs, seconds, strict=True)}


def _first_call(job: tuple[str, Case]) -> float:
    op, case = job
    spec = all_specs()[op]
    inputs = inputs_for_time(spec, case)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        torch.cuda.synchronize()
        begin = time.perf_counter()
        o = spec.function(**inputs, impl="triton")[0]
        torch.autograd.grad(o, list(leaves(inputs).values()), torch.ones_like(o))
        torch.cuda.synchronize()
        return time.perf_counter() - begin


def run(cases: Cases, limits: Ceilings, without: Collection[str] = (), kept: Path | None = None) -> Iterator[Timing]:
    """Time all that there is for each case, in this process: one timing after the other as they are taken.

    `without` leaves out "chunked", "fla", "softmax" or "first calls"; `kept` is the folder of `peer.tune`.
    """
    own = [(spec, case) for spec, case in cases if ", T " not in case.name]
    first = {} if "first calls" in without else first_calls(own)
    peers = {} if "fla" in without else right_peers(cases, kept)
    if "softmax" not in without:
        for tokens, batch in sorted({case.tokens: case.batch for _, case in cases}.items()):
            yield from time_softmax(batch, tokens)
    for spec, case in cases:
        functions = ours(spec) | peers.get((spec.name, case.name), {})
        if "chunked" in without or case.tokens != PLAIN_TOKENS:
            del functions["chunked"]
        for who, function in functions.items():
            timing = time_operator(spec, case, who, function)._replace(floor=limits.floor(spec, case))
            yield timing._replace(first=first.get((spec.name, case.name)) if who == "triton" else None)


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
