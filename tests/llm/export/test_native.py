"""Exports as architectures of transformers: no code of ours, the same numbers."""

from __future__ import annotations

import json
import os

import pytest
import torch

from llm.build import build_model
from llm.compose import compose
from llm.errors import UserError
from llm.export import export
from llm.export.native import fitting, has_cache
from llm.export.parity import check_exports
from llm.export.write import write_native
from llm.tokenizer import load_tokenizer

# folder with another transformers to test: pip install --target FOLDER transformers==5.17.0
OTHER_TRANSFORMERS = [path for path in [os.environ.get("MIXLAB_TEST_TRANSFORMERS")] if path]

CASES = {
    "llama": ("softmax", "mixers.softmax.qk_norm=false", "model.tie_embeddings=false"),
    "qwen3": ("softmax", "mixers.softmax.num_kv_heads=2"),
    "qwen3 window": ("softmax", "mixers.softmax.window=5"),
    "qwen3_5_text": ("hybrid_gdn_3to1", "mixers.gdn.conv_size=3"),
    "qwen3_5_text gated": ("hybrid_gdn_1to1", "mixers.softmax.output_gate=true"),
    "qwen3_5_text pure": ("gdn",),
    "kimi_linear": ("kda",),
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bundled:tokenizer")


@pytest.fixture(scope="module")
def parities(tmp_path_factory, tokenizer, small):
    """Parity of every case, all loaded in one process; norms are not at their initial value."""
    root, models = tmp_path_factory.mktemp("native"), {}
    for case, (layout, *overrides) in CASES.items():
        torch.manual_seed(0)
        config = compose([f"mixer={layout}", *small, "model.init_std=0.1", *overrides])
        model = models[case] = build_model(config, len(tokenizer)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
        architecture, _ = fitting(model)
        assert architecture.model_type == case.split()[0]
        write_native(root / case, model, tokenizer, config, architecture)
        assert not list((root / case).glob("*.py"))
    folders = {case: root / case for case in CASES}
    return check_exports(folders, models, tokenizer, lengths=(1, 65), sys_path=OTHER_TRANSFORMERS)


@pytest.mark.parametrize("case", CASES)
def test_computes_what_the_model_does(case, parities):
    assert parities[case].failures() == []
    assert 0 < parities[case].own_error < 1e-4
    assert (parities[case].stepped is None) == (CASES[case][0] in ("gdn", "kda"))


@pytest.mark.parametrize(
    ("mixer", "override", "reason"),
    [
        ("gla", "seed=0", "no architecture has GatedLinearAttention"),
        ("gdn", "mixers.gdn.negative_eigenvalues=true", "qwen3_5_text has no negative_eigenvalues"),
        ("gdn", "mixers.gdn.conv_size=null", "qwen3_5_text needs conv_size"),
        ("gdn", "mixers.gdn.norm_eps=1e-5", "qwen3_5_text has one epsilon for all norms"),
        ("hybrid_gdn_1to1", "mixers.softmax.qk_norm=false", "qwen3_5_text needs qk_norm=true"),
        ("hybrid_gdn_1to1", "mixers.softmax.window=8", "qwen3_5_text has no window"),
        ("softmax", "mixers.softmax.rope_theta=null", "qwen3 needs rope_theta"),
        ("kda", "mixers.kda.gate_lower_bound=-5", "kimi_linear has no gate_lower_bound"),
        ("hybrid_kda_1to1", "seed=0", "no architecture has KimiDeltaAttention and SoftmaxAttention"),
    ],
)
def test_says_what_stands_in_the_way(mixer, override, reason, make_model):
    model = make_model(mixer, override)
    architecture, found = fitting(model)
    assert architecture is None
    assert reason in found
    with pytest.raises(UserError, match=f"--format native: not possible .*{reason}"):
        export.choose_form("native", model, found)


def test_auto_wants_a_cache(make_model):
    for layout, form in {"softmax": "native", "hybrid_gdn_3to1": "native", "gdn": "self-contained"}.items():
        model = make_model(layout)
        assert export.choose_form("auto", model, fitting(model)[1]) == form
        assert has_cache(model) == (form == "native")


def test_command_exports_natively_by_itself(make_run, tmp_path, capsys):
    run, out = make_run("hybrid_gdn_3to1"), tmp_path / "out"
    parity = export.export_run(run, out, say=print)
    assert parity.failures() == []
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3_5_text"
    assert "qwen3_5_text" in capsys.readouterr().out
    assert "trust_remote_code" not in export.how_to_load(out)
    assert {p.name for p in tmp_path.iterdir()} == {run.name, "out"}
