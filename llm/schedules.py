"""Learning-rate schedules: pure functions of the step, so that nothing about them needs saving.

Each takes `step` (0 for the first optimizer step), `steps` (the whole horizon) and the lengths in steps, and returns
the share of the peak learning rate. `build_schedule` turns the typed configuration into one function of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from llm.config import ScheduleConfig, TrainConfig
from llm.errors import UserError, suggest

Schedule = Callable[[int], float]


def constant(step: int, steps: int, *, warmup: int, decay: int, floor: float) -> float:
    """Warm-up, then the peak until the end."""
    return _warmup(step, warmup)


def linear(step: int, steps: int, *, warmup: int, decay: int, floor: float) -> float:
    """Warm-up, then a straight line down to the floor."""
    return _warmup(step, warmup) * _between(floor, 1 - _progress(step, warmup, steps))


def cosine(step: int, steps: int, *, warmup: int, decay: int, floor: float) -> float:
    """Warm-up, then half a cosine down to the floor (Loshchilov and Hutter 2017, without restarts)."""
    remaining = (1 + math.cos(math.pi * _progress(step, warmup, steps))) / 2
    return _warmup(step, warmup) * _between(floor, remaining)


def wsd(step: int, steps: int, *, warmup: int, decay: int, floor: float) -> float:
    """Warm-up, stable, decay: the last `decay` steps go down as 1 - sqrt (Hägele et al. 2024, arXiv 2405.18392)."""
    remaining = 1 - math.sqrt(_progress(step, steps - decay, steps))
    return _warmup(step, warmup) * _between(floor, remaining)


SCHEDULES = {function.__name__: function for function in (constant, linear, cosine, wsd)}


def total_steps(config: TrainConfig) -> int:
    """Optimizer steps of the whole schedule, from `steps` or `tokens`. UserError unless exactly one is given."""
    if (config.steps is None) == (config.tokens is None):
        raise UserError(f"steps={config.steps} and tokens={config.tokens}: give one of them, and null for the other.")
    steps = config.steps if config.steps is not None else -(-config.tokens // config.batch_tokens)
    if steps < 1:
        raise UserError(f"steps={steps}: a run has at least one step.")
    return steps


def build_schedule(config: ScheduleConfig, steps: int) -> Schedule:
    """The schedule of `config` over `steps` optimizer steps: step -> share of the peak learning rate."""
    if config.name not in SCHEDULES:
        raise UserError(f"schedule.name={config.name} is no schedule.{suggest(config.name, SCHEDULES)}")
    if not 0 <= config.floor <= 1:
        raise UserError(f"schedule.floor={config.floor} is a share of the peak learning rate: give 0 to 1.")
    warmup = _length("schedule.warmup", config.warmup, steps)
    decay = _length("schedule.decay", config.decay, steps) if config.name == "wsd" else 0
    if warmup + decay > steps:
        keys = f"schedule.warmup={config.warmup}" + (f" and schedule.decay={config.decay}" if decay else "")
        raise UserError(
            f"{keys} need {warmup + decay} steps, but the run has steps={steps}. "
            "Shorten them (values below 1 are shares of all steps) or raise steps."
        )
    return partial(SCHEDULES[config.name], steps=steps, warmup=warmup, decay=decay, floor=config.floor)


def _length(key: str, value: float, steps: int) -> int:
    """A number of steps from a number of steps or a share of all."""
    if value < 0 or (value >= 1 and value != int(value)):
        raise UserError(f"{key}={value} is neither a number of steps nor a share: give a whole number or 0 to 1.")
    return int(value) if value >= 1 else round(value * steps)


def _warmup(step: int, warmup: int) -> float:
    """Rises to 1 in `warmup` steps; the first step is not 0, or it would be wasted."""
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def _progress(step: int, start: int, end: int) -> float:
    """0 up to `start`, 1 from `end` on."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def _between(floor: float, share: float) -> float:
    return floor + (1 - floor) * share
