"""The model card."""

from __future__ import annotations

import json

import pytest

from llm.errors import UserError
from llm.export import card, export
from llm.export.parity import Parity

GOOD = Parity(1e-6, 1e-6, 1e-6, 1e-6, True, True, True, True)


@pytest.fixture
def metrics(make_run):
    """A run whose metrics have a step twice, as after a crash, and one beyond the checkpoint."""
    run = make_run("hybrid_gdn_3to1", "data.path=[/home/me/secret/books.jsonl]", steps=(4,))
    lines = [
        {"step": 2, "tokens": 200, "loss": 7.0},
        {"step": 3, "tokens": 300, "loss": 9.0},
        {"step": 3, "tokens": 300, "loss": 6.5},
        {"step": 4, "tokens": 400, "loss": 6.0, "val_loss": 6.25, "val_perplexity": 518.0},
        {"step": 5, "tokens": 500, "loss": 1.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_says_what_the_run_says(metrics, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "check_exports", lambda folders, *_: dict.fromkeys(folders, GOOD))
    export.export_run(metrics, tmp_path / "out", licence="apache-2.0")
    text = (tmp_path / "out" / "README.md").read_text()
    for part in (
        "license: apache-2.0",
        "hybrid_gdn_3to1",
        "3 gdn, 1 softmax (3:1)",
        "(books.jsonl)",
        "validation loss 6.2500, perplexity 518.00, training loss 6.0000",
        "| 4 | 6.0000 | 6.2500 |",
        "AutoModelForCausalLM.from_pretrained",
        "cached == uncached: yes",
    ):
        assert part in text, part
    assert "1.0000" not in text
    assert "secret" not in text


def test_metrics_up_to_the_step_the_last_of_each(metrics):
    assert [(m["step"], m["loss"]) for m in card.read_metrics(metrics, 4)] == [(2, 7.0), (3, 6.5), (4, 6.0)]
    assert card.read_metrics(metrics / "nowhere", 4) == []


def test_upload_is_private_unless_told(monkeypatch, tmp_path):
    calls = []

    class Api:
        def create_repo(self, name, *, private):
            calls.append((name, private))
            return f"https://hub/{name}"

        def upload_folder(self, *, repo_id, folder_path):
            calls.append((repo_id, folder_path))

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert export.push(tmp_path, "me/model", private=True) == "uploaded to https://hub/me/model"
    assert calls == [("me/model", True), ("me/model", str(tmp_path))]
    monkeypatch.setattr(Api, "create_repo", lambda *_, **__: (_ for _ in ()).throw(ValueError("no such user")))
    with pytest.raises(UserError, match="no such user"):
        export.push(tmp_path, "me/model", private=True)
