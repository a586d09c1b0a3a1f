"""Sinks of metrics, and what happens to training when they fail."""

from __future__ import annotations

import io
import json
import sys

import pytest

from llm.loggers import GIVE_UP_AFTER, ConsoleLogger, JsonlLogger, Logger, Loggers, WandbLogger, readable


def start(logger, run_dir, step=0):
    logger.start(run_dir=run_dir, config={"seed": 1}, step=step, steps=100)
    return logger


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_appends_and_a_resumed_run_writes_no_step_twice(tmp_path):
    first = start(JsonlLogger(), tmp_path)
    for step in (10, 20, 30):
        first.log(step, {"loss": step / 10})
    first.close()
    second = start(JsonlLogger(), tmp_path, step=20)
    second.log(30, {"loss": 9.0})
    assert lines(tmp_path) == [{"step": 10, "loss": 1.0}, {"step": 20, "loss": 2.0}, {"step": 30, "loss": 9.0}]


@pytest.mark.parametrize("torn", [b'{"step": 20, "lo', b'{"step": 20', b"\x00\x00\x00", b'{"step"', b"\xff\xfe"])
def test_a_torn_last_line_is_repaired(tmp_path, torn):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 10, "loss": 1.0}\n' + torn)
    logger = start(JsonlLogger(), tmp_path, step=20)
    logger.log(30, {"loss": 3.0})
    assert lines(tmp_path) == [{"step": 10, "loss": 1.0}, {"step": 30, "loss": 3.0}]


def test_lines_that_the_disk_refused_are_written_later(tmp_path, monkeypatch):
    logger = start(JsonlLogger(), tmp_path)
    logger.log(1, {"loss": 1.0})
    (tmp_path / "metrics.jsonl").rename(tmp_path / "aside")
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match="directory"):
        logger.log(2, {"loss": 2.0})
    (tmp_path / "metrics.jsonl").rmdir()
    (tmp_path / "aside").rename(tmp_path / "metrics.jsonl")
    logger.log(3, {"loss": 3.0})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_short_write_leaves_no_half_line(tmp_path):
    class Short(io.FileIO):
        def write(self, content):
            return super().write(content[:5])

    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"whole\n")
    logger = start(JsonlLogger(), tmp_path / "elsewhere")
    with Short(str(path), "ab") as file, pytest.raises(OSError, match="no space"):
        logger._append(file, b"a long line\n")
    assert path.read_bytes() == b"whole\n"


class Broken(Logger):
    calls = 0

    def log(self, step, values):
        self.calls += 1
        raise RuntimeError("the server is gone")


def test_a_failing_logger_is_reported_then_dropped_and_stops_nobody(tmp_path, capsys):
    broken, jsonl = Broken(), JsonlLogger()
    loggers = start(Loggers([broken, jsonl]), tmp_path)
    for step in range(1, 20):
        loggers.log(step, {"loss": 1.0})
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 20))
    assert broken.calls == GIVE_UP_AFTER
    assert "the server is gone" in capsys.readouterr().err


def test_console_writes_plain_lines_into_a_pipe():
    stream = io.StringIO()
    logger = start(ConsoleLogger(stream), None)
    logger.advance(10)
    logger.log(10, {"loss": 3.21987, "lr": 3e-4, "tokens": 81920, "eta_seconds": 3725.0, "grad_norm/layers.0": 1.0})
    assert stream.getvalue() == "step 10/100  loss 3.2199  lr 3.00e-04  tokens 81.9k  eta 1:02:05\n"


def test_console_shows_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    logger = start(ConsoleLogger(stream), None, step=40)
    logger.advance(50)
    assert logger.bar.n == 50
    logger.log(50, {"loss": 1.0})
    logger.close()
    assert "50/100" in stream.getvalue()
    assert "step 50/100  loss 1\n" in stream.getvalue()


def test_readable_figures():
    assert readable("mfu", 0.4123) == "41.2%"
    assert readable("tokens", 123_456_789) == "123M"
    assert readable("tokens_per_second", 136_612.7) == "137k"
    assert readable("loss", 10.5) == "10.5"


def test_wandb_without_a_login_is_offline_and_keeps_its_id(tmp_path, monkeypatch, capsys):
    calls = []

    class Run:
        def define_metric(self, *args, **kwargs):
            pass

        def log(self, values):
            calls.append(values)

        def finish(self):
            pass

    class FakeWandb:
        @staticmethod
        def init(**kwargs):
            calls.append(kwargs)
            return Run()

        @staticmethod
        def Settings(**kwargs):
            return kwargs

    monkeypatch.setitem(sys.modules, "wandb", FakeWandb)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for step in (0, 20):
        logger = start(WandbLogger(), tmp_path, step=step)
        logger.log(step + 10, {"loss": 1.0})
        logger.close()
    assert calls[0]["mode"] == "offline"
    assert calls[0]["id"] == calls[2]["id"]
    assert calls[3] == {"step": 30, "loss": 1.0}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2  # each start says once where the data are and how to send them
    assert said[0].endswith(f"writes to {tmp_path}/wandb; send it: wandb sync {tmp_path}/wandb/offline-run-*")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("MIXLAB_SWEEP", "mixers")
    start(WandbLogger(), tmp_path)
    assert calls[4]["mode"] == "online"
    assert [calls[i]["group"] for i in (0, 2, 4)] == [None, None, "mixers"]
    assert capsys.readouterr().err == ""
