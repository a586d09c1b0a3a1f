"""The hub through the real datasets library, against a hub of our own on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from llm.data import HubDataset
from llm.errors import UserError
from llm.paths import data_dir

pytest.importorskip("datasets")
ROOT = data_dir().parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CASES = """
import json, sys
from llm.config import DataConfig
from llm.data import HubDataset, batches, training_rows, validation_sets
from llm.errors import UserError
from llm.tokenizer import load_tokenizer

tokenizer = load_tokenizer("bundled:tokenizer")
for values in json.loads(sys.argv[1]):
    source, config = HubDataset(**values, validation_split="test"), DataConfig(name="hub")
    try:
        batch = next(batches(training_rows(config, source, tokenizer, 32), micro_batch=2, rows_per_step=2))
        held_out = validation_sets(config, source, tokenizer, 32)["validation"]
        print(json.dumps([list(batch.tokens.shape), held_out.store.n_documents]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


class Hub(BaseHTTPRequestHandler):
    """Knows the dataset who/what, refuses who/gated, and has nothing else."""

    def log_message(self, *_):
        pass

    def answer(self, status, content=b"", **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        folder, path = self.server.folder, self.path.split("?")[0]
        files = sorted(folder.glob("data/*"))
        if "/who/gated" in path:
            return self.answer(403, {"error": "gated"}, X_Error_Code="GatedRepo")
        if "/who/what" not in path:
            return self.answer(404, {"error": "none"}, X_Error_Code="RepoNotFound")
        if "/tree/" in path:
            entries = [{"type": "file", "path": f"data/{f.name}", "size": f.stat().st_size, "oid": "0"} for f in files]
            root = [{"type": "directory", "path": "data", "oid": "0"}]
            return self.answer(200, entries if path.endswith("/data") else root)
        if path.startswith("/api/"):
            siblings = [{"rfilename": f"data/{f.name}"} for f in files]
            return self.answer(
                200, {"id": "who/what", "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
            )
        found = re.fullmatch(rf"/datasets/who/what/resolve/{COMMIT}/(data/.*)", path)
        if not found or "Range" not in self.headers:
            return self.answer(404, {"error": "none"}, X_Error_Code="EntryNotFound")
        content = (folder / found[1]).read_bytes()
        start, end = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        part = content[start : end + 1]
        return self.answer(206, part, Content_Range=f"bytes {start}-{start + len(part) - 1}/{len(content)}")

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path, texts, write_file):
    (tmp_path / "data").mkdir()
    for salt, (split, count) in enumerate({"train": 100, "test": 20}.items()):
        write_file(tmp_path / f"data/{split}-00000-of-00001.parquet", texts(count, salt=salt))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder = tmp_path
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("path", [None, "", " ", ["who/what"]])
def test_a_dataset_has_to_be_named(path):
    with pytest.raises(UserError, match=r"data\.path=.*name a dataset of the hub"):
        HubDataset(path)


def test_a_dataset_streams_and_wrong_names_are_explained(hub, tmp_path):
    cases = [{"path": "who/what"}, {"path": "who/wat"}, {"path": "who/gated"}, {"path": "who/what", "subset": "big"}]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "HF_HOME": str(tmp_path / "home")}
    environment |= {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    command = [sys.executable, "-c", CASES, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    streams, misspelt, gated, subset = map(json.loads, done.stdout.splitlines())
    assert streams == [[2, 32], 20]
    assert "who/wat: no such dataset for you on the hub (misspelt? gated" in misspelt
    assert "who/gated: no such dataset for you on the hub (misspelt? gated" in gated
    assert "subset=big" in subset
    assert "default" in subset
