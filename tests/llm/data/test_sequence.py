"""One logical sequence of rows: the same global batches whatever the ranks, micro-batches and interruptions."""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pytest

from llm.data import IGNORED, TextFiles, batches, merge_states, stored, training_rows
from llm.data.stream import Position
from llm.errors import UserError

CONTEXT, ROWS, STEPS = 32, 8, 40
pytestmark = pytest.mark.usefixtures("small_blocks")

VARIANTS = {
    "memory": ({"mode": "memory"}, ["a.jsonl"]),
    "memory fit": ({"mode": "memory", "packing": "fit"}, ["a.jsonl"]),
    "stream one file": ({}, ["a.jsonl"]),
    "stream one stream": ({"streams": 1}, ["a.jsonl"]),
    "stream many files": ({"streams": 3}, [f"{i:02}.jsonl" for i in range(20)]),
    "stream compressed": ({"streams": 4}, ["a.jsonl.zst", "b.jsonl.zst"]),
    "stream parquet": ({"streams": 4}, ["a.parquet", "b.parquet"]),
    "stream joined": ({"separate": False}, ["a.jsonl"]),
    "stream held out": ({"held_out": 0.3}, ["a.jsonl"]),
    "stream fit": ({"packing": "fit", "streams": 4}, ["a.jsonl", "b.parquet"]),
}


@pytest.fixture(params=VARIANTS)
def make_rows(request, tmp_path, texts, write_file, tokenizer, settings):
    """Builds the rows anew, as another process would."""
    values, names = VARIANTS[request.param]
    for i, name in enumerate(names):
        write_file(tmp_path / name, texts(400 // len(names), salt=i), batch_rows=13)
    source = [str(tmp_path / name) for name in names]
    return lambda: training_rows(
        settings(**{"mode": "stream", "seed": 3, **values}), TextFiles(source), tokenizer, CONTEXT
    )


def run(make_rows, steps, *, world_size=1, micro_batch=ROWS, state=None):
    """The global batches of some steps, put together from the ranks' parts, and the state after them."""
    parts = {}
    states = []
    for rank in range(world_size):
        loader = batches(
            make_rows(), micro_batch=micro_batch, rows_per_step=ROWS, rank=rank, world_size=world_size, state=state
        )
        for j in range(steps * ROWS // (micro_batch * world_size)):
            batch = next(loader)
            parts[j, rank] = np.stack([batch.tokens, batch.targets, batch.row_start], axis=1)
        states.append(batch.state)
        loader.close()
    merged = json.loads(json.dumps(merge_states(states)))
    return np.concatenate([parts[key] for key in sorted(parts)]), merged


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 1), (2, 4), (2, 1), (4, 2), (8, 1)])
def test_ranks_and_accumulation_change_nothing(make_rows, world_size, micro_batch):
    whole, state = run(make_rows, STEPS)
    shared, shared_state = run(make_rows, STEPS, world_size=world_size, micro_batch=micro_batch)
    assert np.array_equal(whole, shared)
    assert state == shared_state


def test_interruptions_and_other_world_sizes_change_nothing(make_rows):
    whole, end = run(make_rows, STEPS)
    for seed in range(3):
        draw = random.Random(seed)
        cuts = sorted(draw.sample(range(1, STEPS), 3))
        found, state = [], None
        for start, stop in zip([0, *cuts], [*cuts, STEPS], strict=True):
            world_size = draw.choice([1, 2, 4])
            micro_batch = draw.choice([m for m in (1, 2, 4, 8) if m * world_size <= ROWS])
            rows, state = run(make_rows, stop - start, world_size=world_size, micro_batch=micro_batch, state=state)
            found.append(rows)
        assert np.array_equal(np.concatenate(found), whole)
        assert state == end


def test_a_state_is_a_few_integers_that_do_not_grow(make_rows):
    early, late = (len(json.dumps(run(make_rows, steps)[1])) for steps in (10, 200))
    assert late <= early + 150  # more digits


def test_a_changed_source_is_refused(make_rows, tmp_path, texts, write_file):
    _, state = run(make_rows, 1)
    write_file(sorted(tmp_path.iterdir())[0], texts(100, salt=99))
    with pytest.raises(UserError, match="not these"):
        batches(make_rows(), micro_batch=1, rows_per_step=ROWS, state=state)


def test_an_epoch_of_one_stream_holds_every_document_once_in_an_order_of_its_own(
    tmp_path, texts, jsonl, tokenizer, settings
):
    path = jsonl(tmp_path / "a.jsonl", texts(300, longest=30))
    rows = training_rows(settings(mode="stream", streams=1), TextFiles(str(path)), tokenizer, CONTEXT)
    documents = rows.corpus.documents(0, Position(0))
    epochs = [[next(documents)[1].tobytes() for _ in range(300)] for _ in range(3)]
    assert all(len(set(epoch)) == 300 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_an_epoch_of_best_fit_rows_cuts_only_documents_longer_than_a_row(
    tokenizer, settings, tmp_path, texts, jsonl, monkeypatch
):
    monkeypatch.setattr(stored, "WINDOW_ROWS", 64)
    path = jsonl(tmp_path / "a.jsonl", texts(300, longest=60))
    rows = training_rows(settings(packing="fit"), TextFiles(str(path)), tokenizer, 64)
    documents = [(*ids, tokenizer.eos_token_id) for ids in tokenizer(texts(300, longest=60))["input_ids"]]
    found, padding = Counter(), 0
    for i in range(rows.n_rows):
        row = rows.read(i)
        real = len(row.ids) - row.padding
        for start in np.unique(row.starts[:real]):
            found[tuple(row.ids[:real][row.starts[:real] == start].tolist())] += 1
        padding += row.padding
    short = [document for document in documents if len(document) <= 65]
    assert 100 < len(short) < 300
    assert all(found[document] == 1 for document in short)
    assert padding < 0.05 * rows.n_rows * 64


def test_streams_predict_every_token_of_the_text(tmp_path, texts, jsonl, tokenizer, settings):
    path = jsonl(tmp_path / "a.jsonl", texts(300))
    for packing in ("cut", "fit"):
        config = settings(mode="stream", streams=1, packing=packing)
        rows = training_rows(config, TextFiles(str(path)), tokenizer, CONTEXT)
        lane = rows.open_lane("0")
        wanted = Counter()
        for text in texts(300):
            wanted.update([*tokenizer(text)["input_ids"][1:], tokenizer.eos_token_id])
        predicted = Counter()
        index = 0
        while predicted.total() < 3 * wanted.total():
            targets = lane.read(index).targets()
            predicted.update(targets[targets != IGNORED].tolist())
            index += 1
        ratios = [predicted[token] / n for token, n in wanted.items() if n > 100]
        assert min(ratios) > 2.8
        assert max(ratios) < 3.2


@pytest.mark.parametrize("streams", [1, 64])
def test_epochs_of_a_stream_are_counted(tmp_path, texts, jsonl, tokenizer, settings, streams):
    path = jsonl(tmp_path / "a.jsonl", texts(400))
    rows = training_rows(settings(mode="stream", streams=streams), TextFiles(str(path)), tokenizer, CONTEXT)
    n_tokens = sum(len(ids) + 1 for ids in tokenizer(texts(400))["input_ids"])
    loader = batches(rows, micro_batch=8, rows_per_step=8)
    for epochs in (1, 2):
        while (progress := rows.progress(next(loader).state))["data_tokens"] < epochs * n_tokens:
            pass
        assert progress["data_epochs"] == pytest.approx(epochs, abs=0.3)
