"""Sampling, streaming and the command line."""

from __future__ import annotations

import pytest
import torch

from llm.generate import TextStream, generate, main, sample
from llm.tokenizer import load_tokenizer


def test_generated_tokens_are_those_of_the_whole_row(layout, make_model):
    """One pass over the prompt and then steps == the whole row again for every token."""
    model, row = make_model(layout), [3, 1, 4, 1, 5]
    new = list(generate(model, row, max_new_tokens=70))
    for token in new:
        assert token == model.logits(model(torch.tensor([row])).hidden[:, -1]).argmax()
        row = [*row, token]


def test_stops_at_the_end_of_document(make_model):
    model = make_model("softmax")
    new = list(generate(model, [7], max_new_tokens=20))
    end = new[4]
    assert list(generate(model, [7], max_new_tokens=20, stop=end)) == new[: new.index(end)]
    assert list(generate(model, [7], max_new_tokens=0)) == []


def test_sampling_follows_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    draw = torch.Generator().manual_seed(0)
    for temperature in (0.5, 1.0):
        got = sample(logits.expand(20_000, -1), temperature=temperature, generator=draw).bincount(minlength=4) / 20_000
        assert (got - (logits[0] / temperature).softmax(-1)).abs().max() < 0.015
    assert sample(logits, temperature=0).tolist() == [2]


def test_top_k_and_top_p_keep_the_likeliest():
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log().expand(3000, -1)
    draw = torch.Generator().manual_seed(0)
    assert set(sample(logits, top_k=2, generator=draw).tolist()) == {1, 2}
    assert set(sample(logits, top_p=0.69, generator=draw).tolist()) == {1, 2}
    assert set(sample(logits, top_p=0.75, generator=draw).tolist()) == {1, 2, 3}
    assert set(sample(logits, top_p=1e-9, generator=draw).tolist()) == {1}
    assert set(sample(logits, top_p=1.0, generator=draw).tolist()) == {0, 1, 2, 3}


def test_stream_holds_back_half_characters():
    """Bytes as tokens: nothing is shown that would have to be taken back."""
    text = "naïve € 日本 🙂 " * 30
    stream = TextStream(lambda ids: bytes(ids).decode("utf-8", errors="replace"))
    shown = [stream.push(byte) for byte in text.encode()]
    assert "".join(shown) + stream.flush() == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in shown)
    assert len(stream.ids) < 100


def test_stream_gives_out_bytes_that_never_become_a_character():
    stream = TextStream(lambda ids: bytes(ids).decode("utf-8", errors="replace"))
    data = [0xFF, 0xFF, ord("a"), 0xE2, 0x82]
    assert "".join(map(stream.push, data)) + stream.flush() == bytes(data).decode("utf-8", errors="replace")


@pytest.mark.parametrize("prompt", ["The old man", ""])
def test_command_streams_text(prompt, make_run, capsys):
    run = make_run("hybrid_gdn_1to1")
    words = [str(run), "--prompt", prompt, "--max-new-tokens", "12", "--seed", "3", "--device", "cpu"]
    assert main(words) == 0
    first = capsys.readouterr()
    assert main(words) == 0
    assert capsys.readouterr().out == first.out
    assert first.out.startswith(prompt)
    tokenizer = load_tokenizer("bundled:tokenizer")
    assert len(first.out) > len(prompt) + 5
    assert first.err == ""
    assert tokenizer.eos_token not in first.out


def test_command_explains_mistakes(make_run, capsys, tmp_path):
    run = str(make_run("softmax"))
    for words, message in {
        (str(tmp_path / "nowhere"),): "no such folder",
        (run, "--step", "99"): "It has: 1",
        (run, "--temperature", "-1"): "--temperature -1.0: must be 0 or more",
        (run, "--top-p", "0"): "must be above 0",
        (run, "--prompt", "a\udcff"): r"--prompt 'a\udcff': not UTF-8 at character 1",
        (run, "--device", "gpu"): "--device gpu",
    }.items():
        assert main([*words, *(() if "--device" in words else ("--device", "cpu"))]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert message in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""
