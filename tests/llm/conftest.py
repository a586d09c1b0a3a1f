"""Fixtures for everything under llm: tiny models of every mixer, found by globbing the configs."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from hydra.utils import get_class

from llm.build import build_leaf, build_mixer, build_model
from llm.checkpoint import Snapshot, write_checkpoint
from llm.compose import compose
from llm.data import training_rows, validation_sets
from llm.loggers import Logger
from llm.loss import NextTokenLoss
from llm.optim import build_optimizer
from llm.parallel import build_accelerator, distribute
from llm.paths import configs_dir
from llm.runfolder import RunFolder, open_run
from llm.runs_equal import differences_of_runs, metrics_of
from llm.state import model_tensors
from llm.tokenizer import load_tokenizer
from llm.trainer import Trainer

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
    "fox window=5 output_gate=true num_kv_heads=2",
    "gla conv_size=4",
    "gdn negative_eigenvalues=true conv_size=null",
    "kda gate_lower_bound=-5.0 negative_eigenvalues=true",
    "deltaproduct householder=3 forget_gate=false conv_size=null",
    "mom top=1",
]


def _trained_mixers() -> set[str]:
    """Those that a shipped recipe trains."""
    recipes = " ".join(p.read_text() for p in (configs_dir() / "experiment").glob("*.yaml"))
    return {name for name in MIXERS if re.search(rf"\b{name}\b", recipes)}


def _quick_mixers(trained: set[str]) -> set[str]:
    """Mixers that stand for the others in tests of what is around a mixer (export, generation, whole decoders).

    Those that a shipped recipe trains, and of each other kind the first: mixers are of one kind if they have the same
    `forward`, `step` and state, so that they differ in the computation of gates alone.
    """
    kinds: dict[tuple[str, ...], str] = {}
    for name in sorted(MIXERS, key=lambda name: name not in trained):
        kinds.setdefault(_kind(name), name)
    return trained | set(kinds.values())


def _kind(name: str) -> tuple[str, ...]:
    settings = yaml.safe_load((configs_dir() / "mixer" / f"{name}.yaml").read_text())["mixers"][name]
    mixer = get_class(settings["_target_"])
    parts = ("forward", "step", "mix", "recur", "init_state", "wide_state", "narrow_state")
    return tuple(getattr(mixer, part).__qualname__ for part in parts if hasattr(mixer, part))


TRAINED = _trained_mixers()
QUICK = _quick_mixers(TRAINED)
_TRAINED_VARIANTS = {described for described in MIXERS + VARIANTS if described.split()[0] in TRAINED}
LAYOUTS = [*MIXERS, *(f"hybrid_{name}_1to1" for name in MIXERS if name != "softmax")]
QUICK_LAYOUTS = {*QUICK, *(f"hybrid_{name}_1to1" for name in TRAINED)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`mixer_name`: every mixer, with variants. `layout`: every mixer, and every one in a hybrid.

    A layout that is not among the quick ones is slow, and so is a mixer that no recipe trains in tests marked `costly`.
    """
    costly = metafunc.definition.get_closest_marker("costly") is not None
    for argument, values, quick in (
        ("mixer_name", MIXERS + VARIANTS, _TRAINED_VARIANTS if costly else {*MIXERS, *VARIANTS}),
        ("layout", LAYOUTS, QUICK_LAYOUTS),
    ):
        if argument in metafunc.fixturenames:
            marks = ([] if value in quick else [pytest.mark.slow] for value in values)
            metafunc.parametrize(argument, [pytest.param(v, marks=m, id=v) for v, m in zip(values, marks, strict=True)])


@pytest.fixture(scope="session")
def layouts(request) -> list[str]:
    """All values of `layout` that the tests to run have, and softmax."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    return sorted({"softmax", *(p["layout"] for p in params if "layout" in p)})


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
    return lambda layout, *overrides: copy.deepcopy(_composed(f"mixer={layout}", *SMALL, *overrides))


_composed = functools.cache(lambda *words: compose(words))  # Hydra takes longer than most tests do


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


STEPS = 8  # of the small runs
SMALL_RUN = [
    "mixer=gdn", "model=tiny", "model.d_model=32", "model.n_layers=2", "model.head_dim=16", "model.linear_head_dim=16",
    "model.parameters=30000", "model.tie_embeddings=true", "logger=jsonl", "data=local", "data.mode=memory",
    "context=32", "batch_tokens=128", "micro_batch=2", f"steps={STEPS}", "log_every=3", "eval.every=4",
    "checkpoint.every=3", "schedule.warmup=2", "optim.lr=0.01",
]  # fmt: skip

compose_once = functools.cache(compose)  # composing takes longer than these runs do


def _command_line(run_dir: Path, text: Path, *overrides: str) -> list[str]:
    """The words of a small run."""
    keys = {word.split("=")[0] for word in overrides}
    defaults = [word for word in SMALL_RUN if word.split("=")[0] not in keys]
    data = [f"data.path={text}/train.jsonl", f"data.validation_path={text}/val.jsonl"]
    return [f"run_dir={run_dir}", *data, *defaults, *overrides]


def _make_trainer(words: list[str], loggers: tuple[Logger, ...] = ()) -> Trainer:
    run_dir, *rest = words
    config = copy.deepcopy(compose_once(tuple(rest)))
    config.run_dir = run_dir.removeprefix("run_dir=")
    accelerator = build_accelerator(config)
    run = open_run(config, main=accelerator.is_main_process)
    tokenizer = load_tokenizer(config.tokenizer.path)
    model = build_model(config, len(tokenizer))
    objective = distribute(NextTokenLoss(model), config, accelerator)
    optimizer = build_optimizer(config.optim, model, build_leaf)
    source = build_leaf("data.source", config.data.source)
    rows = training_rows(config.data, source, tokenizer, config.context)
    validation = validation_sets(config.data, source, tokenizer, config.context)
    return Trainer(config, model, objective, optimizer, rows, validation, loggers, run, accelerator)


class _At(Logger):
    """Calls something at a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def advance(self, step):
        if step == self.step:
            self.action()


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A folder with train.jsonl and val.jsonl, of short documents."""
    folder = tmp_path_factory.mktemp("text")
    documents = [f"Chapter {i}. " + " ".join(f"word{(i * 7 + j) % 23}" for j in range(5 + i % 11)) for i in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    (folder / "val.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents[::10]))
    return folder


@pytest.fixture
def words(text, tmp_path):
    """words(name, *overrides): the command line of a small run in tmp_path/name."""
    return lambda name, *overrides: _command_line(tmp_path / name, text, *overrides)


@pytest.fixture
def make_trainer():
    """make_trainer(words, loggers=()): a trainer from the words of a command line."""
    return _make_trainer


@pytest.fixture
def train(words):
    """train(name, *overrides, loggers=()): a small run of `STEPS` steps in tmp_path/name; returns the summary."""
    return lambda name, *overrides, loggers=(): _make_trainer(words(name, *overrides), loggers).fit()


@pytest.fixture
def at():
    """at(step, action): a logger that calls something at a step."""
    return _At


@pytest.fixture(scope="session")
def whole(text, tmp_path_factory) -> Path:
    """The folder of an undisturbed small run."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    _make_trainer(_command_line(run_dir, text)).fit()
    return run_dir


@pytest.fixture
def assert_same_run():
    """assert_same_run(one, other): weights, optimizer, random generators, data and metrics are bitwise the same."""

    def check(one: Path, other: Path) -> None:
        assert not differences_of_runs(one, other)

    return check


@pytest.fixture
def assert_same_curve():
    """assert_same_curve(one, other, rel=2e-4): the same metrics but for the order of float additions.

    Accuracy is left out, since it jumps when one prediction flips.
    """

    def check(one: Path, other: Path, rel: float = 2e-4) -> None:
        left, right = (
            [{k: v for k, v in x.items() if k != "val_accuracy"} for x in metrics_of(f)] for f in (one, other)
        )
        assert len(left) == len(right)
        for expected, line in zip(left, right, strict=True):
            assert line == pytest.approx(expected, rel=rel)

    return check
