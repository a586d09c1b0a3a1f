"""Every mixer learns: a small model on prose, for 200 steps."""

from __future__ import annotations

import json

import pytest
import torch

from llm.build import build_model
from llm.data.batch import Batch
from llm.loss import NextTokenLoss
from llm.paths import data_dir
from llm.tokenizer import load_tokenizer
from mixer_kernels import Segments

ROWS, TOKENS, STEPS = 4, 64, 200


@pytest.fixture(scope="module")
def prose() -> torch.Tensor:
    """The bundled held-out text as tokens, with the end of each document."""
    tokenizer = load_tokenizer("bundled:tokenizer")
    texts = [json.loads(line)["text"] for line in (data_dir() / "val.jsonl").read_text(encoding="utf-8").splitlines()]
    return torch.tensor([i for text in texts for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])


@pytest.mark.slow
def test_loss_falls_by_more_than_a_nat(mixer_name, make_config, prose):
    name, *settings = mixer_name.split()
    config = make_config(name, "model.n_layers=2", "model.parameters=100000", *(f"mixers.{name}.{s}" for s in settings))
    objective = NextTokenLoss(build_model(config, 4096)).train()
    optimizer = torch.optim.AdamW(objective.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, (step + 1) / 20)
        at = torch.randint(len(prose) - TOKENS - 1, (ROWS, 1)) + torch.arange(TOKENS + 1)  # [rows, tokens + 1]
        rows = prose[at]
        is_start = rows[:, :-1].roll(1, 1) == prose[-1]
        is_start[:, 0] = True
        batch = Batch(rows[:, :-1], rows[:, 1:], Segments.from_starts(is_start).row_start)
        loss = objective(batch)[0] / (ROWS * TOKENS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert all(map(torch.isfinite, torch.tensor(losses)))
    assert sum(losses[-20:]) / 20 < losses[0] - 1.0
