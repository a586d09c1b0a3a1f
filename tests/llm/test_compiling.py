"""Compiled blocks compute what eager ones do, in one graph a kind, whatever comes."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn

import llm.trainer
from llm.compiling import compile_blocks, compile_objective, compiled_graphs, compiles, uncompiled
from llm.data.batch import Batch
from llm.joining import join_linears
from llm.loss import NextTokenLoss
from llm.mixers.base import TokenMixer
from llm.model.rotary import rotate
from llm.runs_equal import metrics_of
from mixer_kernels import short_convolution
from mixer_kernels.segments import Segments, cumulative_lengths

TOKENS = 70


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def packed(seed: int, rows: int = 2, tokens: int = TOKENS) -> Batch:
    """Rows of documents of random lengths, as they come to a GPU."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(rows, tokens, generator=generator) < 0.1
    starts[:, 0] = True
    row_start = Segments.from_starts(starts).row_start
    ids = torch.randint(50, (rows, tokens), generator=generator)
    cu_seqlens = cumulative_lengths(row_start)
    torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
    return Batch(ids, ids.roll(-1, 1), row_start, cu_seqlens=cu_seqlens)


def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = NextTokenLoss(model)(batch).objective
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def kinds(model) -> int:
    return len({type(layer.mixer) for layer in model.layers})


def test_every_layout_compiles_into_one_graph_a_kind(layout, make_model):
    """With documents in the rows, as many as there may be."""
    eager, compiled = (make_model(layout).train() for _ in range(2))  # fp64: joined products add up in another order
    compile_blocks(compiled, fullgraph=True, backend="aot_eager")
    assert list(compiled.state_dict()) == list(eager.state_dict())
    before = compiled_graphs()
    for seed in range(3):
        batch = packed(seed)
        torch.testing.assert_close(loss_and_gradients(compiled, batch), loss_and_gradients(eager, batch))
        assert compiled_graphs() - before == kinds(compiled), "other documents need no other graph"


def test_evaluation_at_other_shapes_compiles_nothing(make_model):
    model = make_model("hybrid_gdn_1to1", dtype=torch.float32).train()
    compile_blocks(model, fullgraph=True, backend="aot_eager")
    loss_and_gradients(model, packed(0))
    before = compiled_graphs()
    for rows, tokens in ((2, TOKENS), (1, TOKENS), (3, 33), (1, 5)):
        with torch.no_grad(), uncompiled():
            NextTokenLoss(model).eval()(packed(1, rows, tokens))
    loss_and_gradients(model.train(), packed(2))
    assert compiled_graphs() == before


def test_a_run_compiled_is_the_run_eager(train, tmp_path, monkeypatch):
    """With validation between steps. All graphs come with the first step."""
    settings = ["mixer=hybrid_gla_1to1", "steps=5", "log_every=1", "eval.every=2"]
    train("eager", *settings)
    monkeypatch.setattr(llm.trainer, "compile_objective", functools.partial(compile_objective, backend="aot_eager"))
    before = compiled_graphs()
    train("compiled", *settings, "compile=true")
    eager, compiled = (metrics_of(tmp_path / name) for name in ("eager", "compiled"))
    assert [line["loss"] for line in compiled] == pytest.approx([line["loss"] for line in eager], rel=1e-5)
    assert compiled[-1]["val_loss"] == pytest.approx(eager[-1]["val_loss"], rel=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "compiled" / "metrics.jsonl").read_text().splitlines()]
    assert {line["compiled_graphs"] - before for line in lines} == {3}, "two kinds of blocks and the loss"


def test_a_mixer_that_breaks_the_graph_still_trains(make_model):
    class Reads(TokenMixer):
        def forward(self, x_BTD, segments, state=None, *, return_state=False):
            scale = 1.0 if x_BTD.sum().item() > 0 else -1.0
            return inner(x_BTD * scale, segments, state, return_state=return_state)

    model = make_model("gla", dtype=torch.float32).train()
    inner, model.layers[1].mixer = model.layers[1].mixer, Reads(64, 1, 4)
    expected = loss_and_gradients(model, packed(0))
    compile_blocks(model, backend="aot_eager")
    torch.testing.assert_close(loss_and_gradients(model, packed(0)), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_inductor_agrees(make_model):
    eager, compiled = (make_model("hybrid_gdn_1to1", "model.n_layers=2", dtype=torch.float32).train() for _ in "ab")
    compile_blocks(compiled, fullgraph=True)
    found, expected = (loss_and_gradients(model, packed(0)) for model in (compiled, eager))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_compiles_on_a_gpu_unless_told():
    assert compiles(None, torch.device("cuda"))
    assert not compiles(None, torch.device("cpu"))
    assert compiles(True, torch.device("cpu"))
    assert not compiles(False, torch.device("cuda"))


class Gates(nn.Module):
    """Two small maps, a large one, one with a bias and one that an operator takes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.large, self.taken = (nn.Linear(32, n, bias=False) for n in (2, 3, 48, 16))
        self.biased = nn.Linear(32, 2)

    def forward(self, x):
        rotated = rotate(self.taken(x).unflatten(-1, (2, 8)), torch.arange(x.shape[1]), 1e4)
        held = short_convolution(self.taken(2 * x), x.new_ones(16, 2), impl="triton" if x.is_cuda else "auto")
        small = self.a(x).sum(-1) * self.b(x).sum(-1) * self.biased(x).sum(-1)
        return self.large(x).sum(-1) * small * rotated.sum((-1, -2)) * held.sum(-1)


def test_small_maps_of_one_input_are_joined():
    model, x, found = Gates().double(), torch.randn(2, 5, 32, dtype=torch.float64), []

    def backend(graph, inputs):
        found.append((join_linears(graph), [str(n.args) for n in graph.graph.nodes if n.target is torch.cat]))
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    gradients = [torch.autograd.grad(m(x).sum(), list(model.parameters())) for m in (compiled, model)]
    torch.testing.assert_close(*gradients)
    ((products, (weights,)),) = found
    assert products == 1
    assert all(f"modules_{name}_" in weights for name in ("a", "b", "large")), weights
    assert "biased" not in weights


def test_large_maps_stay_as_they_are(make_model):
    graphs = []
    model = make_model("softmax", "model.d_model=512", "model.parameters=20000000", dtype=torch.float32)
    torch.compile(model.layers[0].mlp, backend=lambda graph, _: graphs.append(join_linears(graph)) or graph)(
        torch.randn(1, 2, 512)
    )
    assert graphs == [0]
