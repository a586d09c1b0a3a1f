"""The chunked loss against torch's own cross-entropy on the full logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from llm.data.batch import IGNORED
from llm.loss import count_right, linear_cross_entropy, softmax_error

VOCAB, PADDED, WIDTH = 37, 64, 16


def inputs(dtype=torch.float64, batch=3, tokens=11):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, tokens, WIDTH, dtype=dtype, generator=generator)
    weight = torch.randn(PADDED, WIDTH, dtype=dtype, generator=generator)
    targets = torch.randint(VOCAB, (batch, tokens), generator=generator)
    targets[0, 3] = targets[1, :] = targets[2, -1] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def oracle(hidden, weight, targets):
    logits = (hidden @ weight.T)[..., :VOCAB]
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def gradients(loss, *tensors):
    return torch.autograd.grad(0.7 * loss, tensors)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 11, 33, 1000, None])
def test_equals_the_full_cross_entropy_in_fp64(chunk_tokens):
    hidden, weight, targets = inputs()
    loss, counted = linear_cross_entropy(hidden, weight, targets, VOCAB, chunk_tokens=chunk_tokens)
    expected = oracle(hidden, weight, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert counted == (targets != IGNORED).sum()
    ours, theirs = gradients(loss, hidden, weight), gradients(expected, hidden, weight)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    assert ours[0][1].abs().max() == 0, "ignored targets have no gradient"
    assert ours[1][VOCAB:].abs().max() == 0, "padded entries have no gradient"


def test_padded_entries_cannot_win():
    hidden, weight, targets = inputs()
    plain, _ = linear_cross_entropy(hidden, weight, targets, VOCAB)
    huge = weight.detach().clone()
    huge[VOCAB:] = 1e3
    padded, _ = linear_cross_entropy(hidden, huge, targets, VOCAB)
    assert torch.equal(plain, padded)


def test_all_targets_ignored():
    hidden, weight, targets = inputs()
    loss, counted = linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORED), VOCAB)
    assert loss == 0
    assert counted == 0
    assert all(grad.abs().max() == 0 for grad in gradients(loss, hidden, weight))


def test_only_the_gradients_that_are_needed():
    hidden, weight, targets = inputs()
    loss, _ = linear_cross_entropy(hidden, weight.detach(), targets, VOCAB)
    (grad,) = gradients(loss, hidden)
    torch.testing.assert_close(grad, gradients(oracle(hidden, weight, targets), hidden)[0])
    with torch.no_grad():
        loss, _ = linear_cross_entropy(hidden, weight, targets, VOCAB)
    assert not loss.requires_grad


def test_autocast_keeps_softmax_and_accumulation_in_fp32():
    """The error against fp64 stays within that of the same products with operands rounded to bf16."""
    hidden, weight, targets = inputs(torch.float32, batch=8, tokens=64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, targets, VOCAB, chunk_tokens=50)
    assert loss.dtype == torch.float32
    grad_hidden, grad_weight = gradients(loss, hidden, weight)
    assert grad_weight.dtype == grad_hidden.dtype == torch.float32

    hidden64, weight64 = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact = oracle(hidden64, weight64, targets)
    rounding = 2**-8  # bf16 has 8 bits of significand
    torch.testing.assert_close(loss.double(), exact, rtol=rounding, atol=0)
    for ours, theirs in zip((grad_hidden, grad_weight), gradients(exact, hidden64, weight64), strict=True):
        assert (ours - theirs).norm() <= 4 * rounding * theirs.norm()


def test_never_holds_the_full_logits():
    """No tensor that autograd keeps, or that is made on the way, has as many rows as there are tokens."""
    hidden, weight, targets = inputs(torch.float32, batch=8, tokens=64)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[-1] == PADDED:
                largest = max(largest, out.shape[0])
            return out

    with Watch():
        linear_cross_entropy(hidden, weight, targets, VOCAB, chunk_tokens=32)[0].backward()
    assert 0 < largest <= 32


@pytest.mark.parametrize("chunk_tokens", [1, 5, None])
def test_right_predictions_are_counted_among_counted_targets_and_real_entries(chunk_tokens):
    hidden, weight, targets = inputs()
    logits = hidden @ weight.T
    logits[..., VOCAB:] = -torch.inf
    right = logits.argmax(-1)
    targets = torch.where(torch.arange(11) % 2 == 0, right, targets)
    targets[1, :] = IGNORED
    expected = ((right == targets) & (targets != IGNORED)).sum()
    assert expected > 10
    assert count_right(hidden, weight, targets, VOCAB, chunk_tokens=chunk_tokens) == expected
    assert count_right(hidden, weight, torch.full_like(targets, IGNORED), VOCAB) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_gradients_are_those_of_fp64_but_for_the_rounding_of_operands(compiled):
    """Many chunks in bf16, whose shares of the head's gradient are summed in fp32 by the product itself."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4096, 128, generator=generator).cuda().requires_grad_()
    weight = torch.randn(640, 128, generator=generator).cuda().mul_(0.1).requires_grad_()
    targets = torch.randint(600, (4096,), generator=generator).cuda()
    error = torch.compile(softmax_error, dynamic=False) if compiled else None
    with torch.autocast("cuda", torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, targets, 600, chunk_tokens=64, error=error)
    wide_hidden, wide_weight = hidden.detach().double(), weight.detach().double()
    wide_hidden.requires_grad_(), wide_weight.requires_grad_()
    expected = F.cross_entropy((wide_hidden @ wide_weight.T)[:, :600], targets, reduction="sum")
    for found, exact in zip(
        gradients(loss, hidden, weight), gradients(expected, wide_hidden, wide_weight), strict=True
    ):
        assert (found - exact).norm() / exact.norm() < 2.0**-7
