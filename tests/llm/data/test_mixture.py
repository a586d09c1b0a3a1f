"""Mixtures: exact shares, repeats counted and limited, the same sequence rules as any rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from llm.data import Mixture, TextFiles, batches, training_rows, validation_sets
from llm.data import mixture as mixture_module
from llm.errors import UserError

CONTEXT = 16
pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture
def paths(tmp_path, texts, jsonl):
    return {name: str(jsonl(tmp_path / f"{name}.jsonl", texts(200, salt=i))) for i, name in enumerate("abc")}


@pytest.fixture
def make_rows(paths, tokenizer, settings):
    def make(weights, max_repeats=None, **values):
        source = Mixture({name: paths[name] for name in weights}, weights, max_repeats=max_repeats)
        return training_rows(settings(**values), source, tokenizer, CONTEXT)

    return make


def sources_of(rows, n):
    return Counter(rows.place(i).lane.split(":")[0] for i in range(n))


def test_shares_are_exact_in_every_period(make_rows):
    rows = make_rows({"a": 6, "b": 3, "c": 1})
    for periods in (1, 3):
        counts = sources_of(rows, periods * 10_000)
        assert counts == {"a": 6000 * periods, "b": 3000 * periods, "c": 1000 * periods}
    near = sources_of(rows, 1000)
    assert abs(near["c"] - 100) < 50  # mixed well, not in runs


def test_each_source_goes_through_its_own_rows_in_order(make_rows):
    rows = make_rows({"a": 2, "b": 1})
    seen = {"a": 0, "b": 0}
    for i in range(25_000):
        lane, index = rows.place(i)
        assert index == seen[lane[0]]
        seen[lane[0]] += 1


@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_interruption_and_ranks_change_nothing(make_rows, mode):
    def tokens(state=None, **layout):
        loader = batches(make_rows({"a": 2, "b": 1}, mode=mode), rows_per_step=6, state=state, **layout)
        found = [next(loader) for _ in range(60)]
        return [batch.tokens.numpy() for batch in found], found[-1].state

    whole, _ = tokens(micro_batch=6)
    split = [tokens(micro_batch=3, rank=rank, world_size=2)[0] for rank in range(2)]
    assert all(np.array_equal(w, np.concatenate([a, b])) for w, a, b in zip(whole, *split, strict=True))
    loader = batches(make_rows({"a": 2, "b": 1}, mode=mode), micro_batch=6, rows_per_step=6)
    state = [next(loader) for _ in range(23)][-1].state
    resumed, _ = tokens(state=state, micro_batch=6)
    assert all(np.array_equal(a, b) for a, b in zip(whole[23:], resumed, strict=False))


def test_repeats_are_limited_and_then_the_others_go_on(make_rows, monkeypatch):
    monkeypatch.setattr(mixture_module, "PERIOD", 100)
    rows = make_rows({"a": 1, "b": 1, "c": 2}, max_repeats=3)
    end = rows.phases[-1].start * 100
    counts = sources_of(rows, end)
    with pytest.raises(UserError, match="max_repeats"):
        rows.place(end)
    for name in "abc":
        limit = 3 * rows.parts[name].n_rows
        assert limit - 100 < counts[name] <= limit
    assert len(rows.phases) >= 3


def test_progress_counts_tokens_and_epochs_of_each_source(make_rows):
    rows = make_rows({"a": 3, "b": 1})
    progress = rows.progress({"row": 10_000, "lanes": {}})
    assert progress["data_tokens/a"] == 7500 * CONTEXT
    assert progress["data_epochs/b"] == pytest.approx(2500 / rows.parts["b"].n_rows)
    assert sum(rows.progress({"row": 12_345, "lanes": {}})[f"data_tokens/{n}"] for n in "ab") == 12_345 * CONTEXT


def test_every_source_has_its_held_out_set(paths, tokenizer, settings):
    sources = {"a": paths["a"], "b": TextFiles(paths["b"])}
    sets = validation_sets(
        settings(held_out=0.2, validation_contexts=[32]), Mixture(sources, {"a": 1, "b": 1}), tokenizer, CONTEXT
    )
    assert list(sets) == ["a", "a@32", "b", "b@32"]


def test_a_document_of_several_sources_is_held_out_of_all(paths, tokenizer, settings):
    sources = {"a": paths["a"], "again": paths["a"]}
    config = settings(held_out=0.3)
    mixture = Mixture(sources, {"a": 1, "again": 1})
    stores = [part.store for part in training_rows(config, mixture, tokenizer, CONTEXT).parts.values()]
    assert stores[0].fingerprint == stores[1].fingerprint
    held_out = validation_sets(config, mixture, tokenizer, CONTEXT)["a"].store
    assert held_out.n_documents + stores[0].n_documents == 200


@pytest.mark.parametrize(
    ("weights", "message"), [({"a": 1}, "one weight for each source"), ({"a": 1, "b": -1}, "above 0")]
)
def test_mistakes_in_weights_are_named(paths, weights, message):
    with pytest.raises(UserError, match=message):
        Mixture({"a": paths["a"], "b": paths["b"]}, weights)


@pytest.mark.parametrize("path", ["", None, [], [""]])
def test_a_source_without_a_path_is_named(paths, path):
    with pytest.raises(UserError, match=r"data\.path\.b is (empty|not set)"):
        Mixture({"a": paths["a"], "b": path})


def test_repeats_of_a_stream_cannot_be_limited(make_rows):
    with pytest.raises(UserError, match="unknown while it is streamed"):
        make_rows({"a": 1, "b": 1}, max_repeats=2, mode="stream")
