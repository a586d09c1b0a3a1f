"""The Triton kernels over the cases of each `spec.py`: on a GPU, or else small ones in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from mixer_kernels import verify
from mixer_kernels.spec import Case
from mixer_kernels.verify import check, check_copies, check_step, leaves, outputs_and_gradients, verifiable

if not importlib.util.find_spec("triton"):
    pytest.skip("needs triton", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float32
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
# On a CPU torch sums gates in fp64, so that the yardstick is better than the same algorithm in fp32.
MULTIPLE = verify.MULTIPLE if DEVICE == "cuda" else 8.0


def small(case):
    """On a CPU one program runs after the other: one row, one key head, and chunks enough for every branch."""
    if DEVICE == "cuda":
        return case
    groups = (case.value_heads or case.heads) // case.heads
    sizes = {"key_dim": min(case.key_dim, 64), "tokens": min(case.tokens, 100)}
    return replace(case, batch=1, heads=1, value_heads=groups, **sizes)


# Cases that differ in size alone may be the same once small.
DISTINCT = {(spec.name, repr(replace(small(case), name=""))): (spec, case) for spec, case in verifiable(DTYPE)}.values()
CASES = [pytest.param(spec, small(case), id=f"{spec.name}: {case.name}") for spec, case in DISTINCT]
OPERATORS = {spec.name: pytest.param(spec, id=spec.name) for spec, _ in verifiable(DTYPE)}.values()


def triton(spec):
    return lambda **inputs: spec.function(**inputs, impl="triton")


def continued_case(spec, decay="channel"):
    return small(next(c for c in spec.cases if c.decay == decay and c.continued and c.documents == "many"))


@pytest.fixture
def poisoned():
    """Memory that torch hands out unwritten is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_outputs_and_every_gradient_are_within_budget(spec, case, poisoned):
    for dtype in (torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float32,):
        for result in check(spec, case, dtype, DEVICE, MULTIPLE):
            assert result.passed, result


@pytest.mark.parametrize("spec", OPERATORS)
def test_gradients_of_any_layout_and_absent_ones(spec):
    inputs = spec.make_inputs(continued_case(spec), torch.float32, DEVICE, 0)
    names = leaves(inputs)
    for loss in (lambda o, s: o.sum(), lambda o, s: s.sum(), lambda o, s: (o.mT * 2.0).mT.sum() + s.mT.sum()):
        found, wanted = (
            torch.autograd.grad(loss(*f(**inputs)), list(names.values()), allow_unused=True, materialize_grads=True)
            for f in (triton(spec), spec.chunked)
        )
        for name, x, want in zip(names, found, wanted, strict=True):
            assert torch.allclose(x, want, rtol=1e-3, atol=1e-4 * want.abs().max().item()), name


@pytest.mark.parametrize("spec", OPERATORS)
def test_two_runs_are_bit_identical(spec):
    inputs = spec.make_inputs(continued_case(spec), torch.float32, DEVICE, 0)
    first, second = (outputs_and_gradients(triton(spec), inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("spec", OPERATORS)
def test_steps_are_within_budget(spec):
    case = replace(continued_case(spec), tokens=2, documents="one")
    for result in check_step(spec, case, torch.float32, DEVICE, MULTIPLE):
        assert result.passed, result


@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
@pytest.mark.parametrize("spec", OPERATORS)
def test_a_row_scanned_in_segments_is_the_same_row(spec, decay, monkeypatch):
    autograd = importlib.import_module(f"mixer_kernels.{spec.name}.autograd")
    monkeypatch.setattr(autograd, "processors", lambda device: 1024)
    monkeypatch.setattr(autograd, "FEWEST_CHUNKS", 1)
    case = Case(
        "segments", batch=1, tokens=330, heads=1, key_dim=16, value_dim=32, decay=decay, documents=3, continued=True
    )
    for result in check(spec, case, DTYPE, DEVICE):
        assert result.passed, result


@pytest.mark.parametrize("spec", OPERATORS)
def test_copies_of_a_row_give_the_same_bits(spec, monkeypatch):
    monkeypatch.setattr(verify, "COPIES", 3)  # for 2^31 elements see `make verify-kernels`
    case = Case("copies", batch=1, tokens=128, heads=1, decay="channel", documents=3)  # whole chunks
    for result in check_copies(spec, case, torch.float32, DEVICE):
        assert result.passed, result


@pytest.mark.parametrize("spec", OPERATORS)
def test_compiles_without_a_graph_break(spec):
    inputs = spec.make_inputs(continued_case(spec, "scalar"), torch.float32, DEVICE, 0)
    compiled = torch.compile(triton(spec), fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    found, wanted = (outputs_and_gradients(f, inputs) for f in (compiled, triton(spec)))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class Record(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the package's custom operators and their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "mixer_kernels":
            self.calls.append((op, args))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", OPERATORS)
def test_eager_mode_gives_what_the_custom_operators_give(spec):
    inputs = spec.make_inputs(continued_case(spec), torch.float32, DEVICE, 0)
    eager = outputs_and_gradients(triton(spec), inputs)
    with Record():
        recorded = outputs_and_gradients(triton(spec), inputs)
    assert all(torch.equal(eager[name], recorded[name]) for name in recorded)


@pytest.mark.parametrize("spec", OPERATORS)
def test_the_custom_operators_keep_torchs_rules(spec):
    """Fakes, autograd registration and no aliasing, over the operators that a call goes through."""
    inputs = spec.make_inputs(continued_case(spec), torch.float32, DEVICE, 0)
    with Record() as record:
        outputs_and_gradients(triton(spec), inputs)
    assert len(record.calls) == 2  # forward and backward
    for op, arguments in record.calls:
        checks = ["test_schema", "test_faketensor", "test_autograd_registration"]
        fresh = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in arguments]
        torch.library.opcheck(op, tuple(fresh), test_utils=checks)
