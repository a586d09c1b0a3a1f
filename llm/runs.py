"""Runs as others read them: the trained model, its tokenizer and its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llm.build import build_model
from llm.checkpoint import Checkpoints, DamagedCheckpoint, load_weights
from llm.config import TrainConfig
from llm.errors import UserError
from llm.model.decoder import Decoder
from llm.runfolder import read_config
from llm.state import load_model_tensors
from llm.tokenizer import load_tokenizer, vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_run(
    path: Path | str, step: int | str | None = None, device: torch.device | str = "cpu"
) -> tuple[Decoder, PreTrainedTokenizerBase, TrainConfig]:
    """The model of a run in evaluation mode, with the weights after `step`, its tokenizer and config.

    `step` None is the newest checkpoint, "best" the one with the lowest validation loss of those that were kept.
    Raises UserError where there is no run, no such checkpoint, or only a damaged one.
    """
    run_dir = Path(path)
    folder = checkpoint_folder(run_dir, step)
    config = read_config(run_dir)
    tokenizer = load_tokenizer(config.tokenizer.path)
    model = build_model(config, vocabulary_size(config.tokenizer, tokenizer))
    try:
        load_model_tensors(model, load_weights(folder))
    except DamagedCheckpoint as error:
        raise UserError(f"{error}. Give another one by --step: {Checkpoints(run_dir).others(folder)}.") from error
    return model.to(device).eval(), tokenizer, config


def checkpoint_folder(run_dir: Path, step: int | str | None = None) -> Path:
    """The folder of the checkpoint of `step`, as `load_run` takes it. Raises UserError where there is none."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder. Give the folder of a run (run_dir of the training command).")
    checkpoints = Checkpoints(run_dir)
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{run_dir}: has no checkpoint. Train it until the first one (checkpoint.every), then retry.")
    if step == "best":
        best = checkpoints.best(steps)
        if not best:
            raise UserError(f"step best: {run_dir} has no checkpoint with a validation loss. Give one of {steps}.")
        return checkpoints.path(best.pop())
    if step is not None and str(step) not in map(str, steps):
        raise UserError(f"step {step}: {run_dir} has no such checkpoint. It has: {', '.join(map(str, steps))}.")
    return checkpoints.path(steps[-1] if step is None else int(step))
