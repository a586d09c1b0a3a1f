"""Remote files: read by ranges, through every fault that may pass, against a server of our own that makes them."""

from __future__ import annotations

import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest

from llm.data import HubDataset, TextFiles, batches, hub, remote, training_rows, validation_sets
from llm.data.shards import read_documents
from llm.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
URL = "/{repo_id}/resolve/{revision}/{filename}"
FAULTS = [408, 429, 500, 502, 503, 504, "drop", "truncate", "stall"]


class Handler(BaseHTTPRequestHandler):
    """Serves ranges of the files of a folder, each after the next fault of a list."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        server = self.server
        server.requests.append(self.path)
        fault = next(server.faults)
        if isinstance(fault, int):
            return self.answer(fault, b"", {"Retry-After": "0"})
        path = server.folder / self.path.lstrip("/")
        if not path.is_file():
            return self.answer(404, b"")
        content = path.read_bytes()
        start, end = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        part = content[start : end + 1]
        span = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(content)}"}
        if fault == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "stall":
            server.stalled.wait(2)
        elif fault == "truncate":  # announces all, sends half, hangs up
            self.answer(206, part[: len(part) // 2], span, announced=len(part))
            self.close_connection = True
        else:
            self.answer(206, part, span)

    def answer(self, status, body, headers=(), announced=None):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if announced is None else announced))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(remote, "LONGEST_WAIT", 0.01)
    monkeypatch.setattr(remote, "TIMEOUT", 0.3)
    monkeypatch.setattr(remote, "BLOCK", 4096)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.faults, server.requests = tmp_path, cycle([None]), []
    server.stalled = threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.stalled.set()
    server.shutdown()
    server.server_close()


def take(rows, n):
    """The first n batches of four rows."""
    loader = batches(rows, micro_batch=4, rows_per_step=4)
    return [next(loader) for _ in range(n)]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.jsonl.gz", "a.parquet", "file.arrow"])
def test_faults_that_pass_change_nothing(server, tmp_path, texts, write_file, name, fault):
    write_file(tmp_path / name, texts(250))
    server.faults = cycle([fault, None, None, fault, fault, None, None, None, None])
    assert list(read_documents([f"{server.url}/{name}"])) == texts(250)
    assert len(server.requests) > 1


@pytest.mark.parametrize(
    ("faults", "reason"), [([503], "HTTP 503"), (["drop"], "unreadable after"), ([429], "HTTP 429")]
)
def test_what_does_not_pass_is_an_error_that_names_the_file(server, tmp_path, texts, write_file, faults, reason):
    write_file(tmp_path / "a.jsonl", texts(9))
    server.faults = cycle(faults)
    with pytest.raises(UserError, match=rf"a\.jsonl: unreadable after {remote.ATTEMPTS} attempts") as caught:
        list(read_documents([f"{server.url}/a.jsonl"]))
    assert reason in str(caught.value)


@pytest.mark.parametrize(("status", "reason"), [(404, "no such file"), (401, "login"), (403, "gated")])
def test_what_is_refused_is_not_tried_again(server, status, reason):
    server.faults = cycle([status])
    with pytest.raises(UserError, match=reason):
        list(read_documents([f"{server.url}/a.jsonl"]))
    assert len(server.requests) == 1


def test_a_stream_over_the_network_is_that_of_the_same_local_files(
    server, tmp_path, texts, write_file, tokenizer, settings
):
    names = ["a.parquet", "b.parquet"]
    for salt, name in enumerate(names):
        write_file(tmp_path / name, texts(200, salt=salt), batch_rows=20)
    server.faults = cycle([None, None, 503, None, "drop", "truncate", None])
    remote_rows, local_rows = (
        training_rows(settings(mode="stream"), TextFiles([f"{base}/{name}" for name in names]), tokenizer, 32)
        for base in (server.url, str(tmp_path))
    )
    for a, b in zip(take(remote_rows, 30), take(local_rows, 30), strict=True):
        assert np.array_equal(a.tokens, b.tokens)


def test_a_resumed_stream_reads_the_row_group_that_it_needs_and_not_those_before(
    server, tmp_path, texts, write_file, tokenizer, settings
):
    write_file(tmp_path / "a.parquet", texts(4000, longest=400), batch_rows=100)
    source = TextFiles(f"{server.url}/a.parquet")
    rows = training_rows(settings(mode="stream", streams=1), source, tokenizer, 64)
    asked = {}
    for steps in (2, 100):
        loader = batches(rows, micro_batch=8, rows_per_step=8)
        state = [next(loader) for _ in range(steps)][-1].state
        server.requests.clear()
        next(batches(rows, micro_batch=8, rows_per_step=8, state=state))
        asked[steps] = len(server.requests)
    assert asked[100] <= asked[2] + 4  # a row group may be cut into one block more


def test_an_unreadable_file_may_be_left_out(server, tmp_path, texts, write_file, tokenizer, settings, caplog):
    write_file(tmp_path / "a.jsonl", texts(50))
    (tmp_path / "b.jsonl").write_text("this is no record\n" * 10)
    source = TextFiles([f"{server.url}/{name}" for name in ("a.jsonl", "b.jsonl")])
    with pytest.raises(UserError, match=r"b\.jsonl, line 1"):
        take(training_rows(settings(mode="stream"), source, tokenizer, 32), 50)
    rows = training_rows(settings(mode="stream", unreadable="skip"), source, tokenizer, 32)
    take(rows, 50)
    assert "b.jsonl" in caplog.text


@pytest.fixture
def fake_hub(monkeypatch):
    """A hub that has one dataset, as the datasets library would see it."""

    files = {split: [f"hf://datasets/who/what@{COMMIT}/data/{split}.parquet"] for split in ("train", "test")}
    builder = SimpleNamespace(config=SimpleNamespace(data_files=files))
    datasets = pytest.importorskip("datasets")

    def load_dataset_builder(repo, name=None, revision=None):
        if repo != "who/what":
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{repo}' doesn't exist on the Hub")
        if name not in (None, "default"):
            raise ValueError(f"BuilderConfig '{name}' not found. Available: ['default']")
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)


def test_a_hub_dataset_is_resolved_to_urls_of_its_commit(fake_hub):
    files = hub.resolve_files("who/what", None, None)
    assert files["train"] == [f"https://huggingface.co/datasets/who/what/resolve/{COMMIT}/data/train.parquet"]
    assert sorted(files) == ["test", "train"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": "who/wat"}, r"no such dataset.*gated"),
        ({"path": "who/what", "subset": "x"}, r"subset=x.*default"),
        ({"path": "who/what", "split": "dev"}, "has the splits test, train"),
    ],
)
def test_mistakes_about_the_hub_are_named(fake_hub, values, message):
    with pytest.raises(UserError, match=message):
        HubDataset(**values).training_shards()


def test_a_hub_dataset_trains_and_validates(
    fake_hub, server, tmp_path, texts, write_file, tokenizer, settings, monkeypatch
):
    folder = tmp_path / f"datasets/who/what/resolve/{COMMIT}/data"
    folder.mkdir(parents=True)
    write_file(folder / "train.parquet", texts(100))
    write_file(folder / "test.parquet", texts(20, salt=7))
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + URL)
    source = HubDataset("who/what", validation_split="test")
    take(training_rows(settings(mode="auto"), source, tokenizer, 32), 2)
    assert validation_sets(settings(), source, tokenizer, 32)["validation"].store.n_documents == 20


def test_rank_0_alone_asks_the_hub_and_all_get_its_answer_or_its_error(monkeypatch):
    world, sent = SimpleNamespace(rank=0), []

    def broadcast(found):
        sent.append(list(found)) if world.rank == 0 else found.__setitem__(slice(None), sent[-1])

    for name, value in {"is_initialized": lambda: True, "get_world_size": lambda: 2}.items():
        monkeypatch.setattr(hub.dist, name, value)
    monkeypatch.setattr(hub.dist, "get_rank", lambda: world.rank)
    monkeypatch.setattr(hub.dist, "broadcast_object_list", broadcast)
    asked = []
    for world.rank in (0, 1):
        assert hub.on_rank_0(lambda: asked.append(1) or "files") == "files"
    assert len(asked) == 1

    def refuse():
        raise UserError("gated")

    for world.rank in (0, 1):
        with pytest.raises(UserError, match="gated"):
            hub.on_rank_0(refuse)
