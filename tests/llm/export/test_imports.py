"""Runs that begin from models of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import llm
from llm.build import build_model
from llm.compose import compose
from llm.errors import UserError
from llm.export.imports import import_model
from llm.export.native import fitting
from llm.export.write import write_native, write_self_contained
from llm.tokenizer import load_tokenizer

SIZES = {
    "vocab_size": 4200,  # more than the tokenizer has
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": None,
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bundled:tokenizer")


@pytest.fixture
def exported(make_config, tokenizer, tmp_path):
    """exported(layout, *overrides, native=): a model and the folder of its export."""

    def make(layout, *overrides, native):
        config = make_config(layout, "model.init_std=0.2", *overrides)
        model = build_model(config, len(tokenizer)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
        if native:
            write_native(tmp_path / "export", model, tokenizer, config, fitting(model)[0])
        else:
            write_self_contained(tmp_path / "export", model, tokenizer, config)
        return model, tmp_path / "export"

    return make


@pytest.fixture
def foreign(tokenizer, tmp_path):
    """foreign(config): a random model of transformers and its folder."""

    def make(kind, config):
        torch.manual_seed(0)
        model = kind(config).eval()
        model.save_pretrained(tmp_path / "foreign")
        tokenizer.save_pretrained(tmp_path / "foreign")
        return model, tmp_path / "foreign"

    return make


def logits(model, ids):
    return model.logits(model(ids).hidden)


@pytest.mark.parametrize(
    ("mixer", "overrides"),
    [
        ("softmax", ["mixers.softmax.qk_norm=false", "mixers.softmax.num_kv_heads=2"]),
        ("softmax", ["mixers.softmax.window=5", "model.tie_embeddings=false"]),
        ("hybrid_gdn_1to1", ["mixers.gdn.conv_size=3", "mixers.gdn.expand_v=1"]),
        ("hybrid_gdn_3to1", ["mixers.softmax.output_gate=true"]),
        ("kda", []),
    ],
)
def test_a_native_export_comes_back_the_same(mixer, overrides, exported, tmp_path):
    model, folder = exported(mixer, *overrides, native=True)
    words = import_model(str(folder), tmp_path / "run")
    again, _, config = llm.load_run(tmp_path / "run")
    ids = torch.randint(4000, (2, 40))
    torch.testing.assert_close(logits(again, ids), logits(model, ids))
    assert compose(words) == config


def test_a_self_contained_export_comes_back_the_same(layout, exported, tmp_path):
    model, folder = exported(layout, native=False)
    import_model(str(folder), tmp_path / "run")
    again, _, _ = llm.load_run(tmp_path / "run")
    ids = torch.randint(4000, (2, 40))
    assert logits(again, ids).equal(logits(model, ids))


@pytest.mark.parametrize(("kind", "config"), [(LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)])
def test_models_of_others_compute_the_same(kind, config, foreign, tmp_path):
    theirs, folder = foreign(kind, config(**SIZES))
    import_model(str(folder), tmp_path / "run")
    ours, _, _ = llm.load_run(tmp_path / "run")
    ids = torch.randint(4000, (2, 40))
    torch.testing.assert_close(logits(ours, ids), theirs(ids).logits[..., :4096], rtol=1e-4, atol=1e-4)


def test_a_hybrid_begins_from_a_softmax_model(foreign, tmp_path):
    theirs, folder = foreign(LlamaForCausalLM, LlamaConfig(**SIZES))
    import_model(str(folder), tmp_path / "run", linear="gdn", per_softmax=1)
    ours, _, config = llm.load_run(tmp_path / "run")
    linear, softmax, source = ours.layers[0].mixer, ours.layers[1].mixer, theirs.model.layers
    assert config.hybrid.linear == "gdn"
    assert linear.q_proj.weight.equal(source[0].self_attn.q_proj.weight)
    assert linear.o_proj.weight.equal(source[0].self_attn.o_proj.weight)
    for head in range(4):  # two query heads to a key head
        ours_k, theirs_k = (m.k_proj.weight.unflatten(0, (-1, 16)) for m in (linear, source[0].self_attn))
        assert ours_k[head].equal(theirs_k[head // 2])
    assert softmax.v_proj.weight.equal(source[1].self_attn.v_proj.weight)
    assert ours.layers[0].mlp.up_proj.weight.equal(source[0].mlp.up_proj.weight)
    assert logits(ours, torch.randint(4000, (1, 20))).isfinite().all()


def test_refuses_what_it_cannot_compute(foreign, tmp_path):
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    for change, message in (({"attention_bias": True}, "attention_bias=True"), ({"rope_parameters": scaled}, "rotary")):
        _, folder = foreign(LlamaForCausalLM, LlamaConfig(**SIZES, **change))
        with pytest.raises(UserError, match=message):
            import_model(str(folder), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="is not overwritten"):
        import_model(str(folder), folder)
