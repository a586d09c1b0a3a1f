"""Benchmarks of steps: what they count, and how they fail."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from llm.bench import jobs, losses, paths
from llm.bench.rows import RandomRows
from llm.bench.steps import bench_config, time_steps
from llm.bench.timing import Timing, plot, split_table, table
from llm.data.loader import batches
from llm.loss import linear_cross_entropy

TINY = ["model=tiny", "model.n_layers=2", "model.d_model=32", "model.head_dim=16", "model.linear_head_dim=16"]
TINY += ["model.parameters=40000", "tokenizer.vocab_size=50"]


def test_random_rows_are_whole_or_packed_and_the_same_every_time():
    one, other = (next(batches(RandomRows(50, 4096, packed=True), micro_batch=4, rows_per_step=4)) for _ in "ab")
    assert one.tokens.equal(other.tokens)
    assert one.row_start.equal(other.row_start)
    documents = (one.row_start == np.arange(4096)).sum()
    assert 8 < documents < 40, "documents of a thousand tokens"
    assert not one.whole
    assert next(batches(RandomRows(50, 64, packed=False), micro_batch=2, rows_per_step=2)).whole


@pytest.mark.parametrize("packed", [False, True])
def test_times_real_steps(packed):
    config = bench_config(["mixer=hybrid_gla_1to1", *TINY], context=64, tokens=128)
    found = time_steps(config, packed=packed, steps=2, by_part=True)
    assert (found.name, found.context, found.rows, found.packed) == ("hybrid_gla_1to1", 64, 2, packed)
    assert found.tokens_per_second == pytest.approx(128 / (found.milliseconds / 1000))
    assert 3 < found.loss < 5, "random tokens: log 50"
    assert {"MLP", "loss", "optimizer", "rest", "data (host)"} < found.split.keys()
    assert len(found.split) == 7, "and each of the mixers"


def test_a_worker_that_fails_or_hangs_is_reported(monkeypatch):
    job = {"name": "x", "contexts": [64, 128], "packed": [True]}
    first = (
        'import sys; input(); print(\'TIMING {"name": "x", "context": 64, "packed": true, "loss": 1.0}\', flush=True); '
    )
    for rest, reason in (
        ("sys.exit('out of memory')", "out of memory"),
        ("import time; time.sleep(60)", "not finished"),
    ):
        monkeypatch.setattr(jobs, "worker_command", lambda job, rest=rest: [sys.executable, "-c", first + rest])
        good, bad = jobs.run_jobs([job], limit=3)
        assert (good.context, good.loss, good.failed) == (64, 1.0, "")
        assert bad.context == 128
        assert reason in bad.failed


def test_tables_and_plots(tmp_path):
    good = Timing("a", 64, True, 10**6, 2, 5.0, 1000.0, 0.5, 1.0, 2.0, 3, 1, split={"MLP": 2.0})
    bad = Timing("b", 64, False, failed="out of memory")
    text = table([good, bad])
    assert "| a | 1.0M | 64 | 2 | packed | 5.0 | 1.0k | 50.0% | 1.0 | 2.0 | 3 + 1 later |" in text
    assert "out of memory" in text
    assert "| a | 64 | 5.0 | 2.0 |" in split_table([good, bad])
    assert split_table([bad]) == ""
    for contexts in ((64,), (64, 128)):
        timings = [Timing("a", context, True, tokens_per_second=1.0) for context in contexts]
        plot([*timings, bad], tmp_path / "plot.png")
        assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_path_is_within_what_another_order_of_the_data_does():
    steps, noise = np.arange(300), np.random.default_rng(0).normal(size=(3, 300))
    curve = 5 + 5 * np.exp(-steps / 100)
    orders = [curve + 0.05 * n for n in noise]
    found = paths.verdicts({paths.REFERENCE: orders[0], "near": orders[0] + 1e-4, "far": orders[0] + 0.05}, orders)
    assert [row["within"] for row in found] == [True, True, False]
    assert found[1]["largest"] == pytest.approx(1e-4)


def test_paths_of_a_layout():
    found = paths.path_words(["mixer=hybrid_gdn_3to1"])
    assert found["plain torch"] == ["compile=false", "mixers.gdn.impl=chunked"]
    assert "plain torch" not in paths.path_words(["mixer=softmax"])


def test_full_logits_are_the_chunked_loss():
    hidden, weight = torch.randn(2, 7, 8, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64)
    targets = torch.randint(11, (2, 7))
    targets[0, 0] = -100
    one, other = (f(hidden, weight, targets, 11) for f in (paths.full_logits, linear_cross_entropy))
    torch.testing.assert_close(one[0], other[0], check_dtype=False)
    assert one[1] == other[1]


def test_losses_are_compared_with_fp64(monkeypatch):
    monkeypatch.setattr(losses, "ROUNDS", 1)
    hidden, weight = torch.randn(40, 8).requires_grad_(), torch.randn(16, 8).requires_grad_()
    targets = torch.randint(16, (40,))
    truth = losses.exact(hidden, weight, targets)
    ours = losses.implementations([16])["ours, eager"]
    good = losses.measure("good", ours, hidden, weight, targets, truth)
    assert 0 < good.hidden_error < 0.02, "bf16 products"
    assert good.loss_error < 1e-3
    wrong = losses.measure("wrong", lambda h, w, t: 1.1 * ours(h, w, t), hidden, weight, targets, truth)
    assert wrong.weight_error > 0.09
    assert losses.measure("none", lambda h, w, t: h @ w, hidden, weight, targets, truth).failed
