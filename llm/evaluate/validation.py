"""Loss on held-out text or tasks: by set, by length of the rows, by position in the document; bits per byte."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llm.data import IGNORED, HeldOut, validation_batches
from llm.evaluate.losses import Fit, token_losses
from llm.evaluate.results import NO_MEMORY
from llm.metrics import perplexity
from llm.model.decoder import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUCKETS = 40  # of positions: bucket b holds tokens that see up to 2**b tokens, themselves included, and more than half


def evaluate_set(
    model: Decoder, held_out: HeldOut, bytes_W: Tensor | None, *, max_tokens: int, fit: Fit
) -> dict[str, Any]:
    """Loss, perplexity, accuracy, bits per byte (None without `bytes_W`, a tokenizer's bytes by token) and by position.

    At most about `max_tokens` tokens are read, in rows from all over the set. `fit` may shrink.
    """
    rows = min(len(held_out), max(1, max_tokens // held_out.context))
    sums = fit.run(lambda: _sums(model, held_out, bytes_W, rows, fit))
    if sums is None:
        return {"rows": rows, "skipped": NO_MEMORY}
    loss_P, right_P, count_P, length_P = (x.tolist() for x in sums)
    count, nats, size = sum(count_P), sum(loss_P), sum(length_P)
    loss = nats / max(1, count)
    return {
        "rows": rows,
        "tokens": int(count),
        "loss": loss,
        "perplexity": perplexity(loss),
        "accuracy": sum(right_P) / max(1, count),
        "bytes": int(size) if size else None,
        "bits_per_byte": nats / math.log(2) / size if size else None,
        "by_position": [
            {"from": 2**b // 2 + 1, "to": 2**b, "tokens": int(n), "loss": x / n, "accuracy": r / n}
            for b, (x, r, n) in enumerate(zip(loss_P, right_P, count_P, strict=True))
            if n
        ],
    }


def _sums(model: Decoder, held_out: HeldOut, bytes_W: Tensor | None, rows: int, fit: Fit) -> Tensor:
    """fp64 [4, BUCKETS]: nats, right predictions, counted targets and their bytes, by bucket of positions."""
    device = model.head_weight.device
    sums = torch.zeros(4, BUCKETS, dtype=torch.float64, device=device)
    for batch in validation_batches(held_out, micro_batch=min(fit.rows, rows), max_rows=rows):
        batch = batch.to(device)
        losses_BT, right_BT = token_losses(model, batch, chunk=fit.chunk)
        counted = batch.targets != IGNORED
        seen = torch.arange(1, batch.tokens.shape[1] + 1, device=device) - batch.row_start  # [B, T]
        bucket = seen[counted].double().log2().ceil().long()
        targets = batch.targets[counted]
        sizes = torch.zeros_like(targets) if bytes_W is None else bytes_W.to(device)[targets]
        values = (losses_BT[counted], right_BT[counted], torch.ones_like(targets), sizes)
        sums += torch.stack([torch.bincount(bucket, weights=v.double(), minlength=BUCKETS) for v in values])
    return sums


def bytes_of_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Tensor:
    """int64 [vocab_size]: UTF-8 bytes that each token stands for; 0 for special tokens and those that do not exist.

    In byte-level tokenizers a character of a token is a byte; in others a metasymbol is a space and <0x0A> a byte.
    """
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    names = tokenizer.convert_ids_to_tokens(list(range(min(vocab_size, len(tokenizer)))))
    special = set(tokenizer.all_special_ids)
    size = len if "ByteLevel" in decoder else _size_of_piece
    sizes = [0 if i in special or name is None else size(name) for i, name in enumerate(names)]
    return torch.tensor([*sizes, *[0] * (vocab_size - len(sizes))])


def _size_of_piece(name: str) -> int:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return 1
    return len(name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode())
