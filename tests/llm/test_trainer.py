"""Training: bitwise resume, one loss curve whatever the accumulation, stops, faults."""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llm.build import build_leaf, build_model
from llm.checkpoint import Checkpoints
from llm.compose import compose, groups
from llm.data import training_rows, validation_sets
from llm.errors import UserError
from llm.guard import NonFiniteError, SpikeDetector
from llm.loggers import Logger
from llm.optim import build_optimizer
from llm.parallel import build_accelerator
from llm.plan import StepPlan
from llm.runfolder import open_run
from llm.runs_equal import differences_of_runs, metrics_of
from llm.stopping import Outcome, StopSignals, WallTime, parse_duration
from llm.tokenizer import load_tokenizer
from llm.trainer import Trainer

STEPS = 8


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of short documents; every tenth goes to validation by its path."""
    folder = tmp_path_factory.mktemp("text")
    documents = [f"Chapter {i}. " + " ".join(f"word{(i * 7 + j) % 23}" for j in range(5 + i % 11)) for i in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    (folder / "val.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents[::10]))
    return folder


compose_once = functools.cache(compose)  # composing takes longer than these runs do


def make_trainer(words, loggers=()):
    """A trainer from the words of a command line."""
    run_dir, *rest = words
    config = copy.deepcopy(compose_once(tuple(rest)))
    config.run_dir = run_dir.removeprefix("run_dir=")
    accelerator = build_accelerator(config)
    run = open_run(config, main=accelerator.is_main_process)
    tokenizer = load_tokenizer(config.tokenizer.path)
    model = build_model(config, len(tokenizer))
    optimizer = build_optimizer(config.optim, model, build_leaf)
    source = build_leaf("data.source", config.data.source)
    rows = training_rows(config.data, source, tokenizer, config.context)
    validation = validation_sets(config.data, source, tokenizer, config.context)
    return Trainer(config, model, optimizer, rows, validation, loggers, run, accelerator)


SMALL = [
    "mixer=gdn", "model=tiny", "model.d_model=32", "model.n_layers=2", "model.head_dim=16", "model.linear_head_dim=16",
    "model.parameters=30000", "model.tie_embeddings=true", "logger=jsonl", "data=local", "data.mode=memory",
    "context=32", "batch_tokens=128", "micro_batch=2", f"steps={STEPS}", "log_every=3", "eval.every=4",
    "checkpoint.every=3", "schedule.warmup=2", "optim.lr=0.01",
]  # fmt: skip


def command_line(run_dir, text, *overrides):
    """The words of a small run."""
    keys = {word.split("=")[0] for word in overrides}
    defaults = [word for word in SMALL if word.split("=")[0] not in keys]
    data = [f"data.path={text}/train.jsonl", f"data.validation_path={text}/val.jsonl"]
    return [f"run_dir={run_dir}", *data, *defaults, *overrides]


@pytest.fixture
def words(text, tmp_path):
    """words(name, *overrides): the command line of a small run in tmp_path/name."""
    return lambda name, *overrides: command_line(tmp_path / name, text, *overrides)


@pytest.fixture
def train(words):
    """train(name, *overrides, loggers=()): run it, and return the summary."""
    return lambda name, *overrides, loggers=(): make_trainer(words(name, *overrides), loggers).fit()


@pytest.fixture(scope="session")
def whole(text, tmp_path_factory):
    """The folder of an undisturbed run with the settings that the tests have."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    make_trainer(command_line(run_dir, text)).fit()
    return run_dir


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, optimizer, random generators, data position and metrics are bitwise the same."""
    assert not differences_of_runs(one, other)


def assert_same_curve(run, other):
    """Equal but for the order of float additions; accuracy is left out, since it jumps when one prediction flips."""
    one, two = ([{k: v for k, v in x.items() if k != "val_accuracy"} for x in metrics_of(f)] for f in (run, other))
    assert len(one) == len(two)
    for line, expected in zip(two, one, strict=True):
        assert line == pytest.approx(expected, rel=2e-4)


def test_a_whole_run(train, tmp_path):
    summary = train("run")
    assert (summary.outcome, summary.step, summary.outcome.exit_code) == (Outcome.FINISHED, STEPS, 0)
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 3, 4, 6, 8]
    training = {"loss", "lr", "grad_norm", "tokens", "data_tokens", "data_epochs"}
    validation = {"val_loss", "val_perplexity", "val_accuracy"}
    assert [line.keys() - {"step"} for line in lines] == [
        training, training, validation, training, training | validation
    ]  # fmt: skip
    assert lines[0]["lr"] == 0.005
    assert lines[3]["tokens"] == 6 * 128
    assert lines[-1]["val_loss"] < lines[2]["val_loss"] < lines[0]["loss"]
    assert summary.values["val_loss"] == lines[-1]["val_loss"]
    assert Checkpoints(tmp_path / "run").steps() == [6, 8]


@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_resume_is_bitwise(train, whole, tmp_path, stop):
    """In warm-up, at and between lines of metrics, validations and checkpoints."""
    summary = train("parts", f"stop_after={stop}")
    assert (summary.outcome, summary.step) == (Outcome.STOPPED, stop)
    assert train("parts", "eval.max_rows=null").outcome is Outcome.FINISHED
    assert_same_run(whole, tmp_path / "parts")


@pytest.mark.parametrize("mixer", groups()["mixer"])
def test_resume_is_bitwise_for_every_mixer(train, tmp_path, mixer):
    train("whole", f"mixer={mixer}", "steps=4")
    train("parts", f"mixer={mixer}", "steps=4", "stop_after=2")
    train("parts", f"mixer={mixer}", "steps=4")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_probes_are_lines_of_their_own_and_change_nothing(train, whole, tmp_path):
    stop = [At(4, lambda: os.kill(os.getpid(), signal.SIGTERM))]
    train("parts", "probe_every=2", loggers=stop)
    train("parts", "probe_every=2")
    lines = {line["step"]: line for line in metrics_of(tmp_path / "parts")}
    assert [step for step, line in lines.items() if "grad_norm/layers.0" in line] == [2, 4, 6, 8]
    plain = {line["step"]: line for line in metrics_of(whole)}
    without = {s: {k: v for k, v in line.items() if "/" not in k} for s, line in lines.items()}
    assert {step: without[step] for step in plain} == plain


@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_resume_is_bitwise_with_workers_and_across_epochs(train, tmp_path, mode):
    settings = [f"data.mode={mode}", "data.streams=4", "batch_tokens=256", "steps=12", "log_every=1"]
    train("whole", *settings, "data.workers=0")
    assert metrics_of(tmp_path / "whole")[-1]["data_epochs"] > 1.5
    train("parts", *settings, "data.workers=2", "stop_after=7")
    train("parts", *settings, "data.workers=1")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_lost_part_is_done_again(train, whole, tmp_path):
    """As after a power cut: metrics are ahead of the newest whole checkpoint, which is damaged."""
    train("parts", "stop_after=7", "checkpoint.keep=3")
    newest = Checkpoints(tmp_path / "parts").path(7)
    (newest / "model.safetensors").write_bytes(b"")
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    train("parts")
    assert_same_run(whole, tmp_path / "parts")


def test_a_finished_run_is_left_alone(train, tmp_path):
    first = train("run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again = train("run", "resume=must")
    assert (again.outcome, again.step, again.values) == (first.outcome, first.step, first.values)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_accumulation_does_not_change_the_curve(train, tmp_path):
    for micro_batch in (4, 2, 1):
        train(f"micro{micro_batch}", f"micro_batch={micro_batch}", "log_every=1")
        assert_same_curve(tmp_path / "micro4", tmp_path / f"micro{micro_batch}")


@pytest.mark.slow
def test_two_ranks_are_one_rank_with_accumulation(train, words, tmp_path):
    """Five steps on two ranks and the rest on one, and the other way round, against one rank all the way."""
    train("one", "log_every=1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    subprocess.run([*torchrun, *words("two_one", "log_every=1", "stop_after=5")], check=True, timeout=300)
    assert len(load_file(Checkpoints(tmp_path / "two_one").path(5) / "rng.safetensors")) == 10, "two ranks' generators"
    train("two_one", "log_every=1")
    train("one_two", "log_every=1", "stop_after=5")
    subprocess.run([*torchrun, *words("one_two", "log_every=1")], check=True, timeout=300)
    for other in ("two_one", "one_two"):
        assert_same_curve(tmp_path / "one", tmp_path / other)


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["hybrid_gdn_1to1", "hybrid_kda_1to1", "gla"])
def test_resume_is_bitwise_on_a_gpu(words, tmp_path, mixer):
    """bf16 autocast, Triton where there is one, checkpoints copied beside training, deterministic algorithms."""
    settings = ["deterministic=true", "checkpoint.every=1", f"mixer={mixer}", "model.head_dim=64", "model.d_model=128"]
    settings += ["model.linear_head_dim=64", "context=256", "batch_tokens=2048", "model.parameters=400000"]
    for name, stop in (("whole", "null"), ("parts", "5"), ("parts", "null")):
        command = [sys.executable, "-m", "llm.train", *words(name, *settings, f"stop_after={stop}")]
        subprocess.run(command, check=True, timeout=300)
    assert metrics_of(tmp_path / "whole")[-1]["loss"] < metrics_of(tmp_path / "whole")[0]["loss"]
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_weights_of_another_run(train, tmp_path):
    train("first", "checkpoint.keep=9")
    first = load_file(Checkpoints(tmp_path / "first").path(3) / "model.safetensors")
    train("second", f"init_from='{tmp_path}/first@3'", "optim.lr=0.0")
    second = load_file(Checkpoints(tmp_path / "second").path(STEPS) / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


class At(Logger):
    """Calls something at a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def advance(self, step):
        if step == self.step:
            self.action()


@pytest.mark.parametrize(
    ("number", "outcome", "code"),
    [
        (signal.SIGTERM, Outcome.PREEMPTED, 75),
        (signal.SIGUSR1, Outcome.PREEMPTED, 75),
        (signal.SIGINT, Outcome.INTERRUPTED, 130),
    ],
)
def test_a_signal_saves_and_stops_at_the_step(train, whole, tmp_path, number, outcome, code):
    summary = train("parts", loggers=[At(5, lambda: os.kill(os.getpid(), number))])
    assert (summary.outcome, summary.step, summary.outcome.exit_code) == (outcome, 5, code)
    train("parts")
    assert_same_run(whole, tmp_path / "parts")


@pytest.mark.parametrize("step", [4, STEPS])
def test_a_signal_in_validation_stops_it_and_it_is_done_again(train, whole, tmp_path, step):
    summary = train("parts", loggers=[At(step, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert (summary.outcome, summary.step) == (Outcome.PREEMPTED, step)
    assert metrics_of(tmp_path / "parts")[-1]["step"] < step
    train("parts")
    assert_same_run(whole, tmp_path / "parts")


def test_a_crash_after_a_validation_was_done_again(train, whole, tmp_path):
    """The checkpoint is from before the validation; its line of metrics must not be there twice in the end."""

    def crash():
        raise KeyboardInterrupt

    train("parts", "checkpoint.every=0", loggers=[At(4, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    with pytest.raises(KeyboardInterrupt):
        train("parts", "checkpoint.every=0", loggers=[At(5, crash)])
    assert metrics_of(tmp_path / "parts")[-1]["step"] == 4
    train("parts")
    assert_same_run(whole, tmp_path / "parts")


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


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_number_that_is_not_finite_stops_before_it_is_saved(words, tmp_path, where):
    trainer = make_trainer(words("run", "checkpoint.every=2", "eval.every=0"))
    weight = trainer.model.embeddings.weight

    def poison():
        if where == "loss":
            weight.data[:] = torch.nan
        else:
            weight.register_hook(lambda grad: grad * torch.inf)

    trainer.loggers.loggers.append(At(2, poison))
    with pytest.raises(NonFiniteError, match=r"step 3 is not finite.*on_nonfinite=raise"):
        trainer.fit()
    assert Checkpoints(tmp_path / "run").steps() == [2]


def poisoned_trainer(words, *bad_steps, times=1):
    """A trainer whose gradient is not finite in `bad_steps`, the first few times that it gets there."""
    trainer, left = make_trainer(words), dict.fromkeys(bad_steps, times * 2)  # two micro-batches a step

    def poison(grad):
        step = trainer.state.step + 1
        left[step] = left.get(step, 0) - 1
        return grad * torch.nan if left[step] >= 0 else grad

    trainer.model.embeddings.weight.register_hook(poison)
    return trainer


def test_a_skipped_step_leaves_the_weights_and_uses_up_its_data(words, train, tmp_path, capsys):
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


def test_a_rollback_goes_on_behind_the_bad_data(words, tmp_path):
    trainer = poisoned_trainer(words("run", "on_nonfinite=rollback", "log_every=1", "checkpoint.every=3"), 5)
    assert trainer.fit().outcome is Outcome.FINISHED
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "no step is there twice"
    assert lines[3]["skipped_steps"] == 1
    wasted = 2  # step 4 of the first time, and the bad step 5
    assert Checkpoints(tmp_path / "run").load_newest().state["data"]["row"] == 4 * (STEPS + wasted)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_bad_steps_without_end_are_an_error(words, policy):
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


def test_a_disk_that_refuses_a_checkpoint_does_not_stop_training(words, tmp_path, capsys, monkeypatch):
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


def test_a_folder_that_vanishes_is_made_again(words, train, tmp_path):
    trainer = make_trainer(words("run"))
    trainer.loggers.loggers.append(At(4, lambda: (trainer.saver.wait(), shutil.rmtree(tmp_path / "run"))))
    assert trainer.fit().outcome is Outcome.FINISHED
    assert Checkpoints(tmp_path / "run").steps() == [6, 8]
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [4, 6, 8]
    assert train("run").step == STEPS


def test_a_run_whose_end_cannot_be_saved_says_so(words, monkeypatch):
    trainer = make_trainer(words("run"))

    def save(self, snapshot, config):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "save", save)
    assert trainer.fit().outcome.exit_code == 74


def test_the_folder_is_free_again_whatever_happened(words, train, capsys):
    trainer = make_trainer(words("run", f"init_from={words('nothing')[0][8:]}"))
    with pytest.raises(UserError, match="has no checkpoint"):
        trainer.fit()
    assert "failed" not in capsys.readouterr().err, "nothing goes wrong on the way out"
    with pytest.raises(UserError, match="holds another run"):
        train("run")


def test_a_profile_is_a_trace_and_a_table(train, tmp_path):
    train("run", "profile=true")
    events = json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())["traceEvents"]
    assert {"ProfilerStep#4", "ProfilerStep#6"} <= {event.get("name") for event in events}
    assert "aten::mm" in (tmp_path / "run" / "profile" / "table.txt").read_text()


def test_bf16_autocast_over_fp32_weights(words, tmp_path):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    trainer = make_trainer(words("run", "precision=bf16", "stop_after=1"))
    seen = set()
    trainer.model.layers[0].mlp.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    trainer.fit()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert seen == {torch.bfloat16}
    assert {t.dtype for t in load_file(Checkpoints(tmp_path / "run").path(1) / "model.safetensors").values()} == {
        torch.float32
    }


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["batch_tokens=100"], "batch_tokens=100 is not a multiple of context=32"),
        (["micro_batch=3"], "micro_batch=3 on 1 device"),
        (["steps=null"], "steps=None and tokens=None"),
        (["schedule.warmup=99"], "schedule.warmup=99"),
        (["on_nonfinite=ignore"], "on_nonfinite=ignore"),
        (["precision=fp8"], "precision=fp8"),
        (["max_wall_time=soon"], "max_wall_time=soon"),
    ],
)
def test_mistakes_are_named_before_training(words, overrides, key):
    with pytest.raises(UserError, match=key):
        make_trainer(words("run", *overrides))


def test_rows_of_a_step_are_shared_out(make_config):
    config = make_config("gdn", "context=32", "batch_tokens=512", "micro_batch=null")
    assert StepPlan.make(config, 2) == StepPlan(rows=16, micro_batch=8, passes=1)
    config.micro_batch = 2
    assert StepPlan.make(config, 2) == StepPlan(rows=16, micro_batch=2, passes=4)


if __name__ == "__main__":  # what torchrun starts
    make_trainer(sys.argv[1:]).fit()
