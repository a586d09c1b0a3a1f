"""Parameter groups, and the optimizer's state by parameter name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from llm.build import build_leaf
from llm.config import OptimConfig
from llm.errors import UserError
from llm.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors, parameter_groups, set_learning_rate


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.A_log = nn.Parameter(torch.zeros(2, 4))
        self.dt_bias = nn.Parameter(torch.zeros(2, 4))


class Model(nn.Module):
    def __init__(self, *, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.mixer = Mixer()
        self.norm = nn.LayerNorm(8)
        if not tied:
            self.head = nn.Linear(8, 16, bias=False)
        self.tied = tied

    @property
    def head_weight(self):
        return self.embedding.weight if self.tied else self.head.weight


def config(**settings):
    leaf = {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.95], "fused": True}
    return OptimConfig(name="adamw", lr=0.1, embedding_weight_decay=0.01, optimizer=leaf, **settings)


def roles(model):
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group for group in parameter_groups(model, config()) for p in group["params"]}


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_its_role_and_decay(tied):
    groups = roles(Model(tied=tied))
    decay = {name: group["weight_decay"] for name, group in groups.items()}
    assert decay.pop("mixer.q_proj.weight") == 0.1
    assert decay.pop("embedding.weight") == 0.01
    assert tied or decay.pop("head.weight") == 0.01
    assert decay.keys() == {"mixer.q_proj.bias", "mixer.A_log", "mixer.dt_bias", "norm.weight", "norm.bias"}
    assert set(decay.values()) == {0.0}


def test_a_parameter_in_two_groups_or_none_is_noticed():
    from llm.optim import _assert_complete

    model = Model()
    groups = parameter_groups(model, config())
    with pytest.raises(AssertionError, match="two groups"):
        _assert_complete(model, [*groups, groups[0]])
    with pytest.raises(AssertionError, match="no group"):
        _assert_complete(model, groups[1:])


def test_frozen_parameters_are_left_out():
    model = Model()
    model.mixer.q_proj.weight.requires_grad_(False)
    assert "mixer.q_proj.weight" not in roles(model)


def train(model, optimizer, steps):
    for _ in range(steps):
        out = model.mixer.q_proj(model.norm(model.embedding(torch.arange(4)))) * model.mixer.A_log.exp().mean()
        (out @ model.head_weight.T).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_state_goes_by_name_whatever_the_order_of_the_groups():
    torch.manual_seed(0)
    model = Model()
    optimizer = build_optimizer(config(), model, build_leaf)
    train(model, optimizer, 3)
    saved = {key: value.clone() for key, value in optimizer_tensors(optimizer, model).items()}
    assert {key.split("/")[0] for key in saved} == {"exp_avg", "exp_avg_sq", "step"}
    assert "exp_avg/mixer.q_proj.weight" in saved

    twin = Model()
    twin.load_state_dict(model.state_dict())
    groups = parameter_groups(twin, config())[::-1]
    for group in groups:
        group["params"].reverse()
    other = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=True)
    load_optimizer_tensors(other, twin, saved)
    train(model, optimizer, 2)
    train(twin, other, 2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name


def test_unknown_parameter_in_the_state():
    model = Model()
    optimizer = build_optimizer(config(), model, build_leaf)
    with pytest.raises(ValueError, match="elsewhere"):
        load_optimizer_tensors(optimizer, model, {"exp_avg/elsewhere": torch.zeros(1)})


def test_learning_rate_is_a_share_of_each_groups_peak():
    optimizer = build_optimizer(config(), Model(), build_leaf)
    optimizer.param_groups[0]["initial_lr"] = 0.5
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.05, 0.05]


@pytest.mark.parametrize(
    ("leaf", "message"),
    [({"betas": [0.9, 1.5]}, "optim.optimizer: Invalid beta"), ({"beta": 1}, "optim.optimizer.beta.*betas")],
)
def test_settings_that_the_class_refuses(leaf, message):
    wrong = OptimConfig(name="adamw", lr=0.1, optimizer={"_target_": "torch.optim.AdamW", **leaf})
    with pytest.raises(UserError, match=message):
        build_optimizer(wrong, Model(), build_leaf)
