"""Special parameters start as their papers have them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from llm.mixers.decay import bounded_log_decay, init_A_log, init_dt_bias, log_decay


def test_step_sizes_are_log_uniform():
    dt_bias = torch.empty(20000)
    init_dt_bias(dt_bias)
    step = F.softplus(dt_bias)
    assert step.min() >= 1e-3 * 0.99
    assert step.max() <= 1e-1 * 1.01
    assert (step.log() - torch.log(torch.tensor(1e-2))).mean().abs() < 0.03  # the geometric middle


@pytest.mark.parametrize(("low", "high"), [(0.0, 16.0), (1.0, 16.0)])
def test_A_is_uniform_and_never_zero(low, high):
    A_log = torch.empty(20000)
    init_A_log(A_log, low, high)
    assert A_log.isfinite().all()
    assert A_log.exp().min() >= low
    assert A_log.exp().max() <= high
    assert abs(A_log.exp().mean() - (low + high) / 2) < 0.1


def test_gates_decay_and_stay_wide_in_bf16():
    x, A_log, dt_bias = torch.randn(100, dtype=torch.bfloat16) * 10, torch.randn(1), torch.randn(1)
    for g in (log_decay(x, A_log, dt_bias), bounded_log_decay(x, A_log, dt_bias, -5.0)):
        assert g.dtype is torch.float32
        assert (g <= 0).all()
    assert (bounded_log_decay(x, A_log, dt_bias, -5.0) >= -5).all()


def test_kda_bounded_gate_starts_at_A_one(make_mixer):
    assert (make_mixer("kda gate_lower_bound=-5.0").A_log == 0).all()
    assert (make_mixer("kda").A_log > 0).all()


def test_linear_maps_have_the_asked_standard_deviation(mixer_name, make_mixer):
    mixer = make_mixer(mixer_name)
    mixer.reset_parameters(0.02)
    large = [m.weight for m in mixer.modules() if isinstance(m, torch.nn.Linear) and m.weight.numel() > 1000]
    assert len(large) >= 3
    assert all(abs(weight.std() - 0.02) < 0.002 for weight in large)
