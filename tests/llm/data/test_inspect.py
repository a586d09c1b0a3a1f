"""What is said of rows for people to read."""

from __future__ import annotations

import numpy as np
import pytest

from llm.data import AssociativeRecall, Mixture, TextFiles, training_rows
from llm.data.inspect import describe_row, histogram, take_sample


def test_a_row_is_shown_document_by_document(tmp_path, texts, jsonl, tokenizer, settings):
    path = jsonl(tmp_path / "a.jsonl", texts(50))
    rows = training_rows(settings(packing="fit"), TextFiles(str(path)), tokenizer, 256)
    row = rows.read(0)
    lines = describe_row(row, tokenizer, width=40)
    assert len(lines) == len(np.unique(row.starts[: 256 - row.padding])) + (row.padding > 0)
    lengths = [int(line.split("+")[1].split()[0]) for line in lines]
    assert sum(lengths) == 256


def test_shares_of_sources_padding_and_cut_documents_are_counted(tmp_path, texts, jsonl, tokenizer, settings):
    paths = {name: str(jsonl(tmp_path / f"{name}.jsonl", texts(200, salt=i))) for i, name in enumerate("ab")}
    rows = training_rows(settings(), Mixture(paths, {"a": 3, "b": 1}), tokenizer, 64)
    sample = take_sample(rows, 400, eos_id=tokenizer.eos_token_id)
    assert sample.sources["a"] / 400 == pytest.approx(0.75, abs=0.1)
    assert sample.padding == 0
    assert 0.9 < sample.counted / sample.inputs < 1
    assert 350 <= sample.cut <= 400


@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_lengths_are_those_of_the_documents(tmp_path, texts, jsonl, tokenizer, settings, mode):
    path = jsonl(tmp_path / "a.jsonl", texts(50))
    rows = training_rows(settings(mode=mode), TextFiles(str(path)), tokenizer, 64)
    wanted = sorted(len(ids) + 1 for ids in tokenizer(texts(50))["input_ids"])
    assert sorted(rows.document_lengths(50)) == wanted
    assert sum(int(line.rsplit(" ", 1)[1]) for line in histogram(rows.document_lengths(50))) == 50


def test_tasks_have_no_documents(tokenizer, settings):
    assert len(training_rows(settings(), AssociativeRecall(4), tokenizer, 64).document_lengths(9)) == 0
