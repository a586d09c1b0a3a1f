"""Are the Triton kernels right on this card? Every operator and configuration against the chunkwise form in fp64.

The error budget is derived, not tuned: the kernel's error may be a small multiple of that of the chunkwise form in
plain torch at the same dtype, plus the rounding unit of the arithmetic. Errors are relative, in the Frobenius norm.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixer_kernels.dispatch import has_triton
from mixer_kernels.spec import Case, OperatorSpec, all_specs

MULTIPLE = 3.0
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-21}  # fp32 products are tf32x3
NEGLIGIBLE = 1e-10  # root mean square below which an output counts as zero
DTYPES = (torch.bfloat16, torch.float32)


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


def verifiable(dtype: torch.dtype, ops: Container[str] = ()) -> list[tuple[OperatorSpec, Case]]:
    """Every case that Triton kernels take in `dtype`, of every operator, or of those named."""
    specs = [s for s in all_specs().values() if has_triton() and (not ops or s.name in ops)]
    return [(spec, case) for spec in specs for case in spec.cases if triton_takes(spec, case, dtype)]


def _check_in_worker(job: tuple[str, str, torch.dtype, str]) -> list[Result]:
    name, case_name, dtype, device = job
    torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN: what a kernel leaves unwritten shows
    torch.use_deterministic_algorithms(True, warn_only=True)
    spec = all_specs()[name]
    case = next(c for c in spec.cases if c.name == case_name)
    try:
        results = check(spec, case, dtype, device)
        for failed in (r for r in results if not r.passed):  # at once: a run that is cut short has named its failures
            print(failed, file=sys.stderr, flush=True)
        return results
    except Exception as error:  # a kernel that does not compile or run fails its case, not the whole table
        print(f"{name}, {case_name}, {dtype}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return [Result(name, case_name, dtype, "does not run", math.nan, math.nan, 0.0)]


def check_all(device: str, dtypes: Iterable[torch.dtype] = DTYPES, ops: Container[str] = ()) -> list[Result]:
    """All verifiable cases, in several processes because most of the time goes into compiling."""
    jobs = [(s.name, case.name, dtype, device) for dtype in dtypes for s, case in verifiable(dtype, ops)]
    workers = max(1, min(14, (os.cpu_count() or 1) - 2))
    # A process a case: what one kernel does to its process must not fail the cases after it.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        return list(itertools.chain.from_iterable(pool.map(_check_in_worker, jobs)))


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
