"""Stops: signals, the time limit, what a scheduler sees."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from llm import session
from llm.compose import compose
from llm.errors import UserError
from llm.loggers import Logger
from llm.runlock import RunLock
from llm.runs_equal import metrics_of
from llm.stopping import Outcome, StopSignals, WallTime, parse_duration

STEPS = 8  # of a small run


@pytest.mark.parametrize(
    ("number", "outcome", "code"),
    [
        (signal.SIGTERM, Outcome.PREEMPTED, 75),
        (signal.SIGUSR1, Outcome.PREEMPTED, 75),
        (signal.SIGINT, Outcome.INTERRUPTED, 130),
    ],
)
def test_a_signal_saves_and_stops_at_the_step(train, whole, tmp_path, number, outcome, code, at, assert_same_run):
    summary = train("parts", loggers=[at(5, lambda: os.kill(os.getpid(), number))])
    assert (summary.outcome, summary.step, summary.outcome.exit_code) == (outcome, 5, code)
    train("parts")
    assert_same_run(whole, tmp_path / "parts")


@pytest.mark.parametrize("step", [4, STEPS])
def test_a_signal_in_validation_stops_it_and_it_is_done_again(train, whole, tmp_path, step, at, assert_same_run):
    summary = train("parts", loggers=[at(step, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert (summary.outcome, summary.step) == (Outcome.PREEMPTED, step)
    assert metrics_of(tmp_path / "parts")[-1]["step"] < step
    train("parts")
    assert_same_run(whole, tmp_path / "parts")


def test_a_crash_after_a_validation_was_done_again(train, whole, tmp_path, at, assert_same_run):
    """The checkpoint is from before the validation; its line of metrics must not be there twice in the end."""

    def crash():
        raise KeyboardInterrupt

    train("parts", "checkpoint.every=0", loggers=[at(4, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    with pytest.raises(KeyboardInterrupt):
        train("parts", "checkpoint.every=0", loggers=[at(5, crash)])
    assert metrics_of(tmp_path / "parts")[-1]["step"] == 4
    train("parts")
    assert_same_run(whole, tmp_path / "parts")


def test_a_signal_while_data_are_waited_for_ends_the_wait(words, make_trainer, train, whole, tmp_path, assert_same_run):
    trainer = make_trainer(words("parts"))
    read = type(trainer.rows).place

    class Hung(Exception):
        pass

    def hang_in_step_6(number):
        if number >= 4 * 5 + 3:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            time.sleep(60)
            raise Hung
        return read(trainer.rows, number)

    trainer.rows.place = hang_in_step_6
    began = time.monotonic()
    summary = trainer.fit()
    assert (summary.outcome, summary.step) == (Outcome.PREEMPTED, 5)
    assert time.monotonic() - began < 30
    train("parts")
    assert_same_run(whole, tmp_path / "parts")


def test_a_signal_in_the_first_forward_pass_saves_behind_the_first_step(
    words, make_trainer, train, whole, tmp_path, assert_same_run
):
    """Where compiling and warming up take their time."""
    trainer = make_trainer(words("parts"))
    hook = trainer.model.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
    trainer.loggers.loggers.append(type("Once", (Logger,), {"advance": lambda self, step: hook.remove()})())
    summary = trainer.fit()
    assert (summary.outcome, summary.step) == (Outcome.PREEMPTED, 1)
    train("parts")
    assert_same_run(whole, tmp_path / "parts")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_before_training_ends_the_preparation(words, monkeypatch, tmp_path, number, code):
    def slow(*args):
        os.kill(os.getpid(), number)
        time.sleep(60)

    before = signal.getsignal(number)
    monkeypatch.setattr(session, "training_rows", slow)
    began = time.monotonic()
    assert session.train(compose(words("run"))) == code
    assert time.monotonic() - began < 30
    assert signal.getsignal(number) is before
    assert RunLock(tmp_path / "run").acquire() is None, "the folder is free"


def test_a_second_interrupt_stops_at_once():
    def interrupt_twice():
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.outcome is Outcome.INTERRUPTED
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_time_limit_leaves_room_for_a_step_and_a_save():
    now = [0.0]
    wall_time = WallTime("100", now=lambda: now[0])
    wall_time.saw(20)
    now[0] = 54
    assert not wall_time.over()
    now[0] = 56
    assert wall_time.over()
    assert not WallTime(None).over()


def test_out_of_time(train):
    summary = train("run", "max_wall_time=0s")
    assert (summary.outcome, summary.step, summary.outcome.exit_code) == (Outcome.OUT_OF_TIME, 0, 75)
    assert train("run").outcome is Outcome.FINISHED


def test_durations():
    given = {"3600": 3600, "90m": 5400, "11h30m": 41400, "1d2h": 93600, "0.5": 0.5}
    assert {text: parse_duration("k", text) for text in given} == given
    for wrong in ("", "soon", "3x", "h"):
        with pytest.raises(UserError, match="max_wall_time="):
            parse_duration("max_wall_time", wrong)
