"""The tokenizer: loading, checks, fingerprint, training."""

from __future__ import annotations

import json
import shutil

import pytest

from llm.config import TokenizerConfig
from llm.errors import UserError
from llm.paths import data_dir
from llm.tokenizer import fingerprint, load_tokenizer, save_tokenizer, train_bpe, vocabulary_size


def test_the_bundled_tokenizer_loads_from_anywhere_and_keeps_any_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer("bundled:tokenizer")
    text = "Call me Ishmael.\n\n  Some «years» ago — ☃ \x00 never\tmind"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 4096


def test_training_is_deterministic_and_reads_back(tmp_path):
    texts = [f"the {i} whales of the {i % 7} seas" for i in range(300)]
    for name in ("a", "b"):
        save_tokenizer(train_bpe(texts, 300), tmp_path / name)
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()
    tokenizer = load_tokenizer(str(tmp_path / "a"))
    assert tokenizer.eos_token == "<|endoftext|>"
    assert fingerprint(tokenizer) != fingerprint(load_tokenizer("bundled:tokenizer"))


def test_a_folder_that_is_missing_or_holds_no_tokenizer_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        load_tokenizer(str(tmp_path / "missing"))
    with pytest.raises(UserError, match="no tokenizer that transformers can load"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_an_end_of_document_is_an_error(tmp_path):
    folder = tmp_path / "tokenizer"
    shutil.copytree(data_dir() / "tokenizer", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(UserError, match="no eos_token"):
        load_tokenizer(str(folder))


def test_more_tokens_than_the_model_has_is_an_error():
    tokenizer = load_tokenizer("bundled:tokenizer")
    settings = lambda size: TokenizerConfig(path="bundled:tokenizer", vocab_size=size)  # noqa: E731
    assert [vocabulary_size(settings(size), tokenizer) for size in (None, 4096, 5000)] == [4096, 4096, 5000]
    with pytest.raises(UserError, match=r"tokenizer.vocab_size=4000: .* has 4096 tokens"):
        vocabulary_size(settings(4000), tokenizer)
