"""Checkpoints: atomic, hashed, passed over when damaged; the train state in them; the lock on the folder."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from llm import checkpoint as module
from llm.checkpoint import Checkpoints, DamagedCheckpoint, Snapshot, load_checkpoint, load_weights, verify
from llm.compose import compose
from llm.config import CheckpointConfig
from llm.errors import UserError
from llm.runfolder import RunFolder, read_config
from llm.runlock import LOCK_FILE, RunLock
from llm.state import (
    TrainState,
    check_initial_weights,
    load_initial_weights,
    load_model_tensors,
    model_tensors,
    rng_tensors,
)


def snapshot(step, *, val_loss=None):
    fill = float(step)
    return Snapshot(
        model={f"layers.{i}.weight": torch.full((4, 4), fill + i) for i in range(3)},
        optimizer={"exp_avg/layers.0.weight": torch.full((4, 4), fill)},
        rng={"rank0.torch": torch.get_rng_state()},
        state={"step": step, "tokens": step * 100, "data": {"row": step}, "val_loss": val_loss},
    )


def save(run_dir, *steps, keep=10):
    checkpoints = Checkpoints(run_dir)
    for step in steps:
        checkpoints.save(snapshot(step), CheckpointConfig(keep=keep))
    return checkpoints


def test_round_trip_and_the_newest_is_loaded(tmp_path):
    checkpoints = save(tmp_path, 5, 10)
    loaded = checkpoints.load_newest()
    assert loaded.state == snapshot(10).state
    for group in ("model", "optimizer", "rng"):
        for name, tensor in getattr(snapshot(10), group).items():
            assert torch.equal(getattr(loaded, group)[name], tensor)
    assert load_weights(checkpoints.path(5)).keys() == snapshot(5).model.keys()
    assert Checkpoints(tmp_path / "elsewhere").load_newest() is None


def test_whole_tensors_are_spread_over_parts(tmp_path):
    checkpoints = Checkpoints(tmp_path, part_bytes=100)
    path = checkpoints.save(snapshot(1), CheckpointConfig(keep=1))
    assert sorted(p.name for p in path.glob("model*")) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert set(load_file(path / "model-00002-of-00003.safetensors")) == {"layers.1.weight"}
    assert checkpoints.load_newest().model.keys() == snapshot(1).model.keys()


def test_only_the_newest_are_kept(tmp_path):
    assert save(tmp_path, 1, 2, 3, 4, keep=2).steps() == [3, 4]


def test_every_nth_and_the_best_are_kept_too(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    config = CheckpointConfig(keep=1, keep_every=4, keep_best=True)
    for step, val_loss in enumerate([9.0, 3.0, None, 5.0, 4.0, None, 3.5], 1):
        checkpoints.save(snapshot(step, val_loss=val_loss), config)
    assert checkpoints.steps() == [2, 4, 7]


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped bit": lambda p: flip(p / "model.safetensors"),
    "truncated": lambda p: os.truncate(p / "optimizer.safetensors", 10),
    "missing file": lambda p: (p / "rng.safetensors").unlink(),
    "no manifest": lambda p: (p / "manifest.json").unlink(),
    "empty manifest": lambda p: (p / "manifest.json").write_text(""),
    "manifest of another kind": lambda p: (p / "manifest.json").write_text('{"format": 1, "files": {"a": 3}}'),
    "state altered": lambda p: flip(p / "state.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, capsys, damage):
    checkpoints = save(tmp_path, 5, 10)
    DAMAGE[damage](checkpoints.path(10))
    assert checkpoints.load_newest().step == 5
    assert "step_00000010" in capsys.readouterr().err
    DAMAGE[damage](checkpoints.path(5))
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        checkpoints.load_newest()


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path):
    checkpoints = save(tmp_path, 5, 10)
    flip(checkpoints.path(10) / "model.safetensors")
    checkpoints.save(snapshot(10), CheckpointConfig(keep=2))
    assert checkpoints.load_newest().step == 10


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b", ".hidden", "..", ""])
def test_a_manifest_cannot_name_files_elsewhere(tmp_path, name):
    folder = save(tmp_path, 5).path(5)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["state.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpoint, match="not a file of this folder"):
        verify(folder)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    folder = save(tmp_path, 5).path(5)
    (folder / "state.json").rename(tmp_path / "outside.json")
    (folder / "state.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(DamagedCheckpoint, match="missing"):
        load_checkpoint(folder)


def test_a_full_disk_costs_no_earlier_checkpoint(tmp_path, monkeypatch):
    checkpoints = save(tmp_path, 1, 2, keep=2)

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_file", full)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(snapshot(3), CheckpointConfig(keep=1))
    assert checkpoints.steps() == [1, 2]
    assert not list(checkpoints.folder.glob(".tmp-*"))
    assert checkpoints.load_newest().step == 2


def test_nothing_is_pruned_before_the_newer_one_verifies(tmp_path, monkeypatch):
    checkpoints = save(tmp_path, 1)

    def bad_disk(folder):
        raise DamagedCheckpoint("read back differently")

    monkeypatch.setattr(module, "verify", bad_disk)
    with pytest.raises(DamagedCheckpoint):
        checkpoints.save(snapshot(2), CheckpointConfig(keep=1))
    monkeypatch.undo()
    assert checkpoints.steps() == [1, 2]


KILLED_AT = {
    "module._save_tensors": 3,
    "module.sha256": 8,
    "module.os.rename": 2,
    "module.shutil.rmtree": 5,
    "module.verify": 1,
}


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step again"])
@pytest.mark.parametrize(("function", "calls"), KILLED_AT.items())
def test_a_kill_while_saving_leaves_a_good_checkpoint(tmp_path, function, calls, again):
    """SIGKILL at the n-th call of a function that saving goes through, for each n; before, the folder has step 1."""
    for call in range(1, calls + 1):
        checkpoints = save(tmp_path / str(call), 1)
        if killed_in_save(checkpoints, snapshot(1 if again else 2), function, call):
            checkpoints.recover()
            assert all(verify(checkpoints.path(step)) for step in checkpoints.steps())
            assert checkpoints.load_newest().step in (1, 2)
        checkpoints.save(snapshot(3), CheckpointConfig(keep=1))
        assert [p.name for p in checkpoints.folder.iterdir()] == ["step_00000003"]


def killed_in_save(checkpoints, shot, function, call):
    """Save in a process of its own that is killed at the `call`-th call of `function`; False if it never came there."""
    child = os.fork()
    if child == 0:
        owner = eval(function.rpartition(".")[0], {"module": module})
        name, calls = function.rpartition(".")[2], 0
        original = getattr(owner, name)

        def killer(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, killer)
        checkpoints.save(shot, CheckpointConfig(keep=1))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embeddings.weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("derived", torch.arange(3.0), persistent=False)

    @property
    def head_weight(self):
        return self.head.weight

    def loss(self):
        dropped = torch.nn.functional.dropout(self.layer(self.embeddings.weight), 0.5)
        return self.head(dropped).square().sum() * (random.random() + np.random.rand())


def tied_state(seed):
    torch.manual_seed(seed)
    model = Tied()
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def take_steps(state, steps):
    for _ in range(steps):
        loss = state.model.loss()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.window.add(loss=loss)
        state.step += 1


def test_state_goes_on_bit_for_bit_with_random_numbers_and_window(tmp_path):
    state = tied_state(0)
    take_steps(state, 3)
    Checkpoints(tmp_path).save(state.capture([rng_tensors()]), CheckpointConfig(keep=1))
    take_steps(state, 2)

    other = tied_state(1)
    random.seed(5)
    np.random.seed(5)
    other.restore(Checkpoints(tmp_path).load_newest(), rank=0)
    take_steps(other, 2)
    assert other.step == 5
    assert other.window.state_dict() == state.window.state_dict()
    for name, tensor in state.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name


def test_a_snapshot_does_not_follow_later_steps():
    state = tied_state(0)
    take_steps(state, 1)
    shot = state.capture([rng_tensors()])
    before = {name: tensor.clone() for name, tensor in shot.model.items()}
    take_steps(state, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in shot.model.items())


def test_tied_parameters_are_stored_once():
    names = set(model_tensors(Tied()))
    assert names == {"embeddings.weight", "layer.weight", "layer.bias", "kept"}


def test_a_model_that_does_not_fit_is_named():
    tensors = model_tensors(Tied())
    with pytest.raises(UserError, match=r"the checkpoint lacks layer\.bias"):
        load_model_tensors(Tied(), {k: v for k, v in tensors.items() if k != "layer.bias"})
    with pytest.raises(UserError, match=r"the model has no extra"):
        load_model_tensors(Tied(), {**tensors, "extra": torch.zeros(1)})
    with pytest.raises(UserError, match=r"layer\.bias is \[9\] there and \[4\] here"):
        load_model_tensors(Tied(), {**tensors, "layer.bias": torch.zeros(9)})


def test_initial_weights_of_another_run(tmp_path):
    state = tied_state(0)
    for _ in range(2):
        Checkpoints(tmp_path).save(state.capture([rng_tensors()]), CheckpointConfig(keep=2))
        take_steps(state, 1)
    fresh = tied_state(1).model
    load_initial_weights(fresh, f"{tmp_path}@1")
    assert torch.equal(fresh.layer.weight, load_weights(Checkpoints(tmp_path).path(1))["layer.weight"])
    load_initial_weights(fresh, f"{tmp_path}@0")
    assert torch.equal(fresh.layer.weight, load_weights(Checkpoints(tmp_path).path(0))["layer.weight"])
    with pytest.raises(UserError, match=r"no step 7.*\[0, 1\]"):
        check_initial_weights(f"{tmp_path}@7")
    with pytest.raises(UserError, match="has no checkpoint"):
        check_initial_weights(str(tmp_path / "nothing"))
    assert check_initial_weights(str(tmp_path)) == Checkpoints(tmp_path).path(1)
    (Checkpoints(tmp_path).path(1) / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"missing\. Give another one as .*@STEP: the other steps are 0\.$"):
        load_initial_weights(fresh, str(tmp_path))


HOLD_THE_LOCK = """
    import os, sys, time
    from pathlib import Path
    from llm.runlock import RunLock
    RunLock(Path(sys.argv[1])).acquire()
    if os.fork() == 0:  # a data worker that outlives its trainer
        time.sleep(20)
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_in_use_is_refused_and_a_crash_frees_it(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(HOLD_THE_LOCK), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid}"):
            RunLock(tmp_path).acquire()
        holder.kill()
        holder.wait()
        lock = RunLock(tmp_path)
        lock.acquire()
        os.killpg(holder.pid, signal.SIGKILL)
    with pytest.raises(UserError, match="this very process"):
        RunLock(tmp_path).acquire()
    lock.release()
    RunLock(tmp_path).acquire()


def test_without_locks_in_the_file_system_a_dead_owner_loses_it(tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("llm.runlock.fcntl.lockf", unsupported)
    done = subprocess.Popen(["true"])
    done.wait()
    host = os.uname().nodename
    for owner, refused in (
        ({"host": host, "pid": done.pid}, False),
        ({"host": host, "pid": os.getppid()}, True),
        ({"host": "another", "pid": done.pid}, True),
    ):
        (tmp_path / LOCK_FILE).write_text(json.dumps(owner))
        lock = RunLock(tmp_path)
        if refused:
            with pytest.raises(UserError, match=f"in use by process {owner['pid']} on {owner['host']}"):
                lock.acquire()
        else:
            lock.acquire()
            lock.release()


def config(*overrides):
    return compose(["mixer=gdn", *overrides])


def test_another_run_in_the_folder_is_refused_by_key(tmp_path):
    RunFolder.open(tmp_path / "run", config()).close()
    with pytest.raises(UserError, match=r"holds another run: optim\.lr: 0\.001 -> 0\.2\."):
        RunFolder.open(tmp_path / "run", config("optim.lr=0.2"))
    RunFolder.open(tmp_path / "run", config("stop_after=3", "eval.every=7", "logger=jsonl")).close()
    assert read_config(tmp_path / "run").stop_after == 3
    starts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert len(starts) == 2
    assert starts[0]["packages"]["torch"] == torch.__version__


def test_resume_choices(tmp_path):
    with pytest.raises(UserError, match=r"resume=must.*no checkpoint"):
        RunFolder.open(tmp_path / "run", config("resume=must"))
    assert not (tmp_path / "run").exists()
    RunFolder.open(tmp_path / "run", config("resume=never")).close()
    with pytest.raises(UserError, match="resume=never"):
        RunFolder.open(tmp_path / "run", config("resume=never"))
    with pytest.raises(UserError, match="resume=maybe"):
        RunFolder.open(tmp_path / "run", config("resume=maybe"))


def test_an_unreadable_config_is_named(tmp_path):
    for text in ("", "[1, 2", "schema_version: 99", "schema_version: 1\nsteps: many", "schema_version: 1\nsteppes: 3"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=r"config\.yaml"):
            read_config(tmp_path)
