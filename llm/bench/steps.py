"""Real optimizer steps of a configuration, timed."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from llm.bench.rows import RandomRows
from llm.build import build_leaf, build_model
from llm.compiling import compiled_graphs
from llm.compose import compose
from llm.config import TrainConfig
from llm.identity import mixer_label
from llm.loss import NextTokenLoss
from llm.metrics import peak_flops, peak_memory
from llm.optim import build_optimizer
from llm.parallel import build_accelerator, distribute
from llm.runfolder import open_run
from llm.trainer import Trainer

WARMUP = 4  # steps behind the first that are not timed: allocations, autotuned libraries


@dataclass
class Timing:
    """A model's training step: times in milliseconds (the first one in seconds), memory in GiB.

    `mfu` counts the model's own products against the dense bf16 peak of the device, documents by their lengths; None
    where the peak or the products are not known. `later_graphs` were compiled behind the first step. `split` is what
    parts of the step take alone.
    """

    name: str
    parameters: int
    context: int
    rows: int
    packed: bool
    milliseconds: float
    tokens_per_second: float
    mfu: float | None
    memory: float
    first_step: float
    graphs: int
    later_graphs: int
    loss: float
    split: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        return asdict(self)


def bench_config(words: list[str], *, context: int, tokens: int) -> TrainConfig:
    """The configuration of `words` at rows of `context` tokens and `tokens` tokens a step, in one pass unless told."""
    sizes = [f"context={context}", f"batch_tokens={tokens}", "steps=1000", "tokens=null"]
    return compose(["model=340m", "tokenizer.vocab_size=32000", *words, *sizes])


def build_trainer(config: TrainConfig, run_dir: str, *, packed: bool) -> Trainer:
    """The trainer of `config` on random tokens."""
    config.run_dir = run_dir
    accelerator = build_accelerator(config)
    vocab_size = config.tokenizer.vocab_size
    model = build_model(config, vocab_size, "meta").to_empty(device=accelerator.device)
    model.reset_parameters()
    objective = distribute(NextTokenLoss(model), config, accelerator)
    optimizer = build_optimizer(config.optim, model, build_leaf)
    rows = RandomRows(vocab_size, config.context, packed=packed)
    run = open_run(config, main=accelerator.is_main_process)
    return Trainer(config, model, objective, optimizer, rows, {}, [], run, accelerator)


def time_steps(config: TrainConfig, *, packed: bool, steps: int) -> Timing:
    """Time `steps` optimizer steps behind the first and `WARMUP` others."""
    with tempfile.TemporaryDirectory() as folder:
        graphs = compiled_graphs()
        trainer = build_trainer(config, folder, packed=packed)
        trainer.resume()
        with closing(trainer.batches):
            built = time.perf_counter()
            run_steps(trainer, 1)
            first, of_first = time.perf_counter() - built, compiled_graphs()
            run_steps(trainer, WARMUP)
            flops = trainer.throughput.flops
            seconds = run_steps(trainer, steps)
            flops = trainer.throughput.flops - flops
        peak = peak_flops(trainer.device)
        window = trainer.state.window.flush()
        trainer.run.close()
    return Timing(
        name=mixer_label(config),
        parameters=sum(p.numel() for p in trainer.model.parameters()),
        context=config.context,
        rows=config.batch_tokens // config.context,
        packed=packed,
        milliseconds=1000 * seconds / steps,
        tokens_per_second=steps * config.batch_tokens / seconds,
        mfu=flops / seconds / peak if peak else None,
        memory=peak_memory(trainer.device),
        first_step=first,
        graphs=of_first - graphs,
        later_graphs=compiled_graphs() - of_first,
        loss=window["loss"] / window["counted"],
    )


def run_steps(trainer: Trainer, steps: int) -> float:
    """Seconds that `steps` optimizer steps take, until the device is done."""
    synchronize(trainer.device)
    began = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    synchronize(trainer.device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait for `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
