"""Every yaml composes and builds; mistakes are explained."""

from __future__ import annotations

import itertools
import re

import pytest

from llm.build import build_model
from llm.compose import compose, groups
from llm.errors import UserError
from llm.identity import default_run_dir, differences, identity
from llm.report import TOLERANCE, size_warnings, state_target

CHOICES = [(group, choice) for group, choices in groups().items() for choice in choices]


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_yaml_composes_and_builds(group, choice):
    config = compose_with_what_is_missing([f"{group}={choice}"])
    model = build_model(config, 1000, "meta")
    assert len(model.layers) == config.model.n_layers


def compose_with_what_is_missing(words):
    """The message about a mandatory value names its key: do as it says."""
    for _ in range(5):
        try:
            return compose(words)
        except UserError as error:
            missing = re.match(r"(\S+): no value is given. Set \1=", str(error))
            if missing is None:
                raise
            words = [*words, f"{missing[1]}=somewhere"]
    raise AssertionError(words)


@pytest.mark.parametrize("size", groups()["model"])
def test_sizes_match_whatever_the_mixer(size, layout):
    config = compose([f"model={size}", f"mixer={layout}"])
    model = build_model(config, 1000, "meta")
    assert abs(model.non_embedding_parameters() / config.model.parameters - 1) < 0.01
    for block in model.layers:
        assert block.mixer.state_elements() in (0, state_target(config.model))
        assert block.mlp.gate_proj.out_features % config.model.mlp_multiple == 0
    assert size_warnings(config, model) == []


def test_unmatched_sizes_are_flagged():
    config = compose(["mixer=gdn", "model.mlp_width=1024", "mixers.gdn.head_k_dim=16"])
    text = " ".join(size_warnings(config, build_model(config, 1000, "meta")))
    assert "non-embedding parameters" in text
    assert "state elements" in text
    assert TOLERANCE == 0.02


def test_alias_is_short_for_the_hybrid():
    long = compose(["mixer=hybrid", "hybrid.linear=kda", "hybrid.per_softmax=7"])
    assert compose(["mixer=hybrid_kda_7to1"]) == long


def test_settings_reach_into_a_mixer_of_a_hybrid():
    config = compose(["mixer=hybrid_kda_3to1", "mixers.kda.conv_size=3", "mixers.softmax.num_kv_heads=1"])
    model = build_model(config, 1000, "meta")
    assert model.layers[0].mixer.q_conv1d.size == 3
    assert model.layers[3].mixer.num_kv_heads == 1


def test_a_mixer_from_elsewhere_works_by_target():
    words = [
        "pattern=[mine,softmax]",
        "+mixers.mine._target_=llm.mixers.gdn.GatedDeltaNet",
        "+mixers.mine.head_k_dim=32",
    ]
    assert type(build_model(compose(words), 1000, "meta").layers[0].mixer).__name__ == "GatedDeltaNet"


MISTAKES = {
    "nonsense=1": "nonsense: there is no such key",
    "+nonsense=1": "nonsense: there is no such key",
    "+optim.lrr=1": "optim.lrr: there is no such key",
    "optim.lrr=1": "optim.lrr: there is no such key. Did you mean optim.lr?",
    "optim.lr=fast": "optim.lr: .*fast.*",
    "steps=1.5": "steps: .*1.5.*",
    "mixer=gdm": "mixer=gdm: there is no such choice. Did you mean gdn?",
    "mixer=hybrid_gdm_3to1": "mixer 'gdm' is not known. Did you mean gdn?",
    "pattern=[gdn,what]": "mixer 'what' is not known",
    "model=3b": "model=3b: there is no such choice",
    "experiment=none_such": "experiment=none_such: there is no such choice",
    "hybrid.per_softmax=0": "hybrid.per_softmax=0: must be a number from 1 on",
    "optim.lr=nan": "optim.lr=nan: must be a number from 0 on",
    "optim.lr=inf": "optim.lr=inf: must be a number from 0 on",
    "optim.clip=0": "optim.clip=0.0: must be a number above 0",
    "seed=-1": "seed=-1: must be between 0 and 2147483647",
    "data.validation_contexts=[64,0]": r"data.validation_contexts=\[64, 0\]: must be a number from 1 on",
    "residual=odd": "residual=odd: must be one of standard",
    "data.packing=foo": "data.packing=foo: must be one of cut, fit",
    "data=local": "data.path: no value is given. Set data.path=",
    "mixer=gdn,kda": "mixer=gdn,kda: several choices are a sweep. Put -m before them",
    "seed=1,2": "several values are a sweep. Put -m before them",
    "mixer=": "mixer=: no choice is given",
    "mixers.softmax.windo=3": r"mixers.softmax.windo: there is no such key. Did you mean mixers.softmax.window?",
    "mixer=hybrid_gdn_3to2": "Hybrids are named hybrid_X_Nto1",
    "lonely": "'lonely' is not of the form key=value",
    "seed=[": r"'seed=\[' cannot be read",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_mistakes_in_composition(word):
    with pytest.raises(UserError, match=MISTAKES[word]) as caught:
        compose([word])
    assert "\n" not in str(caught.value)


BUILD_MISTAKES = {
    "mixers.gdn.conv=3": "mixers.gdn.conv: .*no such",
    "+mixers.gdn.convsize=3": "mixers.gdn.convsize: GatedDeltaNet has no such setting. Did you mean conv_size?",
    "mixers.gdn.head_k_dim=100": "mixers.gdn: head_k_dim x expand_v = 200 does not divide d_model=192",
    "mixers.gdn.expand_v=0.01": "mixers.gdn: .*expand_v=0.01 is no whole number",
    "mixers.gdn._target_=llm.mixers.gdn.Nothing": "mixers.gdn._target_=llm.mixers.gdn.Nothing: cannot be imported",
    "model.parameters=1000": "model.parameters=1000: the mixers leave no room",
}


@pytest.mark.parametrize("word", BUILD_MISTAKES)
def test_mistakes_in_building(word):
    with pytest.raises(UserError, match=BUILD_MISTAKES[word]):
        build_model(compose(["mixer=gdn", word]), 1000, "meta")


def test_run_folder_follows_from_what_matters():
    base = compose(["mixer=gdn"])
    same = compose(["mixer=gdn", "log_every=3", "stop_after=5", "micro_batch=2", "run_dir=elsewhere", "logger=jsonl"])
    assert identity(base) == identity(same)
    assert default_run_dir(base) == default_run_dir(same)
    other = compose(["mixer=gdn", "optim.lr=0.5"])
    assert differences(identity(other), identity(base)) == [f"optim.lr: {base.optim.lr} -> 0.5"]
    folders = [default_run_dir(compose(w)) for w in (["seed=1"], ["data.seed=1"], ["mixer=kda"], ["steps=7"])]
    assert len({*folders, default_run_dir(base)}) == 5


@pytest.mark.parametrize("experiment", groups()["experiment"])
def test_an_experiment_takes_other_data(experiment):
    """Nothing that an experiment sets of its own data stays behind for another source to choke on."""
    config = compose([f"experiment={experiment}", "data=local", "data.path=somewhere"])
    assert config.data == compose(["data=local", "data.path=somewhere"]).data


def test_experiments_at_one_size_differ_in_the_mixer_alone():
    """Comparisons between the shipped recipes are fair: only layout and mixers' settings differ."""
    names = [n for n in groups()["experiment"] if n.startswith("340m_")]
    identities = [identity(compose([f"experiment={n}"])) for n in names]
    for one, two in itertools.pairwise(identities):
        keys = {d.split(":")[0].split(".")[0] for d in differences(one, two)}
        assert keys <= {"mixers", "pattern", "hybrid"}
