"""Muon with AdamW: who trains what, and that it is torch's Muon."""

from __future__ import annotations

import pytest
import torch

from llm.build import build_leaf
from llm.compose import compose, groups
from llm.errors import UserError
from llm.muon import Muon, orthogonalise
from llm.optim import build_optimizer, set_learning_rate

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize("mixer", groups()["mixer"])
def test_matrices_of_blocks_go_to_muon_and_all_else_to_adamw(make_config, make_model, mixer):
    model = make_model(mixer, dtype=torch.float32)
    optimizer = build_optimizer(make_config(mixer, "optim=muon").optim, model, build_leaf)
    names = {id(p): name for name, p in model.named_parameters()}
    muon, adamw = ({names[id(p)] for g in part.param_groups for p in g["params"]} for part in optimizer.parts)
    assert muon | adamw == set(names.values())
    assert not muon & adamw
    assert muon == {name for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2}
    set_learning_rate(optimizer, 0.25)
    assert {g["lr"] for part in optimizer.parts for g in part.param_groups} == {0.25 * 1e-3}


def test_singular_values_come_close_to_one():
    for shape in ((3, 16, 48), (2, 48, 16), (1, 4, 64)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape), COEFFICIENTS, 5, 1e-7))
        assert values.min() > 0.5
        assert values.max() < 1.3


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_batch_of_matrices_is_what_torch_does_one_by_one(adjust, nesterov):
    shapes = [(32, 16), (16, 32), (32, 16), (4, 32), (32, 16)]
    ours, theirs = ([torch.nn.Parameter(torch.randn(s)) for s in shapes] for _ in range(2))
    for mine, other in zip(ours, theirs, strict=True):
        other.data.copy_(mine.data)
    settings = {"lr": 0.1, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust}
    optimizers = Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    begin = [p.detach().clone() for p in ours]
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other, before in zip(ours, theirs, begin, strict=True):
        moved = (other - before).norm()
        assert (mine - other).norm() < 0.02 * moved, "bf16 rounding alone may differ"


def test_resume_is_bitwise(train, tmp_path, assert_same_run):
    train("whole", "optim=muon", "steps=4")
    train("parts", "optim=muon", "steps=4", "stop_after=2")
    train("parts", "optim=muon", "steps=4")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_setting_that_it_lacks_is_named(make_model):
    model = make_model("gdn", dtype=torch.float32)
    for setting, message in (
        ("optim.optimizer.adjust_lr_fn=adamw", "adamw"),
        ("+optim.optimizer.mu=1", "no such setting"),
    ):
        with pytest.raises(UserError, match=f"optim.optimizer.*{message}"):
            build_optimizer(compose(["mixer=gdn", "optim=muon", setting]).optim, model, build_leaf)
