"""What holds of every operator, over the cases that its `spec.py` lists."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mixer_kernels import Segments
from mixer_kernels.spec import all_specs, span, token

SPECS = all_specs()
CASES = [pytest.param(spec, case, id=f"{spec.name}: {case.name}") for spec in SPECS.values() for case in spec.cases]
OPERATORS = [pytest.param(spec, id=spec.name) for spec in SPECS.values()]
TOLERANCE = 1e-10  # of the largest entry, in fp64


def leaves(inputs):
    return {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.requires_grad}


def outputs_and_gradients(function, inputs, seed=1):
    """Everything that a loss over output and final state makes of the inputs, by name."""
    generator = torch.Generator().manual_seed(seed)
    o, final = function(**inputs)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in (o, final))
    names = leaves(inputs)
    gradients = torch.autograd.grad(loss, list(names.values()), allow_unused=True)
    found = {"o": o, "final_state": final} | {f"d{n}": d for n, d in zip(names, gradients, strict=True)}
    return {name: x.detach() for name, x in found.items() if x is not None}


def assert_close(found, wanted, tolerance=TOLERANCE):
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        assert found[name].shape == want.shape, name
        scale = max(want.abs().max().item(), 1e-3)  # where all is zero rounding is left
        error = (found[name] - want).abs().max().item() / scale
        assert error <= tolerance, f"{name}: {error:.2e} of the largest entry"


def document_spans(segments, row):
    """(begin, end) of each document of a row."""
    start = segments.row_start[row].clamp(min=0)
    begins = start.unique().tolist()
    return list(zip(begins, [*begins[1:], len(start)], strict=True))


def rows_of(inputs, row):
    """The inputs of one row."""
    own = {name: x[row : row + 1] if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    return own | {"segments": Segments(inputs["segments"].row_start[row : row + 1])}


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_chunked_equals_the_recurrence(spec, case):
    inputs = spec.make_inputs(case, torch.float64, "cpu", 0)
    assert_close(outputs_and_gradients(spec.chunked, inputs), outputs_and_gradients(spec.reference, inputs))


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_chunked_in_single_precision_is_finite_and_near(spec, case):
    inputs = spec.make_inputs(case, torch.float32, "cpu", 0)
    exact = {n: x.detach().double().requires_grad_() if n in leaves(inputs) else x for n, x in inputs.items()}
    o, final = spec.chunked(**inputs)
    assert o.dtype == final.dtype == torch.float32
    wanted = dict(zip(("o", "final"), spec.reference(**exact), strict=True))
    found = {"o": o.double(), "final": final.double()}
    assert_close(found, wanted, 5e-4)


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_step_repeated_equals_forward(spec, case):
    inputs = spec.make_inputs(case, torch.float64, "cpu", 0)
    o, final = (x.detach() for x in spec.chunked(**inputs))
    row_start = inputs["segments"].row_start
    state = inputs.get("initial_state", torch.zeros_like(final)).detach()
    steps = []
    for t in range(case.tokens):
        state = torch.where((row_start[:, t] < t)[:, None, None, None], state, 0.0)
        out, state = spec.step(**token(inputs, t), state=state)
        steps.append(out.detach())
    assert_close({"o": torch.stack(steps, 1), "final": state.detach()}, {"o": o, "final": final})


@pytest.mark.parametrize(("spec", "case"), [c for c in CASES if c.values[1].documents != "one"])
def test_packed_documents_equal_each_alone(spec, case):
    inputs = spec.make_inputs(case, torch.float64, "cpu", 0)
    o, final = spec.chunked(**inputs)
    for row in range(case.batch):
        own = rows_of(inputs, row)
        for begin, end in document_spans(inputs["segments"], row):
            continued = own["segments"].row_start[0, begin] < 0 and "initial_state" in own
            state = own["initial_state"] if continued else None
            alone, last = spec.chunked(**span(own, begin, end), initial_state=state)
            assert_close({"o": alone}, {"o": o[row : row + 1, begin:end]})
        assert_close({"final": last}, {"final": final[row : row + 1]})


@pytest.mark.parametrize(("spec", "case"), [c for c in CASES if c.values[1].tokens > 1])
def test_two_halves_equal_the_whole_with_gradients_through_the_state(spec, case):
    inputs = spec.make_inputs(case, torch.float64, "cpu", 0)
    row_start = inputs["segments"].row_start
    cut = case.tokens * 2 // 5

    def in_two(**whole):
        second = row_start[:, cut:]
        second = torch.where(second < cut, -1, second - cut).int()
        first = span(whole, 0, cut) | {"segments": Segments(row_start[:, :cut])}
        o1, state = spec.chunked(**first, initial_state=whole.get("initial_state"))
        o2, final = spec.chunked(**span(whole, cut, case.tokens), segments=Segments(second), initial_state=state)
        return torch.cat([o1, o2], dim=1), final

    assert_close(outputs_and_gradients(in_two, inputs), outputs_and_gradients(spec.chunked, inputs))


@pytest.mark.parametrize("spec", OPERATORS)
def test_without_segments_a_row_is_one_document_continued_iff_a_state_is_given(spec):
    for case in [c for c in spec.cases if c.documents == "one" and c.tokens > 1]:
        inputs = spec.make_inputs(case, torch.float64, "cpu", 0)
        wanted = spec.chunked(**inputs)
        inputs.pop("segments")
        for found, want in zip(spec.chunked(**inputs), wanted, strict=True):
            assert torch.equal(found, want)


@pytest.mark.parametrize("spec", OPERATORS)
def test_autocast_casts_the_operands_but_neither_gates_nor_state(spec):
    case = next(c for c in spec.cases if c.decay == "channel" and c.continued and c.tokens > 64)
    inputs = spec.make_inputs(case, torch.float32, "cpu", 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, final = spec.function(**inputs)
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    cast = {n: x.detach().bfloat16() if n in ("q", "k", "v", "e") else x for n, x in inputs.items()}
    wanted, wanted_final = spec.function(**cast)
    assert torch.equal(o, wanted)  # a gate or a state in bf16 would show here
    assert torch.equal(final, wanted_final)


@pytest.mark.parametrize("spec", OPERATORS)
def test_wrong_shapes_are_refused_by_name(spec):
    case = next(c for c in spec.cases if c.continued and c.decay == "channel" and c.tokens > 1)
    inputs = spec.make_inputs(case, torch.float32, "cpu", 0)
    for name in [n for n in leaves(inputs) if n != "q"]:
        broken = inputs | {name: inputs[name][..., :-1]}
        if name == "v":  # any V is a legal V: break the tokens instead
            broken = inputs | {name: inputs[name][:, :-1]}
            broken.pop("initial_state")
        with pytest.raises(ValueError, match=rf"\b{name}\b.*expected"):
            spec.function(**broken)
    with pytest.raises(ValueError, match="row_start"):
        spec.function(**inputs | {"segments": Segments(inputs["segments"].row_start[:, :-1])})
    with pytest.raises(ValueError, match="dtype"):
        spec.function(**inputs | {"v": inputs["v"].double()})
    with pytest.raises(ValueError, match="impl"):
        spec.function(**inputs, impl="fastest")


@pytest.mark.parametrize("spec", OPERATORS)
def test_compiles_without_a_graph_break(spec):
    case = next(c for c in spec.cases if c.decay == "channel" and c.continued and c.tokens > 64)
    inputs = spec.make_inputs(case, torch.float32, "cpu", 0)
    compiled = torch.compile(spec.function, fullgraph=True, backend="aot_eager")
    assert_close(outputs_and_gradients(compiled, inputs), outputs_and_gradients(spec.function, inputs), 1e-5)


@pytest.mark.parametrize("spec", OPERATORS)
def test_flops_of_the_recurrence_are_what_torch_counts(spec):
    for case in [c for c in spec.cases if c.documents == "one" and c.tokens > 1]:
        inputs = spec.make_inputs(case, torch.float32, "cpu", 0)
        with FlopCounterMode(display=False) as counter:
            spec.reference(**inputs)
        assert counter.get_total_flops() == spec.flops(case)["forward"], case.name


@pytest.mark.parametrize("spec", OPERATORS)
def test_the_recurrence_imports_without_triton(spec):
    program = (
        "import sys; sys.modules['triton'] = None\n"
        f"import mixer_kernels.{spec.name}.reference, mixer_kernels\n"
        "assert not [m for m in sys.modules if m.startswith('triton.')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
