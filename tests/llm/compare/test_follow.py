from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import time

import pytest

from llm.compare import follow as module
from llm.compare.follow import HIDE_CURSOR, SHOW_CURSOR, Watch, follow


def lock(folder, *, pid, host=None):
    owner = {"host": host or socket.gethostname(), "pid": pid, "since": "today"}
    (folder / "run.lock").write_text(json.dumps(owner))


def states(*paths):
    return {status.line[0]: status.state for status in Watch(paths).look(time.time())}


@pytest.fixture
def dead_pid():
    """The id of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_state_of_every_run(make_folder, tmp_path, dead_pid):
    make_folder(seed=1, name="done")
    for name in ("stopped", "working", "silent", "away", "killed"):
        make_folder(seed=2, steps=100, name=name)
    for name in ("beginning", "empty", "broken"):
        (make_folder(seed=3, name=name) / "metrics.jsonl").unlink()
    runs = tmp_path / "runs"
    for name in ("working", "silent", "beginning"):
        lock(runs / name, pid=os.getppid())
    lock(runs / "away", pid=1, host="another")
    lock(runs / "killed", pid=dead_pid)
    (runs / "stopped" / "run.lock").write_text("")
    (runs / "broken" / "config.yaml").unlink()
    before = time.time() - 3600
    os.utime(runs / "silent" / "metrics.jsonl", (before, before))
    found = states(runs)
    assert found.pop("killed").startswith(f"died: process {dead_pid} on ")
    assert found == {
        "done": "finished",
        "stopped": "stopped",
        "working": "running",
        "silent": "running? no line for 1h",
        "away": "running",
        "beginning": "starting",
        "empty": "unreadable: no step is logged yet",
        "broken": "unreadable: it has no config.yaml",
    }


def test_jobs_of_a_sweep_that_wait_are_shown(make_folder, tmp_path):
    done = make_folder(seed=1)
    jobs = [
        {"run_dir": f"../runs/{name}", "words": ["x"], "values": {"seed": seed}, "status": status}
        for name, seed, status in ((done.name, "1", "done"), ("later", "2", "waiting"))
    ]
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "sweep.json").write_text(json.dumps({"schema_version": 1, "jobs": jobs}))
    assert states(sweep) == {done.name: "finished", "later": "no run; job 'seed=2' waiting"}


def test_a_line_has_step_losses_speed_and_time_left(make_folder):
    folder = make_folder(steps=150)
    lock(folder, pid=os.getppid())
    (status,) = Watch([folder]).look(time.time())
    name, seed, state, step, loss, val_loss, speed, left, age = status.line
    assert (name, seed, state, step, speed, left) == ("gdn-1", "1", "running", "150/200", "100,000", "0:00:50")
    assert float(loss) == pytest.approx(float(val_loss) - 0.05, abs=1e-3)
    assert age.endswith("s ago")


def test_a_pipe_gets_the_table_once_and_then_what_changes(make_folder, monkeypatch):
    folder = make_folder(steps=100)
    other = make_folder(seed=2, steps=100)
    stream, turns = io.StringIO(), []

    def sleep(_: float) -> None:
        turns.append(stream.getvalue())
        if len(turns) == 2:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write('{"step": 200, "loss": 1.0}\n')
        if len(turns) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.time, "sleep", sleep)
    assert follow([folder.parent], stream=stream) == 0
    assert "2 stopped" in turns[0]
    assert other.name in turns[0]
    assert turns[1] == turns[0]  # nothing happened, nothing said
    news = turns[2][len(turns[1]) :]
    assert news.startswith("gdn-1  1  finished  200/200  1.0000")
    assert news.count("\n") == 1


def test_a_terminal_is_redrawn_within_its_size_and_gets_its_cursor_back(make_folder, monkeypatch):
    for seed in range(40):
        folder = make_folder(seed=seed, name=f"a-long-name-{seed:02}-" + "x" * 60)
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(module.shutil, "get_terminal_size", lambda: os.terminal_size((90, 10)))
    assert follow([folder.parent], once=True, stream=stream) == 0
    text = stream.getvalue()
    assert text.startswith(HIDE_CURSOR)
    assert text.endswith(SHOW_CURSOR)
    lines = text.removeprefix(HIDE_CURSOR + module.CLEAR).removesuffix(SHOW_CURSOR).splitlines()
    assert len(lines) < 10
    assert max(map(len, lines)) <= 90
    assert all(line.endswith("s ago") for line in lines[4:])  # names give way, not what happens


def test_metrics_that_did_not_change_are_not_read_again(make_folder, monkeypatch):
    folder = make_folder()
    watch, reads = Watch([folder]), []
    real = module.read_run
    monkeypatch.setattr(module, "read_run", lambda path: reads.append(path) or real(path))
    watch.look(time.time())
    watch.look(time.time())
    assert reads == [folder]
