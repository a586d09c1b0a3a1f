"""lm-evaluation-harness on an export: its scores are the model's own, whatever the batch and its padding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llm.build import build_model
from llm.export.write import write_self_contained
from llm.tokenizer import load_tokenizer

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
TASK = Path(__file__).parent / "lm_eval_task"


def own_scores(model, tokenizer) -> list[list[float]]:
    """The log-probability of every ending of every question, one at a time."""
    scores = []
    for line in (TASK / "endings.jsonl").read_text().splitlines():
        question = json.loads(line)
        start = tokenizer(question["start"])["input_ids"]
        scores.append([])
        for ending in question["endings"]:
            ids = torch.tensor([tokenizer(f"{question['start']} {ending}")["input_ids"]])
            assert ids[0, : len(start)].tolist() == start
            logp = model.logits(model(ids[:, :-1]).hidden).log_softmax(-1)
            scores[-1].append(logp.gather(2, ids[:, 1:, None])[0, len(start) - 1 :].sum().item())
    return scores


@pytest.mark.slow  # imports a large package
@torch.inference_mode()
def test_scores_are_the_models_own(make_config, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    tokenizer = load_tokenizer("bundled:tokenizer")
    config = make_config("hybrid_gdn_1to1", "model.init_std=0.2")
    model = build_model(config, len(tokenizer)).eval()
    write_self_contained(tmp_path / "export", model, tokenizer, config)
    monkeypatch.chdir(TASK)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    expected = own_scores(model, tokenizer)
    for batch in (1, 4):
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args=f"pretrained={tmp_path / 'export'},trust_remote_code=True,dtype=float32",
            tasks=["mixlab_ending"],
            task_manager=TaskManager(include_path=str(TASK), include_defaults=False),
            batch_size=batch,
            device="cpu",
            bootstrap_iters=0,
        )
        samples = sorted(found["samples"]["mixlab_ending"], key=lambda sample: sample["doc_id"])
        for sample, scores in zip(samples, expected, strict=True):
            got = [float(answer[0][0]) for answer in sample["resps"]]
            assert got == pytest.approx(scores, abs=2e-3)
        labels = [json.loads(line)["label"] for line in (TASK / "endings.jsonl").read_text().splitlines()]
        right = [max(range(len(s)), key=s.__getitem__) == label for s, label in zip(expected, labels, strict=True)]
        assert found["results"]["mixlab_ending"]["acc,none"] == pytest.approx(sum(right) / len(right))
