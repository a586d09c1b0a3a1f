"""Files of text: every kind is read alike, and what is wrong with one is said."""

from __future__ import annotations

import sys

import pytest
from omegaconf import OmegaConf

from llm.data import Mixture, TextFiles, training_rows, validation_sets
from llm.data.files import find_files
from llm.data.shards import open_shard, read_documents
from llm.data.split import is_held_out
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


NO_PATHS = {
    "data.path is empty": ["", " ", [], ["a.jsonl", ""]],
    "is not a path": [["a.jsonl", None], {"a": "a.jsonl"}, 0.5, True],
}


@pytest.mark.parametrize(("message", "path"), [(m, path) for m, paths in NO_PATHS.items() for path in paths])
def test_a_path_that_names_no_file_is_not_the_working_directory(tmp_path, jsonl, monkeypatch, message, path):
    jsonl(tmp_path / "a.jsonl", ["x"])
    monkeypatch.chdir(tmp_path)
    for form in (path, OmegaConf.create({"path": path}).path):  # as the configuration gives it
        with pytest.raises(UserError, match=message):
            TextFiles(form)


@pytest.mark.parametrize("path", ["", [], {}, {"books": ""}, {"books": None}])
def test_an_empty_path_to_validate_on_is_named(tokenizer, settings, path):
    message = r"data\.validation_path(\.books)? is (empty|not set)"
    with pytest.raises(UserError, match=message):
        TextFiles("bundled:val.jsonl", path)
    with pytest.raises(UserError, match=message):
        training_rows(settings(validation_path=path), TextFiles("bundled:val.jsonl"), tokenizer, 16)


@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_few_documents_are_all_held_out_or_none_and_the_message_says_which(tmp_path, jsonl, tokenizer, settings, mode):
    text = next(t for t in map(str, range(100)) if is_held_out(t, 0.5) and not is_held_out(t, 0.01))
    source = TextFiles(str(jsonl(tmp_path / "a.jsonl", [text])))
    with pytest.raises(UserError, match=r"held_out=0\.01 holds out no document.*validation_path=.*held_out=0 \("):
        validation_sets(settings(mode=mode, held_out=0.01), source, tokenizer, 2)
    with pytest.raises(UserError, match=r"held_out=0\.5 holds out every document.*validation_path=.*held_out=0 \("):
        training_rows(settings(mode=mode, held_out=0.5), source, tokenizer, 2)
    assert validation_sets(settings(mode=mode, held_out=0), source, tokenizer, 2) == {}
    training_rows(settings(mode=mode, held_out=0), source, tokenizer, 1)


@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_nothing_is_held_out_where_there_is_other_text_to_validate_on(tmp_path, jsonl, tokenizer, settings, mode):
    text = next(t for t in map(str, range(100)) if is_held_out(t, 0.5))
    path = str(jsonl(tmp_path / "a.jsonl", [text]))
    config = settings(mode=mode, held_out=0.5)
    training_rows(config, TextFiles(path, "bundled:val.jsonl"), tokenizer, 1)
    mixed = settings(mode=mode, held_out=0.5, validation_path="bundled:val.jsonl")
    training_rows(mixed, Mixture({"a": path}), tokenizer, 1)


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
