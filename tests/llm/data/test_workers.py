"""Worker processes: the same rows as without, and no process left behind or taken down by a signal."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from llm.data import Mixture, TextFiles, batches, training_rows
from llm.errors import UserError


@pytest.fixture
def make_rows(tmp_path, texts, write_file, tokenizer, settings):
    # processes do not see this test's monkeypatches: enough text for several blocks of the real size
    paths = [write_file(tmp_path / f"{i}.parquet", texts(300, salt=i), batch_rows=20) for i in range(3)]
    source = TextFiles([str(path) for path in paths])
    return lambda **values: training_rows(settings(mode="stream", streams=5, **values), source, tokenizer, 32)


def take(loader, n):
    found = [next(loader) for _ in range(n)]
    loader.close()
    return found


def same(a, b):
    return all(torch.equal(x.tokens, y.tokens) and x.state == y.state for x, y in zip(a, b, strict=True))


def test_workers_change_nothing_and_their_number_may_change_on_resume(make_rows):
    rows, layout = make_rows(), {"micro_batch": 2, "rows_per_step": 8, "rank": 1, "world_size": 2}
    alone = take(batches(rows, **layout), 60)
    assert same(take(batches(rows, **layout, workers=2), 60), alone)
    # the state of one rank is whole only where it reads every stream: 2 rows of 4 at 5 streams do in 10 passes
    resumed = batches(rows, **layout, workers=4, state=alone[29].state)
    assert same(take(resumed, 30), alone[30:])


def test_workers_change_nothing_in_a_mixture(tmp_path, texts, jsonl, tokenizer, settings):
    paths = {name: str(jsonl(tmp_path / f"{name}.jsonl", texts(200, salt=i))) for i, name in enumerate("ab")}
    rows = training_rows(settings(mode="stream"), Mixture(paths, {"a": 2, "b": 1}), tokenizer, 32)
    layout = {"micro_batch": 4, "rows_per_step": 4}
    assert same(take(batches(rows, **layout), 30), take(batches(rows, **layout, workers=2), 30))


def test_an_error_in_a_worker_reaches_the_trainer(tmp_path, texts, jsonl, tokenizer, settings):
    path = jsonl(tmp_path / "a.jsonl", texts(20))
    rows = training_rows(settings(mode="stream"), TextFiles(str(path)), tokenizer, 32)
    path.write_text("not json\n")
    loader = batches(rows, micro_batch=1, rows_per_step=1, workers=1)
    with pytest.raises(UserError, match="line 1"):
        take(loader, 3)
    loader.close()


def test_sigterm_leaves_workers_at_work_and_closing_ends_them(make_rows):
    loader = batches(make_rows(), micro_batch=2, rows_per_step=2, workers=2)
    next(loader)
    processes = [process.pid for process in loader._reader._processes]
    for pid in processes:
        os.kill(pid, signal.SIGTERM)
    for _ in range(200):
        next(loader)
    loader.close()
    time.sleep(0.1)
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_that_is_killed_is_reported(make_rows, monkeypatch):
    monkeypatch.setattr("llm.data.workers.PATIENCE", 0.2)
    loader = batches(make_rows(), micro_batch=2, rows_per_step=2, workers=1)
    next(loader)
    os.kill(loader._reader._processes[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="data worker 0 ended with exit code -9"):
        take(loader, 1000)
    loader.close()
