"""Fixtures for everything under llm: tiny models of every mixer, found by globbing the configs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml

from llm.build import build_mixer, build_model
from llm.checkpoint import Snapshot, write_checkpoint
from llm.compose import compose
from llm.paths import configs_dir
from llm.runfolder import RunFolder
from llm.state import model_tensors
from llm.tokenizer import load_tokenizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# small enough for the whole suite to run on two cores; every mixer must fit these sizes
SMALL = [
    "model=tiny", "model.d_model=64", "model.n_layers=4", "model.head_dim=16", "model.linear_head_dim=16",
    "model.parameters=200000",
]  # fmt: skip


def _mixers_of_their_own() -> list[str]:
    """Choices of the mixer group that bring a mixer's settings (`hybrid` only arranges others)."""
    files = {p.stem: yaml.safe_load(p.read_text()) for p in sorted((configs_dir() / "mixer").glob("*.yaml"))}
    return [name for name, content in files.items() if name in content.get("mixers", {})]


MIXERS = _mixers_of_their_own()
# settings under which a mixer has to hold its contract too; a mixer needs no entry here to be tested
VARIANTS = [
    "softmax num_kv_heads=2 rope_theta=null qk_norm=false",
    "softmax window=5 output_gate=true",
    "gla conv_size=4",
    "gdn negative_eigenvalues=true conv_size=null",
    "kda gate_lower_bound=-5.0 negative_eigenvalues=true",
]
LAYOUTS = [*MIXERS, *(f"hybrid_{name}_1to1" for name in MIXERS if name != "softmax")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`mixer_name`: every mixer, with variants. `layout`: every mixer, and every one in a hybrid."""
    for argument, values in (("mixer_name", MIXERS + VARIANTS), ("layout", LAYOUTS)):
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, values)


@pytest.fixture(scope="session")
def layouts() -> list[str]:
    """All values of `layout`."""
    return LAYOUTS


@pytest.fixture(scope="session")
def small() -> list[str]:
    """Overrides that make a model small."""
    return SMALL


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def make_config():
    """make_config(layout, *overrides): the configuration of a small model."""
    return lambda layout, *overrides: compose([f"mixer={layout}", *SMALL, *overrides])


@pytest.fixture
def make_model(make_config):
    """make_model(layout, *overrides, vocab=, dtype=): a small decoder with livelier weights than at initialisation."""

    def make(layout: str, *overrides: str, vocab: int = 50, dtype: torch.dtype = torch.float64):
        return build_model(make_config(layout, "model.init_std=0.2", *overrides), vocab).to(dtype).eval()

    return make


@pytest.fixture
def make_mixer(make_config):
    """make_mixer("gdn conv_size=3", dtype): layer 1 of a small model, with settings after the name."""

    def make(described: str, dtype: torch.dtype = torch.float64):
        name, *settings = described.split()
        mixer = build_mixer(make_config(name, *(f"mixers.{name}.{s}" for s in settings)), name, 1)
        mixer.reset_parameters(0.2)
        return mixer.to(dtype)

    return make


@pytest.fixture
def make_run(make_config, tmp_path):
    """make_run(layout, *overrides, steps=): a run folder with checkpoints, of untrained weights; the first is best."""

    def make(layout: str, *overrides: str, steps: tuple[int, ...] = (1,)) -> Path:
        config = make_config(layout, "model.init_std=0.2", *overrides)
        run = RunFolder.open(tmp_path / f"run_{layout}", config)
        for step in steps:
            config.seed = step
            model = build_model(config, len(load_tokenizer(config.tokenizer.path)))
            run.checkpoints.folder.mkdir(exist_ok=True)
            write_checkpoint(
                run.checkpoints.path(step), Snapshot(model_tensors(model), {}, {}, {"step": step, "val_loss": step})
            )
        run.close()
        return run.path

    return make
