"""Does the model find what it was told? Needles in the run's own held-out text, by kind, length and depth.

The answer counts as found when each of its tokens is the likeliest one, which is what greedy decoding would write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from llm.config import DataConfig
from llm.data import IGNORED, HeldOut, HeldOutRows
from llm.data.encode import Encoder
from llm.data.needle import Hider, NeedleHeldOut
from llm.data.rows import Row, collate
from llm.errors import UserError
from llm.evaluate.losses import Fit, token_losses
from llm.evaluate.results import NO_MEMORY
from llm.model.decoder import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# name -> boxes, numbers: one needle; one of four that must be told apart by their key; four numbers of one key
PROBES = {"single": (1, 1), "multi_key": (4, 1), "multi_value": (1, 4)}
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def probe(
    model: Decoder, text: HeldOut, tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, samples: int, fit: Fit
) -> list[dict[str, Any]]:
    """Every probe in rows of `text`, `samples` rows at each depth (several numbers: at depths drawn at random)."""
    found = []
    for name, (boxes, numbers) in PROBES.items():
        hider = Hider(Encoder(tokenizer), boxes, numbers, config.seed, only_answers=True)
        cell = {"probe": name, "boxes": boxes, "numbers": numbers, "length": text.context}
        try:
            hider.check(text.context)
        except UserError:
            found.append({**cell, "depth": None, "skipped": "too short"})
            continue
        for depth in DEPTHS if numbers == 1 else (None,):
            rows = [hider.hide(text.read(i % len(text)), "probe", name, i, depth=depth) for i in range(samples)]
            result = fit.run(lambda rows=rows: _ask(model, rows, fit))
            found.append({**cell, "depth": depth, **(result or {"skipped": NO_MEMORY})})
    return found


def text_of(held_out: HeldOut) -> HeldOut | None:
    """The rows of text behind a validation set; None for tasks."""
    if isinstance(held_out, NeedleHeldOut):
        return held_out.text
    return held_out if isinstance(held_out, HeldOutRows) else None


def _ask(model: Decoder, rows: list[Row], fit: Fit) -> dict[str, Any]:
    """Shares of answers and of their tokens that are right, and the loss of a token of the answers."""
    device = model.head_weight.device
    exact, sums = 0, torch.zeros(3, dtype=torch.float64, device=device)  # nats, right, counted
    for start in range(0, len(rows), fit.rows):
        batch = collate(rows[start : start + fit.rows], {}).to(device)
        losses_BT, right_BT = token_losses(model, batch, chunk=fit.chunk)
        counted = batch.targets != IGNORED
        exact += int((right_BT | ~counted).all(dim=1).sum())
        sums += torch.stack([losses_BT.sum().double(), (right_BT & counted).sum(), counted.sum()])
    nats, right, count = sums.tolist()
    return {"samples": len(rows), "exact": exact / len(rows), "token_accuracy": right / count, "loss": nats / count}
