"""Preparation: the tokens of the text, whatever the processes and interruptions; damage and mismatches are noticed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from llm.data import TextFiles, batches, prepare, training_rows, validation_sets
from llm.data.encode import Encoder
from llm.data.prepare import Job
from llm.data.prepared import read_manifest, verify
from llm.data.split import is_held_out
from llm.errors import UserError
from llm.paths import data_dir
from llm.tokenizer import load_tokenizer, save_tokenizer, train_bpe

ROOT = data_dir().parent


@pytest.fixture
def make_job(tmp_path, texts, write_file, tokenizer):
    paths = [write_file(tmp_path / f"{salt}.parquet", texts(150, salt=salt), batch_rows=1) for salt in range(2)]
    source = TextFiles([str(path) for path in paths])

    def make(held_out=0.2):
        about = {"path": "here", "identity": source.identity(), "licence": "CC0"}
        return Job(source.training_shards(), Encoder(tokenizer), held_out, about)

    return make


def run(job, out, workers=0):
    return list(prepare.prepare(job, out, workers=workers))


@pytest.fixture
def prepared(make_job, tmp_path):
    out = tmp_path / "out"
    run(make_job(), out)
    return out


def test_the_folder_holds_every_document_in_its_split(prepared, texts, tokenizer, settings):
    source = TextFiles(str(prepared))
    rows = training_rows(settings(mode="auto"), source, tokenizer, 32)
    held_out = validation_sets(settings(mode="auto"), source, tokenizer, 32)["validation"]
    both = [text for salt in range(2) for text in texts(150, salt=salt)]
    for store, wanted in ((rows.store, False), (held_out.store, True)):
        found = [
            tokenizer.decode(document) for piece in store.pieces for document in np.split(piece.tokens, piece.first[1:])
        ]
        assert sorted(found) == sorted(f"{text}<|endoftext|>" for text in both if is_held_out(text, 0.2) == wanted)
    next(batches(rows, micro_batch=2, rows_per_step=2))


def test_a_memory_map_travels_to_other_processes_by_name(prepared, tokenizer, settings):
    rows = training_rows(settings(mode="auto"), TextFiles(str(prepared)), tokenizer, 32)
    sent = pickle.dumps(rows)
    assert len(sent) < 2 * sum(piece.first.nbytes for piece in rows.store.pieces) + 4000 * len(rows.store.pieces)
    again = pickle.loads(sent)
    assert all(isinstance(piece.tokens, np.memmap) for piece in again.store.pieces)
    assert np.array_equal(again.read(5).ids, rows.read(5).ids)


def test_validation_reads_no_more_than_asked(prepared, tokenizer, settings):
    sets = validation_sets(settings(mode="auto", validation_tokens=300), TextFiles(str(prepared)), tokenizer, 32)
    assert 300 <= sets["validation"].store.n_tokens < 600


def test_processes_change_nothing_and_finished_pieces_are_kept(make_job, prepared, tmp_path):
    job = make_job()
    again = tmp_path / "again"
    steps = prepare.prepare(job, again, workers=2)
    done, total, _ = next(steps)
    steps.close()  # as an interruption would
    assert (done, total) == (1, len(job.units()))
    kept = [again / "train" / f"{record.stem}.tokens" for record in (again / "records").iterdir()]
    before = [tokens.stat().st_mtime_ns for tokens in kept]
    run(make_job(), again)
    assert [tokens.stat().st_mtime_ns for tokens in kept] == before
    assert read_manifest(again)["fingerprint"] == read_manifest(prepared)["fingerprint"]


def test_a_killed_preparation_goes_on_where_it_was(tmp_path, texts, write_file, tokenizer):
    paths = [str(write_file(tmp_path / f"{i:02}.jsonl", texts(300, salt=i, longest=400))) for i in range(40)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, str(ROOT / "scripts/prepare_data.py"), *paths, "--workers", "0", "--out"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen([*command, str(killed)], env=environment, start_new_session=True, stderr=subprocess.PIPE)
    while process.poll() is None and not list(killed.glob("records/*.json")):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "manifest.json").exists()
    kept = {path.stem: path.stat().st_mtime_ns for path in killed.glob("records/*.json")}
    subprocess.run([*command, str(killed)], env=environment, check=True, capture_output=True)
    source = TextFiles(paths)
    about = {"path": " ".join(paths), "identity": source.identity(), "licence": "not stated"}
    run(Job(source.training_shards(), Encoder(tokenizer), 0.0, about), whole)
    assert read_manifest(killed) == read_manifest(whole)
    assert all((killed / "train" / f"{name}.tokens").stat().st_mtime_ns <= at for name, at in kept.items())
    assert verify(killed) == 40


def test_a_folder_of_another_job_is_refused(make_job, prepared, tmp_path):
    with pytest.raises(UserError, match="prepared already"):
        run(make_job(), prepared)
    steps = prepare.prepare(make_job(), tmp_path / "other", workers=0)
    next(steps)
    steps.close()
    with pytest.raises(UserError, match="other settings"):
        run(make_job(held_out=0.5), tmp_path / "other")
    with pytest.raises(UserError, match="not empty"):
        run(make_job(), tmp_path)


def test_an_unfinished_folder_is_not_taken_for_whole(make_job, tmp_path, tokenizer, settings):
    steps = prepare.prepare(make_job(), tmp_path / "unfinished", workers=0)
    next(steps)
    steps.close()
    with pytest.raises(UserError, match=r"not a prepared folder"):
        training_rows(settings(mode="prepared"), TextFiles(str(tmp_path / "unfinished")), tokenizer, 32)


def test_files_of_text_are_no_prepared_folder(tmp_path, jsonl, tokenizer, settings):
    path = str(jsonl(tmp_path / "a.jsonl", ["x"]))
    for paths in (path, [path], [path, path], str(tmp_path)):
        with pytest.raises(UserError, match=r"data\.path=.*scripts/prepare_data\.py"):
            training_rows(settings(mode="prepared"), TextFiles(paths), tokenizer, 32)


def test_holding_out_every_document_is_said(make_job, tmp_path):
    with pytest.raises(UserError, match=r"--held-out 1\.0 holds out every document"):
        run(make_job(held_out=1.0), tmp_path / "out")


def test_another_tokenizer_is_refused(prepared, tmp_path, settings):
    save_tokenizer(train_bpe([f"sea {i}" for i in range(500)], 300), tmp_path / "tokenizer")
    with pytest.raises(UserError, match="another tokenizer"):
        training_rows(settings(mode="auto"), TextFiles(str(prepared)), load_tokenizer(str(tmp_path / "tokenizer")), 32)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_damage_is_noticed(prepared, tokenizer, settings, damage):
    path = next(prepared.glob("train/*.tokens"))
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(content[:-2])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "remove":
        path.unlink()
    else:
        manifest = prepared / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"CC0"', '"MIT"'))
    with pytest.raises(UserError, match=r"repare"):
        training_rows(settings(mode="auto"), TextFiles(str(prepared)), tokenizer, 32)
    with pytest.raises(UserError, match=r"repare"):
        verify(prepared)


def test_a_full_disk_is_said_and_leaves_nothing_half_written(make_job, tmp_path, monkeypatch):
    job, out = make_job(), tmp_path / "full"
    prepare._claim(job, out)

    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare, "replace_file", no_space)
    with pytest.raises(UserError, match=r"no space left.*goes on"):
        prepare.make_piece(job, out, 0)
    assert not list(out.rglob("*.tokens"))
    assert not list(out.glob("records/*"))


def test_the_manifest_tells_source_and_licence(prepared, tokenizer):
    manifest = json.loads((prepared / "manifest.json").read_text())
    assert manifest["source"]["licence"] == "CC0"
    assert manifest["tokenizer"] == Encoder(tokenizer).fingerprint
