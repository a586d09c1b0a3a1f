"""Training: bitwise resume, one loss curve whatever the accumulation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from llm.checkpoint import Checkpoints
from llm.compose import groups
from llm.data import TextFiles
from llm.data.encode import Encoder
from llm.data.prepare import Job, prepare
from llm.errors import UserError
from llm.plan import StepPlan
from llm.runs_equal import metrics_of
from llm.stopping import Outcome
from llm.tokenizer import load_tokenizer

STEPS = 8  # of a small run


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
def test_resume_is_bitwise(train, whole, tmp_path, stop, assert_same_run):
    """In warm-up, at and between lines of metrics, validations and checkpoints."""
    summary = train("parts", f"stop_after={stop}")
    assert (summary.outcome, summary.step) == (Outcome.STOPPED, stop)
    assert train("parts", "eval.max_rows=null").outcome is Outcome.FINISHED
    assert_same_run(whole, tmp_path / "parts")


@pytest.mark.parametrize("mixer", groups()["mixer"])
def test_resume_is_bitwise_for_every_mixer(train, tmp_path, mixer, assert_same_run):
    train("whole", f"mixer={mixer}", "steps=4")
    train("parts", f"mixer={mixer}", "steps=4", "stop_after=2")
    train("parts", f"mixer={mixer}", "steps=4")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_probes_are_lines_of_their_own_and_change_nothing(train, whole, tmp_path, at):
    stop = [at(4, lambda: os.kill(os.getpid(), signal.SIGTERM))]
    train("parts", "probe_every=2", loggers=stop)
    train("parts", "probe_every=2")
    lines = {line["step"]: line for line in metrics_of(tmp_path / "parts")}
    assert [step for step, line in lines.items() if "grad_norm/layers.0" in line] == [2, 4, 6, 8]
    plain = {line["step"]: line for line in metrics_of(whole)}
    without = {s: {k: v for k, v in line.items() if "/" not in k} for s, line in lines.items()}
    assert {step: without[step] for step in plain} == plain


@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_resume_is_bitwise_with_workers_and_across_epochs(train, tmp_path, mode, assert_same_run):
    settings = [f"data.mode={mode}", "data.streams=4", "batch_tokens=256", "steps=12", "log_every=1"]
    train("whole", *settings, "data.workers=0")
    assert metrics_of(tmp_path / "whole")[-1]["data_epochs"] > 1.5
    train("parts", *settings, "data.workers=2", "stop_after=7")
    train("parts", *settings, "data.workers=1")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_resume_is_bitwise_with_prepared_data(train, text, tmp_path, assert_same_run):
    """Across an epoch, with a process that reads ahead and without."""
    source = TextFiles(str(text / "train.jsonl"))
    tokenizer = load_tokenizer("bundled:tokenizer")
    about = {"path": str(text), "identity": source.identity(), "licence": "none"}
    list(prepare(Job(source.training_shards(), Encoder(tokenizer), 0.1, about), tmp_path / "prepared", workers=0))
    data = [f"data.path={tmp_path}/prepared", "data.validation_path=null", "data.mode=auto", "batch_tokens=256"]
    train("whole", *data, "steps=12")
    assert metrics_of(tmp_path / "whole")[-1]["data_epochs"] > 1.5
    train("parts", *data, "steps=12", "data.workers=1", "stop_after=7")
    train("parts", *data, "steps=12")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_lost_part_is_done_again(train, whole, tmp_path, assert_same_run):
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


def test_accumulation_does_not_change_the_curve(train, tmp_path, assert_same_curve):
    for micro_batch in (4, 2, 1):
        train(f"micro{micro_batch}", f"micro_batch={micro_batch}", "log_every=1")
        assert_same_curve(tmp_path / "micro4", tmp_path / f"micro{micro_batch}")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["true", "false"])
@pytest.mark.parametrize("mixer", ["hybrid_gdn_1to1", "hybrid_kda_1to1", "gla"])
def test_resume_is_bitwise_on_a_gpu(words, tmp_path, mixer, compiled, assert_same_run):
    """bf16 autocast, Triton where there is one, checkpoints copied beside training, deterministic algorithms."""
    settings = ["deterministic=true", "checkpoint.every=1", f"mixer={mixer}", "model.head_dim=64", "model.d_model=128"]
    settings += ["model.linear_head_dim=64", "context=256", "batch_tokens=2048", "model.parameters=400000"]
    settings += [f"compile={compiled}"]
    for name, stop in (("whole", "null"), ("parts", "5"), ("parts", "null")):
        command = [sys.executable, "-m", "llm.train", *words(name, *settings, f"stop_after={stop}")]
        subprocess.run(command, check=True, timeout=300)
    assert metrics_of(tmp_path / "whole")[-1]["loss"] < metrics_of(tmp_path / "whole")[0]["loss"]
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.gpu
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_no_step_waits_for_the_gpu(words, make_trainer, at, optim):
    """Between lines of metrics nothing makes the host wait: torch raises where it would."""
    last = 9  # beyond the steps before: the first ones compile and measure
    settings = [
        f"optim={optim}",
        f"steps={last}",
        "log_every=100",
        "eval.every=0",
        "checkpoint.every=0",
        "compile=false",
    ]
    start = at(3, lambda: torch.cuda.set_sync_debug_mode("error"))
    end = at(last - 1, lambda: torch.cuda.set_sync_debug_mode("default"))
    try:
        assert make_trainer(words("run", "compile=false", *settings), [start, end]).fit().step == last
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_weights_of_another_run(train, tmp_path):
    train("first", "checkpoint.keep=9")
    first = load_file(Checkpoints(tmp_path / "first").path(3) / "model.safetensors")
    train("second", f"init_from='{tmp_path}/first@3'", "optim.lr=0.0")
    second = load_file(Checkpoints(tmp_path / "second").path(STEPS) / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_profile_is_a_trace_and_a_table(train, tmp_path):
    train("run", "profile=true")
    events = json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())["traceEvents"]
    assert {"ProfilerStep#4", "ProfilerStep#6"} <= {event.get("name") for event in events}
    assert "aten::mm" in (tmp_path / "run" / "profile" / "table.txt").read_text()


def test_bf16_autocast_over_fp32_weights(words, tmp_path, make_trainer):
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
def test_mistakes_are_named_before_training(words, overrides, key, make_trainer):
    with pytest.raises(UserError, match=key):
        make_trainer(words("run", *overrides))


def test_rows_of_a_step_are_shared_out(make_config):
    config = make_config("gdn", "context=32", "batch_tokens=512", "micro_batch=null")
    assert StepPlan.make(config, 2) == StepPlan(rows=16, micro_batch=8, passes=1)
    config.micro_batch = 2
    assert StepPlan.make(config, 2) == StepPlan(rows=16, micro_batch=2, passes=4)
