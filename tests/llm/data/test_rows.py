"""Rows: what they hold, where documents begin in them, which targets count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llm.data import IGNORED, TextFiles, batches, merge_states, training_rows, validation_batches, validation_sets
from llm.data.rows import Row, collate, starts_within
from llm.data.store import store_documents
from llm.data.stored import CutLayout, HeldOutRows, StoredRows
from llm.errors import UserError

CONTEXT = 16


def store_of(*lengths):
    """Documents whose tokens count up over all of them, so that a token tells its place."""
    ends = np.cumsum(lengths)
    return store_documents(
        np.arange(end - length, end, dtype=np.uint16) for length, end in zip(lengths, ends, strict=True)
    )


def stored(store, *, seed):
    return StoredRows("test", CutLayout(store, CONTEXT), seed=seed)


def test_row_start_points_at_the_first_token_of_the_document_and_boundaries_are_not_predicted():
    ids = np.arange(7)
    row = Row(ids, starts_within(np.array([0, 3, 4]), 7))
    batch = collate([row], {})
    assert batch.row_start.tolist() == [[0, 0, 0, 3, 4, 4]]
    assert batch.targets.tolist() == [[1, 2, IGNORED, IGNORED, 5, 6]]
    assert (batch.tokens.dtype, batch.targets.dtype, batch.row_start.dtype) == (torch.int64, torch.int64, torch.int32)


def test_joined_documents_see_each_other_and_are_predicted():
    batch = collate([Row(np.arange(7), starts_within(np.array([0, 3, 6]), 7), padding=1).joined()], {})
    assert batch.row_start.tolist() == [[0] * 6]
    assert batch.targets.tolist() == [[1, 2, 3, 4, 5, IGNORED]]


def test_an_epoch_holds_every_token_once_as_input_but_for_a_rest_below_one_row():
    store = store_of(5, 40, 1, 100, 33)
    rows = stored(store, seed=0)
    epochs = [
        np.concatenate([rows.read(epoch * rows.n_rows + i).ids[:-1] for i in range(rows.n_rows)]) for epoch in range(3)
    ]
    for tokens in epochs:
        assert len(tokens) == len(set(tokens.tolist())) == rows.n_rows * CONTEXT
        assert store.n_tokens - len(tokens) < CONTEXT
    assert not np.array_equal(epochs[0], epochs[1])


def test_rows_mark_exactly_the_documents_beginnings():
    store = store_of(5, 40, 1, 100, 33)
    begins = {0, 5, 45, 46, 146}
    rows = stored(store, seed=3)
    for i in range(2 * rows.n_rows):
        row = rows.read(i)
        marked = {int(row.ids[t]) for t in range(1, CONTEXT + 1) if row.starts[t] == t}
        assert marked == begins & set(row.ids[1:].tolist())


def test_held_out_rows_predict_every_token_but_the_first_of_each_document():
    store = store_of(5, 40, 1, 100, 33)
    held_out = HeldOutRows("val", store, CONTEXT, padding_id=9)
    targets = np.concatenate([held_out.read(i).targets() for i in range(len(held_out))])
    assert sorted(targets[targets != IGNORED]) == sorted(set(range(179)) - {0, 5, 45, 46, 146})
    assert held_out.tokens == 179 - 5


@pytest.mark.parametrize(("micro_batch", "world_size"), [(1, 1), (4, 1), (3, 2), (5, 4)])
@pytest.mark.parametrize("max_rows", [None, 7])
def test_validation_covers_the_same_rows_whatever_the_ranks(micro_batch, world_size, max_rows):
    held_out = HeldOutRows("val", store_of(5, 40, 1, 100, 33), CONTEXT, padding_id=9)

    def targets(micro_batch, world_size):
        per_rank = [
            list(
                validation_batches(held_out, micro_batch=micro_batch, rank=r, world_size=world_size, max_rows=max_rows)
            )
            for r in range(world_size)
        ]
        assert len({len(found) for found in per_rank}) == 1
        assert all(batch.tokens.shape == (micro_batch, CONTEXT) for found in per_rank for batch in found)
        counted = torch.cat([batch.targets.flatten() for found in per_rank for batch in found])
        return sorted(counted[counted != IGNORED].tolist())

    assert targets(micro_batch, world_size) == targets(1, 1)


def test_unigram_entropy_of_equally_frequent_tokens_is_the_logarithm_of_their_number():
    store = store_documents([np.array([1, 2, 3, 4], np.uint16), np.array([4, 3, 2, 1], np.uint16)])
    assert HeldOutRows("val", store, 4, padding_id=0).unigram_entropy() == pytest.approx(np.log(4))


def test_too_little_text_for_a_row_is_an_error_that_names_the_numbers():
    with pytest.raises(UserError, match=r"4 tokens.*context = 16"):
        stored(store_of(4), seed=0)


def test_bundled_text_is_packed_with_an_end_of_document_after_each_document(tokenizer, settings):
    source = TextFiles("bundled:val.jsonl", "bundled:val.jsonl")
    rows = training_rows(settings(), source, tokenizer, 64)
    assert rows.summary()["documents"] == 49
    held_out = validation_sets(settings(validation_contexts=[128]), source, tokenizer, 64)
    assert list(held_out) == ["validation", "validation@128"]
    tokens = held_out["validation"].store.pieces[0].tokens
    assert (tokens == tokenizer.eos_token_id).sum() == 49
    assert tokens[-1] == tokenizer.eos_token_id


def test_states_of_ranks_at_different_steps_do_not_merge():
    rows = stored(store_of(500), seed=0)
    loader = batches(rows, micro_batch=2, rows_per_step=4)
    first, second = next(loader).state, next(loader).state
    with pytest.raises(ValueError, match="different steps"):
        merge_states([first, second])


def test_rows_that_the_devices_cannot_share_evenly_are_an_error():
    rows = stored(store_of(500), seed=0)
    with pytest.raises(UserError, match="not a multiple of micro_batch"):
        next(batches(rows, micro_batch=3, rows_per_step=8, world_size=2))


def test_a_state_of_other_data_is_refused():
    state = next(batches(stored(store_of(500), seed=0), micro_batch=2, rows_per_step=4)).state
    with pytest.raises(UserError, match="not these"):
        batches(stored(store_of(500), seed=1), micro_batch=2, rows_per_step=4, state=state)
