"""A whole run put together: from its configuration to its last checkpoint."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch

from llm.build import build_leaf, build_model, check_settings
from llm.config import TrainConfig
from llm.data import HeldOutRows, training_rows, validation_sets
from llm.identity import mixer_label
from llm.layout import describe_layout, layer_names
from llm.loss import NextTokenLoss
from llm.model.decoder import Decoder
from llm.optim import build_optimizer
from llm.parallel import build_accelerator, distribute, group_size, settle
from llm.plan import StepPlan
from llm.report import model_facts, report, size_warnings
from llm.runfolder import RunFolder, open_run
from llm.schedules import build_schedule, total_steps
from llm.state import check_initial_weights
from llm.stopping import Outcome, StopNow, StopSignals, WallTime
from llm.tokenizer import load_tokenizer, vocabulary_size
from llm.trainer import Summary, Trainer


def dry_run(config: TrainConfig) -> int:
    """Print what the run would be; of the tokenizer only the size is needed. Returns the exit code."""
    vocab_size = config.tokenizer.vocab_size or len(load_tokenizer(config.tokenizer.path))
    model = check(config, vocab_size, world_size=1)
    print(report(config, model, total_steps(config)))
    return 0


def train(config: TrainConfig) -> int:
    """Train, or go on training, the run of `config`. Returns the exit code."""
    with StopSignals() as signals:
        try:
            with signals.at_once():  # there is nothing to save before training begins
                job = prepare(config, signals)
        except StopNow:
            say("stopped before training began; the same command begins again")
            return signals.outcome.exit_code
        try:
            summary = job.trainer.fit()
        finally:
            settle(job.trainer.accelerator)
    if job.trainer.accelerator.is_main_process:
        conclude(summary, job.trainer.run, job.validation)
    job.trainer.accelerator.end_training()
    return summary.outcome.exit_code


class Job(NamedTuple):
    """A trainer that is ready to go, and the held-out text that it knows."""

    trainer: Trainer
    validation: dict[str, HeldOutRows]


def prepare(config: TrainConfig, signals: StopSignals) -> Job:
    """Everything that comes before training: mistakes are found, the run's folder is taken, data and model are made."""
    accelerator = build_accelerator(config)
    tokenizer = load_tokenizer(config.tokenizer.path)
    vocab_size = vocabulary_size(config.tokenizer, tokenizer)
    sketch = check(config, vocab_size, accelerator.num_processes)
    source = build_leaf("data.source", config.data.source)
    loggers = [build_leaf(f"loggers.{name}", leaf) for name, leaf in config.loggers.items()]
    run = open_run(config, main=accelerator.is_main_process)
    try:
        if config.init_from and not run.checkpoints.steps():
            check_initial_weights(config.init_from)
        rows = training_rows(config.data, source, tokenizer, config.context)
        validation = validation_sets(config.data, source, tokenizer, config.context)
        if accelerator.is_main_process:
            run.record_model(model_facts(config, sketch))
            announce(config, sketch, run, validation, accelerator.device)
        model = build_model(config, vocab_size)
        objective = distribute(NextTokenLoss(model), config, accelerator)
        optimizer = build_optimizer(config.optim, model, build_leaf)
        trainer = Trainer(config, model, objective, optimizer, rows, validation, loggers, run, accelerator, signals)
    except BaseException:
        run.close()
        raise
    return Job(trainer, validation)


def check(config: TrainConfig, vocab_size: int, world_size: int) -> Decoder:
    """All that can be wrong with the settings comes to light here, in a moment. The model on the meta device."""
    StepPlan.make(config, world_size)
    group_size(config, world_size)
    build_schedule(config.schedule, total_steps(config))
    WallTime(config.max_wall_time)
    for key, leaf in {
        "data.source": config.data.source,
        **{f"loggers.{n}": x for n, x in config.loggers.items()},
    }.items():
        check_settings(key, leaf, ("self",))
    return build_model(config, vocab_size, "meta")


def announce(
    config: TrainConfig, model: Decoder, run: RunFolder, validation: dict[str, HeldOutRows], device: torch.device
) -> None:
    """Say in a few lines what is going to run."""
    say(f"{config.model.name} {mixer_label(config)}: {describe_layout(layer_names(config))}")
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{parameters:,} parameters, {model.non_embedding_parameters():,} without embedding and head; {device}")
    for name, rows in validation.items():
        say(f"{name}: {rows.tokens:,} tokens, unigram entropy {rows.unigram_entropy():.3f} nats a token")
    for warning in size_warnings(config, model):
        say(f"warning: {warning}")
    say(f"run folder: {run.path}")


def conclude(summary: Summary, run: RunFolder, validation: dict[str, HeldOutRows]) -> None:
    """Say how it ended, how much was learnt beyond the frequencies of tokens, and what to do next."""
    names = ("loss", "val_loss", "val_perplexity")
    values = ", ".join(f"{n.replace('_', ' ')} {summary.values[n]:.4f}" for n in names if n in summary.values)
    how = summary.outcome.name.lower().replace("_", " ")
    say(f"{how} at step {summary.step}; last logged: {values or 'nothing yet'}")
    if "val_loss" in summary.values and "validation" in validation:
        entropy = validation["validation"].unigram_entropy()
        gap = entropy - summary.values["val_loss"]
        side = "below" if gap > 0 else "above"
        say(f"val loss is {abs(gap):.3f} nats {side} the unigram entropy of the held-out text, {entropy:.3f}")
    if summary.outcome is Outcome.FINISHED:
        say(f'next: python -m llm.generate {run.path} --prompt "..."')
    elif summary.outcome is Outcome.STOPPED:
        say("stop_after is reached: the same command with a larger one, or without, goes on from here")
    else:
        say("the same command goes on from here")


def say(line: str) -> None:
    """Tell the user; stdout is left to what others may want to pipe."""
    print(line, file=sys.stderr, flush=True)
