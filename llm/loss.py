"""Cross-entropy of a linear output head that never holds the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llm.data.batch import IGNORED, Batch

CHUNK_BYTES = 2**30  # of a chunk's logits and their gradient, at most, unless chunk_tokens says otherwise

SoftmaxError = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def linear_cross_entropy(
    hidden_BTD: Tensor,
    head_weight_WD: Tensor,
    targets_BT: Tensor,
    vocab_size: int,
    *,
    chunk_tokens: int | None = None,
    error: SoftmaxError | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of ``hidden @ head_weight.T`` against `targets`, in nats, and how many it sums.

    hidden_BTD      [..., D]     after the final norm
    head_weight_WD  [W, D]       W may be padded above `vocab_size`: the entries beyond take no part
    targets_BT      int64 [...]  IGNORED where the prediction is not counted
    chunk_tokens    tokens whose logits exist at the same time; by default a power of two that fits into 1 GiB
    error           `softmax_error`, or a compiled one, which reads a chunk's logits once rather than ten times

    Returns (loss fp32 scalar, fp64 for fp64 inputs; counted int64 scalar). Under autocast the matrix products run in
    autocast's dtype; softmax, loss and the accumulated gradient of the head are fp32 or wider. Gradients are computed
    chunk by chunk in the forward pass, while the chunk's logits exist, so backward only scales them.
    """
    hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])  # [..., D] -> [N, D]
    targets_N = targets_BT.reshape(-1)
    counted = (targets_N != IGNORED).sum()
    settings = vocab_size, chunk_tokens or _chunk_tokens(head_weight_WD), error or softmax_error
    return _ChunkedCrossEntropy.apply(hidden_ND, head_weight_WD, targets_N, *settings), counted


@torch.no_grad()
def count_right(
    hidden_BTD: Tensor, head_weight_WD: Tensor, targets_BT: Tensor, vocab_size: int, *, chunk_tokens: int | None = None
) -> Tensor:
    """How many counted targets are the likeliest token, int64. Arguments as of `linear_cross_entropy`."""
    hidden_ND, targets_N = hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), targets_BT.reshape(-1)
    counted = targets_N != IGNORED  # few where only answers are counted
    hidden_ND, targets_N = hidden_ND[counted], targets_N[counted]
    chunk_tokens = chunk_tokens or _chunk_tokens(head_weight_WD)
    right = torch.zeros((), dtype=torch.int64, device=hidden_ND.device)
    for hidden_CD, targets_C in zip(hidden_ND.split(chunk_tokens), targets_N.split(chunk_tokens), strict=True):
        logits_CW = hidden_CD.to(head_weight_WD.dtype) @ head_weight_WD.T
        right += (logits_CW[:, :vocab_size].argmax(dim=1) == targets_C).sum()
    return right


def _chunk_tokens(head_weight_WD: Tensor) -> int:
    """A power of two, which divides most numbers of tokens, so that chunks have one shape."""
    fitting = CHUNK_BYTES // (4 * head_weight_WD.shape[0])  # two tensors in bf16
    return 2 ** (max(1, fitting).bit_length() - 1)


class LossSums(NamedTuple):
    """Sums over the counted targets of a batch.

    objective      what to minimise
    cross_entropy  in nats, detached
    right          targets that are the likeliest token; not counted (0) in training mode
    """

    objective: Tensor
    cross_entropy: Tensor
    right: Tensor


class NextTokenLoss(nn.Module):
    """A decoder together with its loss, so that one forward pass (which DDP and FSDP wrap) goes from tokens to loss."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder
        self.error: SoftmaxError = softmax_error

    def forward(self, batch: Batch) -> LossSums:
        """The sums over the batch.

        What to minimise has the auxiliary losses of the mixers in it: those entries of `aux` whose name ends in "loss",
        which are means over tokens.
        """
        out = self.decoder(batch.tokens, batch.segments)
        head = self.decoder.head_weight, batch.targets, self.decoder.vocab_size
        cross_entropy, counted = linear_cross_entropy(out.hidden, *head, error=self.error)
        auxiliary = [value for name, value in out.aux.items() if name.endswith("loss")]
        right = torch.zeros_like(counted) if self.training else count_right(out.hidden, *head)
        return LossSums(cross_entropy + sum(auxiliary) * counted, cross_entropy.detach(), right)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Walks over chunks of tokens, C at a time; W counts the padded vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_WD: Tensor,
        targets_N: Tensor,
        vocab_size: int,
        chunk_tokens: int,
        softmax_error: SoftmaxError,
    ) -> Tensor:
        device = hidden_ND.device.type
        operand_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_WD, dtype=wide) if needs_weight else None
        with torch.autocast(device, enabled=False):
            head_WD = weight_WD.to(operand_dtype)
            for start in range(0, hidden_ND.shape[0], chunk_tokens):
                chunk = slice(start, start + chunk_tokens)
                hidden_CD = hidden_ND[chunk].to(operand_dtype)
                logits_CW = hidden_CD @ head_WD.T
                if not needs_hidden and not needs_weight:
                    loss += _cross_entropy(logits_CW, targets_N[chunk], vocab_size)[0]
                    continue
                chunk_loss, error_CW = softmax_error(logits_CW, targets_N[chunk], vocab_size)
                loss += chunk_loss
                if grad_hidden is not None:
                    grad_hidden[chunk] = error_CW @ head_WD
                if grad_weight is not None:
                    _add_product(grad_weight, error_CW.T, hidden_CD)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight_WD.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


def softmax_error(logits_CW: Tensor, targets_C: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk, in fp32 or wider, and its gradient with respect to the logits, in their dtype.

    May overwrite the logits. Targets are compared, not scattered, so that a compiler makes one kernel of it all.
    """
    loss, wide_CW, log_total_C = _cross_entropy(logits_CW, targets_C, vocab_size)
    error_CW = wide_CW.sub_(log_total_C[:, None]).exp_()  # the softmax; 0 in padded entries
    is_target_CW = torch.arange(wide_CW.shape[1], device=wide_CW.device) == targets_C[:, None]
    error_CW.sub_(is_target_CW.to(error_CW.dtype)).masked_fill_((targets_C == IGNORED)[:, None], 0)
    return loss, error_CW.to(logits_CW.dtype)


def _cross_entropy(logits_CW: Tensor, targets_C: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss of a chunk, its logits in fp32 or wider with padded entries at -inf, and log sum exp of each row."""
    wide_CW = logits_CW.to(torch.promote_types(logits_CW.dtype, torch.float32))
    wide_CW[:, vocab_size:] = -torch.inf
    valid_C = targets_C != IGNORED
    log_total_C = torch.logsumexp(wide_CW, dim=-1)
    loss_C = log_total_C - wide_CW.gather(1, targets_C.where(valid_C, 0)[:, None])[:, 0]
    return loss_C.where(valid_C, 0).sum(), wide_CW, log_total_C


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where cuBLAS can without rounding the product to the factors' dtype."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
