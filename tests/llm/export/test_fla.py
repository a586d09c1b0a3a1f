"""Models under flash-linear-attention's names."""

from __future__ import annotations

import json

import pytest
import torch

from llm.build import build_model
from llm.compose import compose
from llm.errors import UserError
from llm.export.export import check_fla_runs, choose_form, how_to_load
from llm.export.fla import fla_type, fla_weights
from llm.export.imports import import_model
from llm.export.write import write_flash_linear_attention
from llm.runs import load_run
from llm.tokenizer import load_tokenizer

# what the state dicts of GLAForCausalLM, GatedDeltaNetForCausalLM and KDAForCausalLM (0.6.0) have in a layer's mixer
PROJECTIONS = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}
CONVOLUTIONS = {"q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"}
EXPECTED = {
    "gla": PROJECTIONS
    | {"g_proj.weight", "gk_proj.0.weight", "gk_proj.1.weight", "gk_proj.1.bias", "g_norm_swish_gate.weight"},
    "gdn": PROJECTIONS
    | CONVOLUTIONS
    | {"g_proj.weight", "a_proj.weight", "b_proj.weight", "A_log", "dt_bias", "o_norm.weight"},
    "kda": PROJECTIONS
    | CONVOLUTIONS
    | {"f_proj.0.weight", "f_proj.1.weight", "g_proj.0.weight", "g_proj.1.weight", "g_proj.1.bias"}
    | {"b_proj.weight", "A_log", "dt_bias", "o_norm.weight"},
}
VARIANTS = [
    ("gla", []),
    ("gla", ["mixers.gla.conv_size=4", "model.tie_embeddings=false"]),
    ("gdn", []),
    ("gdn", ["mixers.gdn.negative_eigenvalues=true"]),
    ("kda", []),
    ("kda", ["mixers.kda.gate_lower_bound=-5.0", "mixers.kda.output_gate_bias=true"]),
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bundled:tokenizer")


@pytest.fixture
def random_model(make_config, tokenizer):
    def make(mixer, *overrides):
        config = make_config(mixer, *overrides)
        model = build_model(config, len(tokenizer)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return config, model

    return make


@pytest.mark.parametrize("mixer", EXPECTED)
def test_mixers_have_their_names(random_model, mixer):
    _, model = random_model(mixer)
    weights = fla_weights(model, fla_type(model)[0])
    assert {n.removeprefix("model.layers.1.attn.") for n in weights if "layers.1.attn." in n} == EXPECTED[mixer]
    assert {n.removeprefix("model.layers.1.") for n in weights if "layers.1." in n and ".attn." not in n} == {
        "attn_norm.weight", "mlp_norm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
    }  # fmt: skip
    assert len(weights["model.embeddings.weight"]) == model.vocab_size


@pytest.mark.parametrize(("mixer", "overrides"), VARIANTS)
def test_what_is_written_is_read_again(random_model, tokenizer, tmp_path, mixer, overrides):
    config, model = random_model(mixer, *overrides)
    write_flash_linear_attention(tmp_path / "export", model, tokenizer, config)
    words = import_model(str(tmp_path / "export"), tmp_path / "run")
    again, _, _ = load_run(tmp_path / "run")
    assert compose(words).mixers[mixer] == config.mixers[mixer] | {
        "num_heads": model.layers[0].mixer.num_heads,
        "head_k_dim": model.layers[0].mixer.head_k_dim,
    }
    tokens = torch.randint(len(tokenizer), (2, 70))
    assert torch.equal(again.logits(again(tokens).hidden), model.logits(model(tokens).hidden))


@pytest.mark.parametrize(
    ("mixer", "overrides", "reason"),
    [
        ("softmax", [], "no stack of SoftmaxAttention"),
        ("hybrid_gdn_1to1", [], "no stack of GatedDeltaNet and SoftmaxAttention"),
        ("gla", ["mixers.gla.gate_rank=8"], "gate_rank=16"),
        ("gdn", ["mixers.gdn.conv_size=null"], "conv_size"),
        ("kda", ["mixers.kda.norm_eps=1e-5"], "one epsilon"),
    ],
)
def test_what_does_not_fit_is_named(random_model, mixer, overrides, reason):
    _, model = random_model(mixer, *overrides)
    with pytest.raises(UserError, match=reason):
        choose_form("fla", model, "")


@pytest.mark.parametrize(("key", "value"), [("clamp_min", -1.0), ("num_kv_heads", 1), ("attn", {"layers": [0]})])
def test_settings_that_ours_lacks_are_refused(random_model, tokenizer, tmp_path, key, value):
    config, model = random_model("gla")
    write_flash_linear_attention(tmp_path / "export", model, tokenizer, config)
    path = tmp_path / "export" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=key):
        import_model(str(tmp_path / "export"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_comparing_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--unchecked"):
        check_fla_runs()


def test_says_what_loads_it(random_model, tokenizer, tmp_path):
    config, model = random_model("kda")
    write_flash_linear_attention(tmp_path / "export", model, tokenizer, config)
    assert "import fla" in how_to_load(tmp_path / "export")


@pytest.mark.parametrize("mixer", EXPECTED)
def test_its_own_classes_take_the_weights(random_model, tokenizer, tmp_path, mixer):
    fla = pytest.importorskip("fla.models", reason="flash-linear-attention is not installed")
    config, model = random_model(mixer)
    kind = fla_type(model)[0]
    write_flash_linear_attention(tmp_path / "export", model, tokenizer, config)
    _, info = getattr(fla, kind.architecture).from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(info.values())
