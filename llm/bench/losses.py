"""Ways to compute the cross-entropy of a linear head, beside one another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.loss import linear_cross_entropy, softmax_error

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [N, D], weight [W, D], targets [N] -> summed loss
Truth = tuple[Tensor, Tensor, Tensor]  # loss, d hidden, d weight
ROUNDS, CHUNK = 20, 2048


class LossTiming(NamedTuple):
    """Forward and backward under bf16 autocast: milliseconds, peak MiB, relative errors against fp64."""

    name: str
    milliseconds: float = 0.0
    memory: float = 0.0
    loss_error: float = 0.0
    hidden_error: float = 0.0
    weight_error: float = 0.0
    failed: str = ""


def implementations(chunks: Sequence[int]) -> dict[str, Loss]:
    """Everything that is installed, by name."""
    compiled = torch.compile(softmax_error, dynamic=False)
    found: dict[str, Loss] = {f"ours, chunks of {size}": _ours(size, compiled) for size in chunks}
    found["ours, eager"] = _ours(None, softmax_error)
    found["full logits"] = lambda hidden, weight, targets: F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    full = torch.compile(lambda h, w, t: F.cross_entropy((h @ w.T).float(), t, reduction="sum"), dynamic=False)
    found["full logits, compiled"] = full
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        found["torch's"] = lambda h, w, t: F.linear_cross_entropy(h, w, t, reduction="sum")
    return found | _liger()


def _ours(size: int | None, error: Callable[..., tuple[Tensor, Tensor]]) -> Loss:
    return lambda h, w, t: linear_cross_entropy(h, w, t, w.shape[0], chunk_tokens=size, error=error)[0]


def _liger() -> dict[str, Loss]:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return {}
    plain = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    wide = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)
    return {"liger": lambda h, w, t: plain(w, h, t), "liger, sums in fp32": lambda h, w, t: wide(w, h, t)}


def exact(hidden: Tensor, weight: Tensor, targets: Tensor) -> Truth:
    """Loss and gradients in fp64."""
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss, _ = linear_cross_entropy(*wide, targets, weight.shape[0], chunk_tokens=CHUNK)
    return loss.detach(), *torch.autograd.grad(loss, wide)


def measure(name: str, loss_of: Loss, hidden: Tensor, weight: Tensor, targets: Tensor, truth: Truth) -> LossTiming:
    """Time one of them, and compare it with the truth."""

    def both() -> Truth:
        with torch.autocast(hidden.device.type, torch.bfloat16):
            loss = loss_of(hidden, weight, targets)
        return loss.detach(), *torch.autograd.grad(loss, [hidden, weight])

    try:
        found = both()
        memory = _peak(both)
        milliseconds = _milliseconds(both)
    except Exception as error:  # one that does not run here leaves the others alone
        return LossTiming(name, failed=(str(error) or type(error).__name__).splitlines()[0][:120])
    errors = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, truth, strict=True)]
    return LossTiming(name, milliseconds, memory, *errors)


def _peak(function: Callable[[], object]) -> float:
    """MiB that a call takes at most, above what is there before; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _milliseconds(function: Callable[[], object]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        function()
    wait()
    return 1000 * (time.perf_counter() - began) / ROUNDS
