"""Synthetic tasks: the answers are right, derive from the row itself, and any position can be resumed."""

from __future__ import annotations

import numpy as np
import pytest

from llm.data import (
    IGNORED,
    AssociativeRecall,
    Needle,
    SelectiveCopy,
    StateTracking,
    TextFiles,
    batches,
    training_rows,
    validation_batches,
    validation_sets,
)
from llm.errors import UserError

CONTEXT = 96
TASKS = {
    "mqar": lambda: AssociativeRecall(8, vocabulary=64),
    "mqar of several": lambda: AssociativeRecall([2, 8], vocabulary=64),
    "mqar uniform": lambda: AssociativeRecall(8, vocabulary=64, gap_power=1.0),
    "selective copy": lambda: SelectiveCopy(8, vocabulary=16),
    "parity": lambda: StateTracking(2),
    "s5": lambda: StateTracking(5),
    "needle": lambda: Needle(TextFiles("bundled:val.jsonl", "bundled:val.jsonl"), boxes=1),
}


@pytest.fixture(params=TASKS)
def task(request):
    return request.param, TASKS[request.param]()


def answers(row):
    """Positions and targets of a row's answers."""
    targets = row.targets()
    at = np.flatnonzero(targets != IGNORED)
    return at, targets[at]


def test_any_position_can_be_resumed_and_shared(task, tokenizer, settings):
    def run(state=None, **layout):
        rows = training_rows(settings(seed=5), task[1], tokenizer, CONTEXT)
        loader = batches(rows, rows_per_step=8, state=state, **layout)
        return [next(loader) for _ in range(8)]

    whole = run(micro_batch=8)
    again = run(state=whole[3].state, micro_batch=8)
    shared = [run(micro_batch=4, rank=rank, world_size=2) for rank in range(2)]
    for a, b in zip(whole[4:], again, strict=False):
        assert np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.targets, b.targets)
    for w, a, b in zip(whole, *shared, strict=True):
        assert np.array_equal(w.tokens, np.concatenate([a.tokens, b.tokens]))
    assert not np.array_equal(whole[0].tokens, whole[1].tokens)


def test_validation_is_fixed_and_not_what_training_has(task, tokenizer, settings):
    held_out = validation_sets(settings(validation_contexts=[128]), task[1], tokenizer, CONTEXT)
    assert list(dict.fromkeys(rows.context for rows in held_out.values())) == [CONTEXT, 128]
    first, second = (next(validation_batches(held_out["validation"], micro_batch=4)) for _ in range(2))
    assert np.array_equal(first.tokens, second.tokens)
    trained = next(batches(training_rows(settings(), task[1], tokenizer, CONTEXT), micro_batch=4, rows_per_step=4))
    assert not np.array_equal(first.tokens, trained.tokens)
    assert held_out["validation"].tokens > 0
    assert held_out["validation"].unigram_entropy() > 0


def test_recall_asks_for_values_that_were_told():
    recall = AssociativeRecall(8, vocabulary=64)
    for seed in range(20):
        row = recall.make(np.random.default_rng(seed), CONTEXT)
        told = dict(zip(row.ids[0:16:2].tolist(), row.ids[1:16:2].tolist(), strict=True))
        at, values = answers(row)
        assert len(told) == 8
        assert sorted(row.ids[at].tolist()) == sorted(told)
        assert [told[key] for key in row.ids[at].tolist()] == values.tolist()
        assert np.isin(row.ids[16:], list(told)).sum() == 8  # a key comes up nowhere else


def test_rows_have_one_of_several_numbers_of_pairs_and_each_is_validated(tokenizer, settings):
    recall = AssociativeRecall([2, 8], vocabulary=64)
    asked = [len(answers(recall.make(np.random.default_rng(seed), CONTEXT))[0]) for seed in range(60)]
    assert set(asked) == {2, 8}
    assert 15 < asked.count(2) < 45
    sets = validation_sets(settings(), recall, tokenizer, CONTEXT)
    assert list(sets) == ["validation", "pairs_2", "pairs_8"]
    assert {len(answers(sets["pairs_8"].read(i))[0]) for i in range(5)} == {8}
    with pytest.raises(UserError, match="pairs="):
        AssociativeRecall([4, 40], vocabulary=64)


def test_the_gap_power_moves_questions_back():
    near, far = (
        np.mean(
            [
                answers(AssociativeRecall(8, vocabulary=64, gap_power=p).make(np.random.default_rng(s), 512))[0].mean()
                for s in range(30)
            ]
        )
        for p in (0.01, 1.0)
    )
    assert near < far - 50


def test_copying_gives_the_marked_tokens_in_order():
    for seed in range(20):
        row = SelectiveCopy(8, vocabulary=16).make(np.random.default_rng(seed), CONTEXT)
        at, said = answers(row)
        before = row.ids[: CONTEXT - 8]
        assert before[before > 1].tolist() == said.tolist()
        assert at.tolist() == list(range(CONTEXT - 8, CONTEXT))
        assert row.ids[CONTEXT - 8] == 1


def test_parity_is_that_of_the_bits_so_far():
    row = StateTracking(2).make(np.random.default_rng(0), CONTEXT)
    assert row.targets().tolist() == (np.cumsum(row.ids[:-1]) % 2).tolist()


def test_s5_is_the_composition_of_the_permutations_so_far():
    task = StateTracking(5)
    row = task.make(np.random.default_rng(0), CONTEXT)
    things = np.arange(5)
    for token, label in zip(row.ids, row.targets(), strict=False):
        things = task._elements[token][things]
        assert task._elements[label].tolist() == things.tolist()


def test_needles_are_told_in_the_text_and_the_answer_is_the_box_asked_for(tokenizer, settings):
    source = Needle(TextFiles("bundled:val.jsonl", "bundled:val.jsonl"), boxes=3, numbers=2)
    held_out = validation_sets(settings(), source, tokenizer, 512)["validation"]
    for index in range(10):
        row = held_out.read(index)
        text, _, answer = tokenizer.decode(row.ids).rpartition(" is ")
        key = text.rsplit(" ", 1)[1]
        told = [piece.split(".")[0] for piece in text.split(f"of box {key} is ")[1:]]
        assert len(told) == 2
        assert answer == f"{', '.join(told)}."
        assert text.count("The secret number of box") == 5
        _, targets = answers(row)
        assert tokenizer.decode(targets) == f" {answer}"
    trained = training_rows(settings(), source, tokenizer, 512)
    assert (trained.open_lane("0").read(0).targets() != IGNORED).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AssociativeRecall(32, vocabulary=64), "need 127"),
        (lambda: AssociativeRecall(8, vocabulary=8192), r"8,192 token ids, the tokenizer has 4,096"),
        (lambda: AssociativeRecall(8, vocabulary=15), "half"),
        (lambda: SelectiveCopy(50), "needs 100"),
        (lambda: StateTracking(7), "degree=7"),
        (lambda: Needle(TextFiles("bundled:val.jsonl"), boxes=5), "boxes"),
    ],
)
def test_mistakes_are_named(tokenizer, settings, make, message):
    with pytest.raises(UserError, match=message):
        training_rows(settings(), make(), tokenizer, CONTEXT)
