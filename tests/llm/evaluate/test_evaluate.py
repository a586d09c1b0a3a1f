"""Evaluation: losses in parts are the losses, bytes are counted, needles lie where they should, files are kept."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llm.compare.evaluations import read_evaluations
from llm.data import IGNORED, Batch
from llm.data.encode import Encoder
from llm.data.needle import Hider
from llm.data.rows import Row, starts_within
from llm.errors import UserError
from llm.evaluate.__main__ import main
from llm.evaluate.losses import Fit, token_losses
from llm.evaluate.validation import bytes_of_tokens
from llm.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bundled:tokenizer")


def packed_batch(length=24, vocab=50):
    starts = np.stack([starts_within(np.array(first), length) for first in ([0, 3, 17], [0])])
    tokens = torch.randint(vocab, (2, length))
    targets = torch.randint(vocab, (2, length))
    targets[:, ::5] = IGNORED
    return Batch(tokens, targets, torch.from_numpy(starts))


def test_losses_in_parts_are_the_losses(make_model, layout):
    model, batch = make_model(layout), packed_batch()
    whole, right = token_losses(model, batch, chunk=24)
    logits = model.logits(model(batch.tokens, batch.segments).hidden)
    expected = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(whole.flatten(), expected.float())
    assert torch.equal(right, logits.argmax(dim=-1) == batch.targets)
    for chunk in (5, 8):
        torch.testing.assert_close(token_losses(model, batch, chunk=chunk)[0], whole)


def test_less_goes_at_a_time_until_it_fits():
    fit, tried = Fit(4, 256), []

    def attempt():
        tried.append((fit.rows, fit.chunk))
        if fit.chunk > 128:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return "done"

    assert fit.run(attempt) == "done"
    assert tried == [(4, 256), (2, 256), (1, 256), (1, 128)]
    assert Fit(1, 64).run(lambda: (_ for _ in ()).throw(torch.OutOfMemoryError())) is None
    with pytest.raises(RuntimeError, match="other"):
        fit.run(lambda: (_ for _ in ()).throw(RuntimeError("other")))


def test_bytes_of_tokens_add_up_to_the_text(tokenizer):
    text = "Call me Ishmael.\n\nÇa va? \N{GRINNING FACE} 123"
    sizes = bytes_of_tokens(tokenizer, len(tokenizer) + 3)
    assert sizes[tokenizer(text, add_special_tokens=False)["input_ids"]].sum() == len(text.encode())
    assert sizes[tokenizer.eos_token_id] == 0
    assert len(sizes) == len(tokenizer) + 3


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_needle_lies_at_its_depth(tokenizer, depth):
    hider = Hider(Encoder(tokenizer), boxes=3, numbers=1, seed=0, only_answers=True)
    text = np.full(401, tokenizer("x", add_special_tokens=False)["input_ids"][0])
    row = hider.hide(Row(text, np.zeros(401, dtype=np.int32)), "any", depth=depth)
    written = tokenizer.decode(row.ids)
    asked = written.rpartition(" The secret number of box ")[2].partition(" ")[0]
    answer = written.rpartition(" is ")[2].rstrip(".")
    before, _, after = written.partition(f" The secret number of box {asked} is {answer}.")
    assert after
    assert abs(before.count("x") / written.count("x") - depth) < 0.02
    assert len(row.ids) == 401


def evaluated(run, capsys, *words):
    assert main([str(run), "--json", "--device", "cpu", *words]) == 0
    return json.loads(capsys.readouterr().out)[0]


def test_a_text_run_is_evaluated(make_run, capsys):
    run = make_run("hybrid_gdn_1to1", "context=64", "batch_tokens=256", steps=(3,))
    small = ["--max-tokens", "512", "--samples", "2", "--contexts", "16,96", "--new-tokens", "2", "--chunk", "128"]
    result = evaluated(run, capsys, *small, "--lengths", "1,4", "--recall-lengths", "4")
    short, long = result["validation"]
    assert (short["context"], long["context"]) == (64, 256)
    for row in (short, long):
        parts = row["by_position"]
        assert sum(part["tokens"] for part in parts) == row["tokens"]
        assert sum(part["tokens"] * part["loss"] for part in parts) == pytest.approx(row["tokens"] * row["loss"])
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2) * row["tokens"] / row["bytes"])
    assert max(part["to"] for part in short["by_position"]) == 64
    assert max(part["to"] for part in long["by_position"]) == 256
    cells = {(cell["probe"], cell["depth"]): cell for cell in result["recall"]}
    assert len(cells) == 11
    assert all(cell["length"] == 256 for cell in cells.values())
    assert 0 <= cells["single", 0.5]["exact"] <= cells["single", 0.5]["token_accuracy"] <= 1
    assert [row["context"] for row in result["decoding"]] == [16, 96]
    for row in result["decoding"]:
        assert row["tokens_per_second"] > 0
    measures = {(s.measure, s.name) for s in read_evaluations(run)[0]}
    assert {("loss_by_length", "validation"), ("loss_by_position", "validation"), ("bits_per_byte", "validation"),
            ("recall_by_length", "single"), ("state_bytes", "decoding")} <= measures  # fmt: skip


def test_state_is_what_is_kept(make_run, capsys):
    for layout in ("softmax", "gdn"):
        run = make_run(layout, "context=32")
        result = evaluated(run, capsys, "--only", "decoding", "--contexts", "32", "--new-tokens", "1")
        (row,) = result["decoding"]
        # reckoned at bf16 activations, measured in fp32 with room for 4 tokens more; the recurrent state is always fp32
        ratio = row["state_bytes_measured"] / row["state_bytes"]
        assert ratio == pytest.approx(2 * 36 / 32, rel=0.01) if layout == "softmax" else 1 <= ratio < 2


def test_a_task_is_evaluated_by_its_parts(make_run, capsys):
    run = make_run(
        "gla", "data=mqar", "tokenizer=task", "data.source.vocabulary=64", "data.source.pairs=[2,4]", "context=32"
    )
    result = evaluated(run, capsys, "--only", "validation,recall", "--lengths", "1,2", "--max-tokens", "128")
    assert {row["set"] for row in result["validation"]} == {"validation", "pairs_2", "pairs_4"}
    assert all(row["bits_per_byte"] is None for row in result["validation"])
    (series,) = [s for s in result["series"] if s["measure"] == "recall_by_pairs"]
    assert [x for x, _ in series["points"]] == [2, 4]
    assert "no recall probes" in result["notes"][0]


def test_results_are_not_written_over_and_failures_stay_alone(make_run, tmp_path, capsys):
    run = make_run("softmax", "context=32", steps=(1, 2))
    words = ["--device", "cpu", "--only", "decoding", "--contexts", "8", "--new-tokens", "1"]
    assert main([str(tmp_path / "gone"), str(run), *words]) == 2
    assert main([str(run), "--step", "1", *words]) == 0
    assert main([str(run), *words]) == 0
    captured = capsys.readouterr()
    assert "no such folder" in captured.err
    assert "tokens before" in captured.out
    names = sorted(path.name for path in (run / "evaluations").iterdir())
    assert names == ["step_00000001-001.json", "step_00000002-001.json", "step_00000002-002.json"]
    assert main([str(run), "--only", "recal"]) == 2


def test_an_unknown_step_is_a_users_mistake(make_run):
    from llm.evaluate.evaluation import Options, evaluate_run

    with pytest.raises(UserError, match="step 7"):
        evaluate_run(make_run("softmax", "context=32"), 7, torch.device("cpu"), Options())


def test_bf16_is_close_to_fp32(make_run, capsys):
    run = make_run("hybrid_kda_1to1", "context=32")
    words = [
        "--lengths",
        "1,2",
        "--max-tokens",
        "256",
        "--only",
        "validation,decoding",
        "--contexts",
        "16",
        "--new-tokens",
        "1",
    ]
    wide, narrow = (evaluated(run, capsys, *words, "--precision", precision) for precision in ("fp32", "bf16"))
    for a, b in zip(wide["validation"], narrow["validation"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=0.02)
        assert b["loss"] != a["loss"]
    assert narrow["decoding"][0]["state_bytes_measured"] < wide["decoding"][0]["state_bytes_measured"]
