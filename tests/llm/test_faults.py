"""Numbers that are not finite, disks that fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file

from llm.checkpoint import Checkpoints
from llm.errors import UserError
from llm.guard import NonFiniteError, SpikeDetector
from llm.runs_equal import metrics_of
from llm.stopping import Outcome

STEPS = 8  # of a small run


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_number_that_is_not_finite_stops_before_it_is_saved(words, tmp_path, where, make_trainer, at):
    trainer = make_trainer(words("run", "checkpoint.every=2", "eval.every=0"))
    weight = trainer.model.embeddings.weight

    def poison():
        if where == "loss":
            weight.data[:] = torch.nan
        else:
            weight.register_hook(lambda grad: grad * torch.inf)

    trainer.loggers.loggers.append(at(2, poison))
    with pytest.raises(NonFiniteError, match=r"step 3 is not finite.*on_nonfinite=raise"):
        trainer.fit()
    assert Checkpoints(tmp_path / "run").steps() == [2]


@pytest.fixture
def poisoned_trainer(make_trainer):
    """(words, *bad_steps, times=1): the gradient is not finite in `bad_steps`, the first few times it gets there."""

    def make(words, *bad_steps, times=1):
        trainer, left = make_trainer(words), dict.fromkeys(bad_steps, times * 2)  # two micro-batches a step

        def poison(grad):
            step = trainer.state.step + 1
            left[step] = left.get(step, 0) - 1
            return grad * torch.nan if left[step] >= 0 else grad

        trainer.model.embeddings.weight.register_hook(poison)
        return trainer

    return make


def test_a_skipped_step_leaves_the_weights_and_uses_up_its_data(
    poisoned_trainer, words, train, tmp_path, capsys, make_trainer, assert_same_run
):
    command = words("run", "on_nonfinite=skip", "log_every=1", "checkpoint.every=1", "checkpoint.keep=9")
    poisoned_trainer([*command, "stop_after=5"], 4).fit()
    make_trainer(command).fit()
    before, after = (load_file(Checkpoints(tmp_path / "run").path(s) / "model.safetensors") for s in (3, 4))
    assert all(torch.equal(before[name], after[name]) for name in before)
    lines = metrics_of(tmp_path / "run")
    assert [line["tokens"] for line in lines] == [128 * n for n in (1, 2, 3, 3, 4, 5, 6, 7)]
    assert lines[3]["skipped_steps"] == 1
    assert not {"loss", "grad_norm"} & lines[3].keys()
    assert Checkpoints(tmp_path / "run").load_newest().state["data"]["row"] == 4 * STEPS
    rows = load_file(tmp_path / "run" / "nonfinite" / "step_00000004_rank_0.safetensors")
    assert rows["tokens"].shape == (4, 32)
    assert "step 4 was not finite" in capsys.readouterr().err

    poisoned_trainer([w.replace("/run", "/again") for w in command], 4).fit()
    assert_same_run(tmp_path / "run", tmp_path / "again")


def test_a_rollback_goes_on_behind_the_bad_data(poisoned_trainer, words, tmp_path):
    trainer = poisoned_trainer(words("run", "on_nonfinite=rollback", "log_every=1", "checkpoint.every=3"), 5)
    assert trainer.fit().outcome is Outcome.FINISHED
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "no step is there twice"
    assert lines[3]["skipped_steps"] == 1
    wasted = 2  # step 4 of the first time, and the bad step 5
    assert Checkpoints(tmp_path / "run").load_newest().state["data"]["row"] == 4 * (STEPS + wasted)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_bad_steps_without_end_are_an_error(poisoned_trainer, words, policy):
    command = words("run", f"on_nonfinite={policy}", "max_skips=2", "checkpoint.every=2")
    trainer = poisoned_trainer(command, *range(4, 9), times=9)
    with pytest.raises(NonFiniteError, match="for the 3th time in a row"):
        trainer.fit()


def test_a_loss_spike_is_noticed_and_survives_json():
    detector = SpikeDetector(torch.device("cpu"), warmup=20)
    losses = 3 + 0.01 * torch.randn(60, generator=torch.Generator().manual_seed(0))
    losses[[30, 45]] = torch.tensor([9.0, torch.inf])
    found = []
    for step, loss in enumerate(losses):
        if step == 40:
            state = json.loads(json.dumps(detector.state_dict()))
            detector = SpikeDetector(torch.device("cpu"), warmup=20)
            detector.load_state_dict(state)
        if detector.is_spike(loss):
            found.append(step)
    assert found == [30, 45]


def test_a_disk_that_refuses_a_checkpoint_does_not_stop_training(words, tmp_path, capsys, monkeypatch, make_trainer):
    trainer = make_trainer(words("run"))
    original, refused = Checkpoints.save, []

    def save(self, snapshot, config):
        if not refused:
            refused.append(snapshot.step)
            raise OSError(28, "No space left on device")
        return original(self, snapshot, config)

    monkeypatch.setattr(Checkpoints, "save", save)
    assert trainer.fit().outcome is Outcome.FINISHED
    assert refused == [3]
    assert Checkpoints(tmp_path / "run").steps() == [6, 8]
    assert "WARNING: step 3 could not be saved" in capsys.readouterr().err


FULL = """
    import resource, sys
    from llm.compose import compose
    from llm.session import train

    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # bytes of a file
    sys.exit(train(compose(sys.argv[1:])))
"""


def test_writes_that_the_system_refuses_are_survived_and_tried_again(words, train, whole, tmp_path, assert_same_run):
    """No file may grow beyond a size that a line of metrics does not need and a checkpoint does."""
    command = [sys.executable, "-c", textwrap.dedent(FULL), *words("run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == Outcome.UNSAVED.exit_code, done.stderr[-2000:]
    assert "WARNING: step 3 could not be saved" in done.stderr
    assert "WARNING: step 8 could not be saved" in done.stderr
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 3, 4, 6, 8], "training went on"
    assert not list((tmp_path / "run" / "checkpoints").iterdir()), "nothing half done is left"
    train("run")
    assert_same_run(whole, tmp_path / "run")


def test_a_folder_that_turns_read_only_does_not_stop_training(words, make_trainer, at, tmp_path, capsys):
    """/sys lets nobody make a folder, not even root."""
    trainer = make_trainer(words("run", "checkpoint.keep=9"))
    checkpoints, aside = tmp_path / "run" / "checkpoints", tmp_path / "aside"

    def read_only():
        trainer.saver.wait()
        checkpoints.rename(aside)
        checkpoints.symlink_to("/sys/kernel")

    def writable():
        trainer.saver.wait()
        checkpoints.unlink()
        aside.rename(checkpoints)

    trainer.loggers.loggers += [at(5, read_only), at(7, writable)]
    assert trainer.fit().outcome is Outcome.FINISHED
    assert "WARNING: step 6 could not be saved" in capsys.readouterr().err
    assert Checkpoints(tmp_path / "run").steps() == [3, 8]


def test_a_run_cannot_begin_where_nothing_can_be_written(words, train, make_trainer):
    with pytest.raises(UserError, match=r"run_dir=/sys/kernel/run: cannot be created"):
        make_trainer(["run_dir=/sys/kernel/run", *words("run")[1:]])


def test_a_folder_that_vanishes_is_made_again(words, train, tmp_path, make_trainer, at):
    trainer = make_trainer(words("run"))
    trainer.loggers.loggers.append(at(4, lambda: (trainer.saver.wait(), shutil.rmtree(tmp_path / "run"))))
    assert trainer.fit().outcome is Outcome.FINISHED
    assert Checkpoints(tmp_path / "run").steps() == [6, 8]
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [4, 6, 8]
    assert train("run").step == STEPS


def test_a_run_whose_end_cannot_be_saved_says_so(words, monkeypatch, make_trainer):
    trainer = make_trainer(words("run"))

    def save(self, snapshot, config):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "save", save)
    assert trainer.fit().outcome.exit_code == 74


def test_the_folder_is_free_again_whatever_happened(words, train, capsys, make_trainer):
    trainer = make_trainer(words("run", f"init_from={words('nothing')[0][8:]}"))
    with pytest.raises(UserError, match="has no checkpoint"):
        trainer.fit()
    assert "failed" not in capsys.readouterr().err, "nothing goes wrong on the way out"
    with pytest.raises(UserError, match="holds another run"):
        train("run")
