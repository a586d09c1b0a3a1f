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
from llm.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_run(
    path: Path | str, step: int | None = None, device: torch.device | str = "cpu"
) -> tuple[Decoder, PreTrainedTokenizerBase, TrainConfig]:
    """The model of a run in evaluation mode, with the weights after `step` (None: the newest), tokenizer and config.

    Raises UserError where there is no run, no checkpoint of that step, or only a damaged one.
    """
    run_dir = Path(path)
    folder = checkpoint_folder(run_dir, step)
    config = read_config(run_dir)
    tokenizer = load_tokenizer(config.tokenizer.path)
    model = build_model(config, len(tokenizer))
    try:
        load_model_tensors(model, load_weights(folder))
    except DamagedCheckpoint as error:
        raise UserError(f"{error}. Choose another step of {Checkpoints(run_dir).steps()}.") from error
    return model.to(device).eval(), tokenizer, config


def checkpoint_folder(run_dir: Path, step: int | None = None) -> Path:
    """The folder of the checkpoint of `step` (None: the newest). Raises UserError where there is none."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder. Give the folder of a run (run_dir of the training command).")
    checkpoints = Checkpoints(run_dir)
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{run_dir}: has no checkpoint. Train it until the first one (checkpoint.every), then retry.")
    if step is not None and step not in steps:
        raise UserError(f"step {step}: {run_dir} has no such checkpoint. It has: {', '.join(map(str, steps))}.")
    return checkpoints.path(steps[-1] if step is None else step)
