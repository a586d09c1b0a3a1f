"""Are the Triton kernels right on this card? Every operator and configuration against the chunkwise form in fp64.

The error budget is derived, not tuned: the kernel's error may be a small multiple of that of the chunkwise form in
plain torch at the same dtype, plus the rounding unit of the arithmetic. Errors are relative, in the Frobenius norm.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixer_kernels.dispatch import has_triton
from mixer_kernels.spec import Case, OperatorSpec, all_specs, tiled, token

MULTIPLE = 3.0
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-21}  # fp32 products are tf32x3
NEGLIGIBLE = 1e-10  # root mean square below which an output counts as zero
DTYPES = (torch.bfloat16, torch.float32)
KEY_DIMS, VALUE_DIMS = (16, 32, 64, 128, 256), (16, 32, 64, 128)
COPIES = 72  # of a row of 32,768 tokens: 2.4e9 elements of 8 heads of 128 channels


class Result(NamedTuple):
    """One output or gradient of one case: errors of the kernel and of the chunkwise form, and the budget."""

    op: str
    case: str
    dtype: torch.dtype
    output: str
    error: float
    chunked: float
    budget: float

    @property
    def passed(self) -> bool:
        return self.error <= self.budget  # false for NaN


def leaves(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The inputs that require gradients, by name."""
    return {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}


def outputs_and_gradients(function: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Any]) -> dict[str, Tensor]:
    """o, final state and the gradient of each leaf, for a fixed random gradient of o and of the final state."""
    o, final = function(**inputs)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in (o, final)]
    names = leaves(inputs)
    gradients = torch.autograd.grad((o, final), list(names.values()), given)
    found = {"o": o, "final state": final} | {f"d{name}": d for name, d in zip(names, gradients, strict=True)}
    return {name: x.detach() for name, x in found.items()}


def in_double(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same values in fp64."""
    cast = {name: x.detach().double().requires_grad_() for name, x in leaves(inputs).items()}
    return inputs | cast


def relative_error(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact|, both norms Frobenius; the denominator has the floor NEGLIGIBLE an element."""
    floor = NEGLIGIBLE * math.sqrt(exact.numel())
    return ((found.double() - exact).norm() / exact.norm().clamp(min=floor)).item()


def triton_takes(spec: OperatorSpec, case: Case, dtype: torch.dtype) -> bool:
    """Whether the operator's kernels take such inputs, as the operator itself says when asked on the meta device."""
    inputs = spec.make_inputs(case, dtype, "meta", 0)
    try:
        spec.function(**inputs, impl="triton")
    except ValueError as refusal:
        if "does not take" in str(refusal):
            return False
        raise
    return True


def check(
    spec: OperatorSpec, case: Case, dtype: torch.dtype, device: torch.device | str, multiple: float = MULTIPLE
) -> list[Result]:
    """Errors of the kernels' outputs and gradients on one case, beside the chunkwise form's and the budget."""
    inputs = spec.make_inputs(case, dtype, device, 0)
    exact = outputs_and_gradients(spec.chunked, in_double(inputs))
    plain = outputs_and_gradients(spec.chunked, inputs)
    found = outputs_and_gradients(lambda **x: spec.function(**x, impl="triton"), inputs)
    results = []
    for name, want in exact.items():
        error, chunked = (relative_error(x[name], want) for x in (found, plain))
        budget = multiple * chunked + UNIT[dtype]
        results.append(Result(spec.name, case.name, dtype, name, error, chunked, budget))
    return results


def check_step(
    spec: OperatorSpec, case: Case, dtype: torch.dtype, device: torch.device | str, multiple: float = MULTIPLE
) -> list[Result]:
    """The same for the case's tokens one by one, outputs alone: the recurrence is the yardstick."""
    inputs = spec.make_inputs(case, dtype, device, 0)
    state = inputs["initial_state"].detach()
    exact, plain, found = (
        tokens_one_by_one(spec, x, s, impl)
        for x, s, impl in (
            (in_double(inputs), state.double(), "reference"),
            (inputs, state, "reference"),
            (inputs, state, "triton"),
        )
    )
    results = []
    for name, want in exact.items():
        error, chunked = (relative_error(x[name], want) for x in (found, plain))
        results.append(Result(spec.name, case.name, dtype, name, error, chunked, multiple * chunked + UNIT[dtype]))
    return results


@torch.no_grad()
def tokens_one_by_one(spec: OperatorSpec, inputs: dict[str, Any], state: Tensor, impl: str) -> dict[str, Tensor]:
    """Outputs and the last state of the operator's step, token after token."""
    outputs = []
    for t in range(inputs["q"].shape[1]):
        o, state = spec.step(**token(inputs, t), state=state, impl=impl)
        outputs.append(o)
    return {"o of steps": torch.stack(outputs, dim=1), "state of steps": state}


def check_copies(spec: OperatorSpec, case: Case, dtype: torch.dtype, device: torch.device | str) -> list[Result]:
    """Copies of a row, more than 2^31 elements of each input in all, must give the same to the last bit.

    As rows of a batch, then as documents of one row. An error is the share of entries that differ from the first copy.
    """
    inputs = spec.make_inputs(case, dtype, device, 0)
    with torch.no_grad():
        do = torch.randn_like(spec.function(**inputs, impl="triton")[0])
    results = []
    for axis, layout in enumerate(("rows", "documents of a row")):
        many = tiled(inputs, COPIES, axis)
        names = leaves(many)
        o, _ = spec.function(**many, impl="triton")
        gradients = torch.autograd.grad(o, list(names.values()), torch.cat([do] * COPIES, dim=axis))
        for name, x in [("o", o.detach()), *zip((f"d{name}" for name in names), gradients, strict=True)]:
            copies = x.unflatten(axis, (COPIES, -1)).unbind(axis)
            differ = sum((copy != copies[0]).double().mean().item() for copy in copies) / COPIES
            results.append(Result(spec.name, case.name, dtype, f"{name}, {COPIES} {layout}", differ, 0.0, 0.0))
        del many, names, o, gradients, x, copies
    return results


class Job(NamedTuple):
    """A case to check in one of the ways of `WAYS`."""

    op: str
    case: Case
    dtype: torch.dtype
    device: str
    way: str = "whole rows"


WAYS = {"whole rows": check, "steps": check_step, "copies": check_copies}


def verifiable(dtype: torch.dtype, ops: Container[str] = ()) -> list[tuple[OperatorSpec, Case]]:
    """Every case that Triton kernels take in `dtype`, of every operator, or of those named."""
    specs = [s for s in all_specs().values() if has_triton() and (not ops or s.name in ops)]
    return [(spec, case) for spec in specs for case in spec.cases if triton_takes(spec, case, dtype)]


def in_all_sizes(spec: OperatorSpec, dtype: torch.dtype) -> Iterator[tuple[OperatorSpec, Case]]:
    """Each kind of decay with every launch configuration that can be selected: block sizes follow from K and V."""
    plain = {case.decay: case for case in reversed(spec.cases) if not case.options and not case.stress}
    for case, key_dim, value_dim in itertools.product(plain.values(), KEY_DIMS, VALUE_DIMS):
        sizes = {"key_dim": key_dim, "value_dim": value_dim, "tokens": 130, "documents": "many", "continued": True}
        sized = replace(case, name=f"{case.decay}, K {key_dim}, V {value_dim}", **sizes)
        if triton_takes(spec, sized, dtype):
            yield spec, sized


def jobs(
    device: str, dtypes: Iterable[torch.dtype] = DTYPES, ops: Container[str] = (), *, every_step: bool = False
) -> list[Job]:
    """Every verifiable case and each decay in all sizes, and steps of three tokens in each size of the cases.

    With `every_step` also steps in all sizes.
    """
    found: list[Job] = []
    for dtype in dtypes:
        cases = verifiable(dtype, ops)
        sized = [x for spec in {id(s): s for s, _ in cases}.values() for x in in_all_sizes(spec, dtype)]
        found += [Job(spec.name, case, dtype, device) for spec, case in cases + sized]
        steps: dict[str, Job] = {}
        for spec, case in cases + sized * every_step:
            few = replace(case, name="", batch=2, tokens=3, documents="one", continued=True, stress="")
            steps.setdefault(f"{spec.name} {few}", Job(spec.name, replace(few, name=case.name), dtype, device, "steps"))
        found += steps.values()
    return found


def large_jobs(device: str, ops: Container[str] = ()) -> list[Job]:
    """In bf16, of the benchmarks' sizes: 500 documents in a row, more than 65,535 chunks, more than 2^31 elements."""
    found = []
    for spec in all_specs().values():
        for case in [c for c in spec.bench_cases if ", T " not in c.name and (not ops or spec.name in ops)]:
            row = replace(case, name=f"{case.name}, 500 documents", batch=1, tokens=32768, documents=500)
            chunks = {"batch": 33, "tokens": 16000, "heads": 8, "key_dim": 16, "value_dim": 16}  # 66,000 of 64 tokens
            many = replace(case, name=f"{case.name}, 66,000 chunks", **chunks)
            ways = ((row, "whole rows"), (many, "whole rows"), (row, "copies"))
            found += [Job(spec.name, c, torch.bfloat16, device, way) for c, way in ways]
    return found


def check_all(todo: list[Job], workers: int | None = None) -> list[Result]:
    """Check in several processes, because most of the time goes into compiling.

    What one kernel does to its process must not fail the cases after it: those that fail are checked once more, each in
    a process of its own, and that is what counts.
    """
    workers = workers or max(1, min(14, (os.cpu_count() or 1) - 2))
    found = _in_processes(todo, workers)
    failed = [i for i, results in enumerate(found) if not all(r.passed for r in results)]
    again = _in_processes([todo[i] for i in failed], workers, max_tasks_per_child=1)
    for i, results in zip(failed, again, strict=True):
        found[i] = results
        for r in (r for r in results if not r.passed):  # at once: a run that is cut short has named its failures
            print(r, file=sys.stderr, flush=True)
    return list(itertools.chain.from_iterable(found))


def _in_processes(todo: list[Job], workers: int, **settings: int) -> list[list[Result]]:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), **settings) as pool:
        futures = [pool.submit(_check_in_worker, job) for job in todo]
    return [f.result() if f.exception() is None else [_no_run(j)] for j, f in zip(todo, futures, strict=True)]


def _check_in_worker(job: Job) -> list[Result]:
    torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN: what a kernel leaves unwritten shows
    torch.use_deterministic_algorithms(True, warn_only=True)
    if job.device == "cuda":
        torch.cuda.empty_cache()  # of the job before: other processes may need it
    try:
        return WAYS[job.way](all_specs()[job.op], job.case, job.dtype, job.device)
    except Exception as error:  # a kernel that does not compile or run fails its case, not the whole table
        print(f"{job.op}, {job.case.name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr, flush=True)
        return [_no_run(job)]


def _no_run(job: Job) -> Result:
    return Result(job.op, job.case.name, job.dtype, "does not run", math.nan, math.nan, 0.0)


def table(results: Iterable[Result]) -> str:
    """One line an operator, dtype and output: the worst case by its share of the budget."""
    worst: dict[tuple[str, torch.dtype, str], Result] = {}
    for r in results:
        key = (r.op, r.dtype, r.output)
        if key not in worst or _share(r) > _share(worst[key]):
            worst[key] = r
    head = f"{'operator':18s} {'dtype':9s} {'output':16s} {'error':>8s} {'chunked':>8s} {'budget':>8s}"
    lines = [f"{head}        worst case"]
    for r in worst.values():
        errors = " ".join(f"{x:8.1e}" for x in (r.error, r.chunked, r.budget))
        dtype, verdict = str(r.dtype).removeprefix("torch."), "ok" if r.passed else "FAIL"
        lines.append(f"{r.op:18s} {dtype:9s} {r.output:16s} {errors}  {verdict:4s}  {r.case}")
    return "\n".join(lines)


def _share(r: Result) -> float:
    return math.inf if math.isnan(r.error) else r.error / max(r.budget, 1e-300)
