"""What is particular to linear attention."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from mixer_kernels import linear_attention
from mixer_kernels.linear_attention.spec import SPEC
from mixer_kernels.spec import Case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")


@needs_triton
def test_what_triton_does_not_take_is_refused_by_name_and_left_to_the_chunkwise_form():
    case = Case("refused", batch=1, tokens=3, heads=1, key_dim=264, value_dim=16)
    inputs = SPEC.make_inputs(case, torch.float32, DEVICE, 0)
    with pytest.raises(ValueError, match=r"K = 264 \(at most 256"):
        linear_attention(**inputs, impl="triton")
    with pytest.raises(ValueError, match="exclusive=True"):
        linear_attention(**inputs | {"exclusive": True}, impl="triton")
    assert torch.equal(linear_attention(**inputs)[0], linear_attention(**inputs, impl="chunked")[0])


def test_bf16_operands_round_but_gates_and_state_do_not():
    case = Case("bf16", tokens=300, decay="channel", continued=True)
    inputs = SPEC.make_inputs(case, torch.bfloat16, "cpu", 0)
    exact = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    (o, final), (o_exact, final_exact) = linear_attention(**inputs), linear_attention(**exact)
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    assert ((o.double() - o_exact).norm() / o_exact.norm()).item() < 2.0**-8
    assert ((final.double() - final_exact).norm() / final_exact.norm()).item() < 2.0**-8
