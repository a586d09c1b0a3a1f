"""Schedules at the points that define them."""

from __future__ import annotations

import math

import pytest

from llm.config import ScheduleConfig
from llm.errors import UserError
from llm.schedules import SCHEDULES, build_schedule

STEPS = 100


def schedule(name, **settings):
    return build_schedule(ScheduleConfig(name=name, **settings), STEPS)


@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_rises_linearly_to_the_peak(name):
    lr = schedule(name, warmup=10, decay=20, floor=0.1)
    assert [lr(step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert lr(10) == 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_shares_and_steps_are_the_same(name):
    shares, steps = schedule(name, warmup=0.1, decay=0.2), schedule(name, warmup=10, decay=20)
    assert [shares(step) for step in range(STEPS)] == [steps(step) for step in range(STEPS)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_warmup_begins_at_the_peak(name):
    assert schedule(name, warmup=0)(0) == 1


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"constant"}))
def test_falls_to_the_floor_and_never_rises(name):
    lr = schedule(name, warmup=10, decay=20, floor=0.1)
    values = [lr(step) for step in range(10, STEPS + 1)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(0.1)


def test_shapes_at_the_middle():
    assert schedule("constant", warmup=10)(STEPS - 1) == 1
    assert schedule("linear", warmup=20, floor=0.2)(60) == pytest.approx(0.6)
    assert schedule("cosine", warmup=20, floor=0.2)(40) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    wsd = schedule("wsd", warmup=10, decay=40, floor=0.0)
    assert wsd(60) == 1
    assert wsd(70) == pytest.approx(0.5)  # 1 - sqrt(1/4)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"name": "cosin"}, "Did you mean cosine"),
        ({"name": "cosine", "warmup": 101}, "schedule.warmup=101"),
        ({"name": "wsd", "warmup": 50, "decay": 51}, "schedule.decay=51"),
        ({"name": "cosine", "warmup": 2.5}, "schedule.warmup=2.5"),
        ({"name": "cosine", "warmup": -1}, "schedule.warmup=-1"),
        ({"name": "cosine", "floor": 1.5}, "schedule.floor=1.5"),
    ],
)
def test_mistakes_are_named(settings, key):
    with pytest.raises(UserError, match=key):
        build_schedule(ScheduleConfig(**settings), STEPS)
