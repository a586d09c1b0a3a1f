"""Files of text: every kind is read alike, and what is wrong with one is said."""

from __future__ import annotations

import sys

import pytest

from llm.data import TextFiles, training_rows
from llm.data.files import find_files
from llm.data.shards import open_shard, read_documents
from llm.errors import UserError

KINDS = ["a.jsonl", "a.jsonl.zst", "a.jsonl.gz", "a.parquet", "file.arrow", "stream.arrow"]


pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_documents_in_order(tmp_path, texts, kind, write_file):
    path = write_file(tmp_path / kind, texts(250))
    assert list(read_documents([path])) == texts(250)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 3, 7])
def test_parts_share_out_the_documents_and_skipping_equals_reading_on(tmp_path, texts, kind, parts, write_file):
    shard = open_shard(str(write_file(tmp_path / kind, texts(250))))
    found = []
    for part in range(parts):
        groups = list(shard.groups(key=5, part=part, parts=parts, skip=0))
        for skip in range(len(groups) + 1):
            assert list(shard.groups(key=5, part=part, parts=parts, skip=skip)) == groups[skip:]
        found += [text for group in groups for text in group]
    assert sorted(found) == sorted(texts(250))


def test_a_line_longer_than_several_blocks_is_one_document(tmp_path, write_file):
    long = ["short", "x" * 5000, "", "end", "y" * 2000]
    path = write_file(tmp_path / "a.jsonl", long)
    assert list(read_documents([path])) == [text for text in long if text]


def test_a_last_line_without_a_newline_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two"}')
    assert list(read_documents([path])) == ["one", "two"]


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo é\n")
    assert list(read_documents([tmp_path / "a.txt"])) == ["one\n\ntwo é\n"]


def test_folders_globs_and_lists_are_found_in_order_and_once(tmp_path, jsonl):
    for name in ("b.jsonl", "a.jsonl"):
        jsonl(tmp_path / name, ["x"])
    both = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert find_files(str(tmp_path)) == find_files(str(tmp_path / "*.jsonl")) == both
    assert find_files([both[1], str(tmp_path)]) == [both[1], both[0]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "does not exist"),
        ("empty.jsonl", "", "is empty"),
        ("a.csv", "text\nx\n", "unknown kind"),
        ("a.jsonl", '{"text": "x"}\n\n{"text": \n', r"a\.jsonl, line 3: not a JSON record"),
        ("a.jsonl", '{"id": 1, "body": "x"}\n', r"line 1: no column 'text'.*id, body"),
        ("a.jsonl", '{"text": 5}\n', "holds int, not text"),
        ("a.jsonl", '["x"]\n', "not a JSON object"),
        ("a.jsonl", '{"text": ""}\n', "no document has any text"),
    ],
)
def test_mistakes_are_named(tmp_path, tokenizer, settings, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        training_rows(settings(), TextFiles(str(tmp_path / name)), tokenizer, 16)


def test_a_missing_column_of_a_table_names_those_there_are(tmp_path, texts, write_file):
    path = write_file(tmp_path / "a.parquet", texts(3))
    with pytest.raises(UserError, match=r"no column 'body'.*id, text"):
        list(read_documents([path], "body"))


@pytest.mark.parametrize("kind", ["a.jsonl.zst", "a.jsonl.gz", "a.parquet", "file.arrow"])
def test_a_file_cut_short_is_an_error_that_names_it(tmp_path, texts, kind, write_file):
    path = write_file(tmp_path / kind, texts(250))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match=kind):
        list(read_documents([path]))


@pytest.mark.parametrize(("kind", "package"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow.ipc")])
def test_a_missing_package_is_named_with_the_way_to_install_it(tmp_path, texts, write_file, monkeypatch, kind, package):
    path = write_file(tmp_path / kind, texts(3))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"{package.split('.')[0]}: pip install 'mixlab\[data\]'"):
        list(read_documents([path]))
