"""The short convolution: packed documents, histories, and the Triton kernels against plain torch."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch
import torch.nn.functional as F

from mixer_kernels import Segments, short_convolution

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(dtype=torch.float64, batch=2, tokens=45, channels=48, taps=4, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, tokens, channels, generator=generator, dtype=torch.float64)
    weight = torch.randn(channels, taps, generator=generator, dtype=torch.float64)
    starts = torch.rand(batch, tokens, generator=generator) < 0.2  # some rows begin within a document
    segments = Segments(Segments.from_starts(starts).row_start.to(device))
    return x.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_(), segments


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_is_torchs_convolution_of_each_document(taps):
    x, weight, _ = inputs(batch=1, taps=taps)
    cuts = [0, 1, 3, 20, 45]
    is_start = torch.zeros(1, 45, dtype=torch.bool)
    is_start[:, cuts[:-1]] = True
    packed = short_convolution(x, weight, segments=Segments.from_starts(is_start), silu=False)
    for begin, end in itertools.pairwise(cuts):
        alone = F.pad(x[:, begin:end].mT, (taps - 1, 0))
        expected = F.conv1d(alone, weight[:, None], groups=x.shape[2]).mT
        torch.testing.assert_close(packed[:, begin:end], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("silu", [True, False])
def test_gradients_of_everything(silu):
    x, weight, segments = inputs(tokens=9, channels=3)
    history = torch.randn(2, 3, 3, dtype=torch.float64).requires_grad_()
    run = lambda x, weight, history: short_convolution(x, weight, segments=segments, history=history, silu=silu)  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, weight, history))


def test_goes_on_after_a_history():
    x, weight, _ = inputs()
    is_start = torch.zeros(2, 45, dtype=torch.bool)
    is_start[:, [0, 10, 30]] = True
    whole = short_convolution(x, weight, segments=Segments.from_starts(is_start))
    rest = Segments.from_starts(is_start[:, 20:])
    again = short_convolution(x[:, 20:], weight, segments=rest, history=x[:, 17:20])
    torch.testing.assert_close(again, whole[:, 20:])


def test_messages():
    x, weight, _ = inputs()
    with pytest.raises(ValueError, match=r"weight has shape \[47, 4\], expected \[D, S\] = \[48, 4\]"):
        short_convolution(x, weight[:-1])
    with pytest.raises(ValueError, match="does not take a history"):
        short_convolution(x.float(), weight.float(), history=x[:, :3].float(), impl="triton")


needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")


@needs_triton
@pytest.mark.parametrize(("channels", "silu", "taps"), [(48, True, 4), (144, False, 3)])
def test_triton_computes_what_plain_torch_does(channels, silu, taps):
    x, weight, segments = inputs(torch.float32, channels=channels, taps=taps, device=DEVICE)
    dy = torch.randn_like(x)
    found, wanted = (
        [y, *torch.autograd.grad(y, [x, weight], dy)]
        for y in (short_convolution(x, weight, segments=segments, silu=silu, impl=i) for i in ("triton", "chunked"))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


@needs_triton
def test_custom_operators_are_sound():
    from mixer_kernels.short_convolution.autograd import backward_op, forward_op

    x, weight, segments = inputs(torch.float32, device=DEVICE, tokens=5)
    torch.library.opcheck(forward_op, (x, weight, segments.row_start, True))
    torch.library.opcheck(backward_op, (x.detach(), x.detach(), weight.detach(), segments.row_start, True))


@needs_triton
@pytest.mark.gpu
def test_triton_in_bf16():
    x, weight, segments = inputs(torch.float32, batch=8, tokens=1000, channels=1024, device="cuda")
    exact = short_convolution(x.double(), weight.double(), segments=segments)
    half = x.detach().bfloat16().requires_grad_()
    y = short_convolution(half, weight, segments=segments, impl="triton")
    assert ((y.double() - exact).norm() / exact.norm()) < 0.005
    wanted = torch.autograd.grad(exact.sum(), [x, weight])
    for a, b in zip(torch.autograd.grad(y.sum(), [half, weight]), wanted, strict=True):
        assert ((a.double() - b.double()).norm() / b.double().norm()) < 0.01
