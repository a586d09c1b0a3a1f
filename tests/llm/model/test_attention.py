"""Softmax attention by its fast paths against the masked one, and the lengths that they go by."""

from __future__ import annotations

import pytest
import torch

from llm.data.batch import Batch
from llm.model.attention import attend, attend_causally
from llm.model.rotary import rotate, rotation
from mixer_kernels.segments import Segments, cumulative_lengths

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs(rows=2, tokens=200, heads=4, kv_heads=2, size=64, device="cpu", dtype=torch.float64):
    shapes = [(rows, tokens, h, size) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(*shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]


def packed(rows=2, tokens=200) -> Segments:
    starts = torch.rand(rows, tokens) < 0.05
    starts[0, 0] = True  # the other row goes on with a document
    return Segments.from_starts(starts)


def test_cumulative_lengths():
    row_start = torch.tensor([[0, 0, 2, 3], [-1, -1, 2, 2]], dtype=torch.int32)
    assert cumulative_lengths(row_start).tolist() == [0, 2, 3, 4, 6, 8]
    assert cumulative_lengths(row_start).dtype is torch.int32


def test_a_batch_on_the_cpu_keeps_what_it_is():
    row_start = torch.zeros(1, 4, dtype=torch.int32)
    batch = Batch(torch.zeros(1, 4), torch.zeros(1, 4), row_start, {"row": 1}, whole=True).to("cpu")
    assert batch.segments.whole
    assert batch.state == {"row": 1}


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_whole_rows_are_masked_ones(kv_heads):
    q, k, v = inputs(kv_heads=kv_heads)
    segments = Segments.whole_rows(2, 200)
    found = attend_causally(q, k, v, segments, None)
    torch.testing.assert_close(found, attend(q, k, v, segments.visible()))


def test_without_lengths_rows_are_masked():
    q, k, v = inputs()
    segments = packed()
    assert torch.equal(attend_causally(q, k, v, segments, 7), attend(q, k, v, segments.visible(7)))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("whole", [True, False])
def test_fast_paths_on_a_gpu(kv_heads, window, whole):
    q, k, v = inputs(kv_heads=kv_heads, device="cuda", dtype=torch.bfloat16)
    plain = Segments.whole_rows(2, 200) if whole else packed()
    row_start = plain.row_start.cuda()
    segments = Segments(row_start, cumulative_lengths(plain.row_start).cuda(), plain.whole)
    dy = torch.randn_like(q)
    found, wanted = (
        [y.double(), *(g.double() for g in torch.autograd.grad(y, [q, k, v], dy))]
        for y in (
            attend_causally(q, k, v, segments, window),
            attend(q, k, v, Segments(row_start).visible(window)),
        )
    )
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() < 0.01 * b.norm()


def test_rotation():
    x, positions = torch.randn(3, 2, 8, dtype=torch.float64), torch.tensor([0, 1, 1000])
    angle = positions[:, None] * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = (
        torch.view_as_complex(torch.stack([x[..., :4], x[..., 4:]], -1))
        * torch.polar(torch.ones(3, 4).double(), angle)[:, None]
    )
    torch.testing.assert_close(rotate(x, positions, 1e4), torch.cat([turned.real, turned.imag], -1))
    torch.library.opcheck(rotation, (positions, 4, 1e4, torch.float32))
