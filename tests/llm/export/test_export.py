"""Exports of every mixer and hybrid, loaded in one process that has torch and transformers alone."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from llm.build import build_model
from llm.compose import compose
from llm.errors import UserError
from llm.export import export
from llm.export.parity import check_exports
from llm.export.write import save_tokenizer, write_self_contained
from llm.tokenizer import load_tokenizer

# folder with another transformers to test: pip install --target FOLDER transformers==5.17.0
OTHER_TRANSFORMERS = [path for path in [os.environ.get("MIXLAB_TEST_TRANSFORMERS")] if path]


@pytest.fixture(scope="module", autouse=True)
def _modules_cache(tmp_path_factory):
    """The code of exports that tests load is copied to a folder of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("modules")
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
        patch.syspath_prepend(str(folder))
        yield


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bundled:tokenizer")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A mixer of another package, which has a setting that is a class of torch and imports a module lazily."""
    folder = tmp_path_factory.mktemp("packages")
    package = folder / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "scales.py").write_text("FACTOR = 0.5\n")
    (package / "mixer.py").write_text(
        "from llm.mixers.softmax import SoftmaxAttention\n"
        "class Scaled(SoftmaxAttention):\n"
        "    def __init__(self, *args, activation, **settings):\n"
        "        super().__init__(*args, **settings)\n"
        "        self.activation = activation\n"
        "    def _output(self, o, x):\n"
        "        from .scales import FACTOR\n"
        "        return FACTOR * self.activation(super()._output(o, x))\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        target = "+mixers.scaled._target_=some_package.mixer.Scaled"
        yield [target, "+mixers.scaled.activation={_target_:torch.nn.Tanh}", "+mixers.scaled.head_dim=16"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tokenizer, layouts, small, elsewhere):
    """Every layout's model and the folder of its export; the last has untied embeddings and a mixer from elsewhere."""
    root, models = tmp_path_factory.mktemp("exports"), {}
    words = {layout: [f"mixer={layout}"] for layout in layouts}
    words["elsewhere"] = ["pattern=[scaled,gdn]", *elsewhere, "model.tie_embeddings=false"]
    for layout, chosen in words.items():
        config = compose([*chosen, *small, "model.init_std=0.2"])
        models[layout] = build_model(config, len(tokenizer)).eval()
        write_self_contained(root / layout, models[layout], tokenizer, config)
    return root, models


@pytest.fixture(scope="module")
def parities(exported, tokenizer):
    """Of every layout; and under "wrong", of a model that is not the one exported."""
    root, models = exported
    folders = {layout: root / layout for layout in models} | {"wrong": root / "softmax"}
    wrong = copy.deepcopy(models["softmax"])
    with torch.no_grad():
        wrong.norm.weight.mul_(1.01)
    models = models | {"wrong": wrong}
    return check_exports(folders, models, tokenizer, lengths=(1, 65), sys_path=OTHER_TRANSFORMERS)


def load(folder: Path, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **settings).eval()


def test_the_tokenizer_pads_batches_on_the_left(tmp_path, tokenizer):
    save_tokenizer(tmp_path, tokenizer, 64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    end = tokenizer.eos_token_id
    short, long = loaded(["a", "a whale"], padding=True)["input_ids"]
    assert short[0] == loaded.pad_token_id == end != short[-1]
    assert end not in long


def test_computes_what_the_model_does(layout, parities):
    parity = parities[layout]
    assert parity.failures() == []
    assert 0 < parity.own_error < 1e-3  # rounding of fp32: it is not fp64 that was compared
    assert parity.logits < 1e-5


def test_a_mixer_of_another_package_goes_along(exported, parities):
    root, _ = exported
    assert parities["elsewhere"].failures() == []
    assert (root / "elsewhere" / "some_package_scales.py").exists()


def test_sixteen_bits_keep_small_parameters_in_fp32(layout, exported):
    """Linear maps and embeddings in bf16, the rest in fp32; as the model under autocast; gradients flow."""
    root, models = exported
    model, ids = load(root / layout, dtype=torch.bfloat16), torch.randint(4000, (2, 70))
    by_name = {name: p.dtype for name, p in model.named_parameters()}
    assert by_name["model.layers.0.mlp.up_proj.weight"] is torch.bfloat16
    kept = ("norm.weight", "A_log", "dt_bias", "conv1d.weight", ".bias")
    assert all(dtype is torch.float32 for name, dtype in by_name.items() if name.endswith(kept))
    rounded = copy.deepcopy(models[layout])
    rounded.load_state_dict({name: p.float() for name, p in model.model.state_dict().items()})
    with torch.autocast("cpu", torch.bfloat16):
        expected = rounded.logits(rounded(ids).hidden)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    model.train()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_kernels_go_along(exported):
    """Two exports in one process run their own copies of the Triton kernels, under names of their own."""
    root, models = exported
    ids, operators = torch.randint(4000, (1, 70)), set()
    for layout in ("gla", "gdn"):
        model = load(root / layout)
        for block in model.model.layers:
            block.mixer.impl = "triton"
        expected = models[layout].logits(models[layout](ids).hidden)
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4)
        home = type(model).__module__.rpartition(".")[0]
        loaded = {name: module for name, module in sys.modules.items() if name.startswith(home)}
        operators |= {m.forward_op._qualname for m in loaded.values() if hasattr(m, "forward_op")}
    assert len(operators) == 2
    assert not any(name.startswith("mixer_kernels::") for name in operators)


@pytest.mark.parametrize("which", ["softmax", "elsewhere"])
def test_saves_itself_again(which, exported, tmp_path):
    """In transformers alone, weights, code and all; tied embeddings stay tied."""
    root, models = exported
    first, ids = load(root / which), torch.randint(4000, (2, 20))
    first.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert {p.name for p in (root / which).glob("*.py")} == {p.name for p in (tmp_path / "again").glob("*.py")}
    assert again(ids).logits.equal(first(ids).logits)
    tied = models[which].lm_head.weight is models[which].embeddings.weight
    assert (again.model.lm_head.weight is again.model.embeddings.weight) == tied


def test_gradient_checkpointing_gives_the_same_gradients(exported):
    root, _ = exported
    ids, found = torch.randint(4000, (2, 20)), []
    for checkpointing in (False, True):
        model = load(root / "hybrid_gdn_1to1").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        assert model.model.layers[0].checkpointing == ("full" if checkpointing else "none")
        model(ids, labels=ids).loss.backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_the_trainer_of_transformers_tunes_it(exported, tmp_path):
    root, _ = exported
    ids = torch.randint(4000, (4, 20))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=8, learning_rate=1e-2, per_device_train_batch_size=4, report_to=[],
        use_cpu=True, save_strategy="no", logging_steps=1, gradient_checkpointing=True, disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(load(root / "gdn").train(), arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 1


def test_low_rank_adapters_learn(exported):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    root, _ = exported
    adapted = peft.get_peft_model(load(root / "kda").train(), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    ids = torch.randint(4000, (2, 20))
    adapted(input_ids=ids, labels=ids).loss.backward()
    grads = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert grads
    assert all("lora_" in name for name in grads)
    assert all(grad.any() for name, grad in grads.items() if "lora_B" in name)


def test_loss_is_that_of_transformers(exported):
    root, _ = exported
    model, ids = load(root / "softmax"), torch.randint(4000, (2, 20))
    expected = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)


def test_padding_does_not_matter(layout, exported):
    """On the left and on the right, logits of a padded batch are those of its rows."""
    root, _ = exported
    model, ids = load(root / layout, dtype=torch.float64), torch.randint(4000, (1, 30))
    alone = model(ids).logits
    for left in (7, 0):
        padded = torch.nn.functional.pad(ids, (left, 7 - left), value=5)
        mask = torch.nn.functional.pad(torch.ones_like(ids), (left, 7 - left))
        torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, left : left + 30], alone)


def test_cache_outgrows_its_room(layout, exported, monkeypatch):
    root, _ = exported
    model, ids = load(root / layout, dtype=torch.float64), torch.randint(4000, (2, 40))
    monkeypatch.setitem(type(model).forward.__globals__, "ROOM", 8)
    cache, found = None, []
    for begin, end in ((0, 3), (3, 20), *((t, t + 1) for t in range(20, 40))):
        output = model(ids[:, begin:end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, 1), model(ids).logits)


def test_training_from_scratch_draws_the_weights(exported):
    """`from_config` initialises as the project does."""
    root, models = exported
    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_config(load(root / "softmax").config, trust_remote_code=True)
    weight = fresh.model.layers[0].mlp.up_proj.weight
    assert 0.19 < weight.std() < 0.21
    assert not weight.equal(models["softmax"].layers[0].mlp.up_proj.weight)


def test_a_different_export_is_noticed(parities):
    failures = parities["wrong"].failures()
    assert any(failure.startswith("logits differ by 9.9e-03") for failure in failures), failures


def test_export_that_differs_is_not_kept(make_run, parities, tmp_path, monkeypatch):
    run, out = make_run("softmax"), tmp_path / "out"
    monkeypatch.setattr(export, "check_exports", lambda folders, *_: dict.fromkeys(folders, parities["wrong"]))
    with pytest.raises(UserError, match=r"differs from the model and is not kept: logits differ"):
        export.export_run(run, out, form="self-contained")
    assert [p.name for p in tmp_path.iterdir()] == [run.name]
    out.mkdir()
    with pytest.raises(UserError, match="is not overwritten"):
        export.export_run(run, out)
