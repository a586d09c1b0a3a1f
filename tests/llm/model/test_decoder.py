"""The decoder as a whole, with every layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from llm.build import build_model
from llm.report import parameters_by_part, report
from mixer_kernels import Segments


def tokens(*shape: int, vocab: int = 50) -> torch.Tensor:
    return torch.randint(vocab, shape)


def test_forward_equals_prefill_and_steps(layout, make_model):
    model, x = make_model(layout), tokens(2, 40)
    whole = model.logits(model(x).hidden)
    hidden, state, _ = model(x[:, :30], return_state=True, state=model.init_state(2, 40, dtype=torch.float64))
    torch.testing.assert_close(model.logits(hidden), whole[:, :30], rtol=1e-8, atol=1e-8)
    for t in range(30, 40):
        logits, state = model.step(x[:, t], state)
        torch.testing.assert_close(logits, whole[:, t], rtol=1e-8, atol=1e-8)


def test_packed_documents_equal_separate_ones(layout, make_model):
    model, x = make_model(layout), tokens(1, 80)
    is_start = torch.zeros(1, 80, dtype=torch.bool)
    is_start[0, [0, 1, 30]] = True
    packed = model(x, Segments.from_starts(is_start)).hidden
    for begin, end in ((0, 1), (1, 30), (30, 80)):
        torch.testing.assert_close(packed[:, begin:end], model(x[:, begin:end]).hidden, rtol=1e-8, atol=1e-8)


def test_left_padding_is_a_boundary(layout, make_model):
    model, x = make_model(layout), tokens(1, 20)
    padded = torch.cat([tokens(1, 7), x], dim=1)
    row_start = torch.where(torch.arange(27) < 7, 0, 7)[None].int()
    got = model(padded, Segments(row_start)).hidden[:, 7:]
    torch.testing.assert_close(got, model(x).hidden, rtol=1e-8, atol=1e-8)


def test_flops_equal_the_counted_products(layout, make_model):
    model = make_model(layout, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        for t in range(4):
            model.step(tokens(1), model.init_state(1, t + 1))
    assert model.flops(4, 16) == counter.get_total_flops()


def test_parameter_report_adds_up(layout, make_config):
    model = build_model(make_config(layout), 50, "meta")
    counts = {k: int(v.replace(",", "")) for k, v in parameters_by_part(model).items()}
    total, inner = counts.pop("in all"), counts.pop("without embedding and head")
    assert total == sum(counts.values()) == sum(p.numel() for p in model.parameters())
    assert inner == total - counts["embedding"] - next(v for k, v in counts.items() if k.startswith("head"))


def test_report_names_what_a_run_would_cost(make_config):
    config = make_config("hybrid_gdn_3to1", "batch_tokens=1024", "context=256")
    text = str(report(config, build_model(config, 50, "meta"), steps=10))
    assert "4 layers: 3 gdn, 1 softmax (3:1)" in text
    assert "10,240" in text  # tokens


def test_weights_follow_from_the_seed_alone(make_config):
    weights = lambda *words: build_model(make_config("gdn", *words), 50).state_dict()  # noqa: E731
    torch.manual_seed(1)
    first = weights()
    torch.manual_seed(2)
    assert all(torch.equal(first[k], v) for k, v in weights().items())
    other = weights("seed=1")
    assert any(not torch.equal(first[k], v) for k, v in other.items())


def test_tied_embeddings_share_one_matrix(make_config):
    tied = build_model(make_config("softmax", "model.tie_embeddings=true"), 50)
    assert tied.head_weight is tied.embeddings.weight
    untied = build_model(make_config("softmax", "model.tie_embeddings=false"), 50)
    assert untied.head_weight is not untied.embeddings.weight


def test_padded_vocabulary_is_cut_from_the_logits(make_model):
    model = make_model("softmax", vocab=130)
    assert model.padded_vocab_size == 256
    assert model.logits(model(tokens(1, 3)).hidden).shape == (1, 3, 130)


def test_a_tiny_model_overfits(layout, make_config):
    """Every layout can learn sixteen random tokens by heart, some in 30 steps, some in 100."""
    model = build_model(make_config(layout), 50)
    x = tokens(2, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        logits = model.logits(model(x[:, :-1]).hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        if loss < 0.1:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
