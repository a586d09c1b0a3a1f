"""Real optimizer steps of a configuration, timed."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch

from llm.bench.rows import RandomRows
from llm.bench.split import split, synchronize
from llm.bench.timing import WARMUP, Timing
from llm.build import build_leaf, build_model
from llm.compiling import compiled_graphs
from llm.compose import compose
from llm.config import TrainConfig
from llm.identity import mixer_label
from llm.loss import NextTokenLoss
from llm.metrics import peak_flops, peak_memory
from llm.optim import build_optimizer
from llm.parallel import build_accelerator, distribute
from llm.profiling import TRACED_STEPS, profiler
from llm.runfolder import open_run
from llm.trainer import Trainer


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


def time_steps(
    config: TrainConfig, *, packed: bool, steps: int, by_part: bool = False, profile_into: Path | None = None
) -> Timing:
    """Time `steps` optimizer steps behind the first and `WARMUP` others; then, if wanted, the parts of one alone.

    With `profile_into`, a folder, write a trace and a table of a few further steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        graphs = compiled_graphs()
        trainer = build_trainer(config, folder, packed=packed)
        trainer.resume()
        reset_peak(trainer.device)
        with closing(trainer.batches):
            built = time.perf_counter()
            run_steps(trainer, 1)
            first, of_first = time.perf_counter() - built, compiled_graphs()
            run_steps(trainer, WARMUP)
            flops = trainer.throughput.flops
            seconds = run_steps(trainer, steps)
            flops = trainer.throughput.flops - flops
            memory, later = peak_memory(trainer.device), compiled_graphs() - of_first
            with profiler(profile_into is not None, profile_into or Path(folder)) as profile:
                for _ in range(TRACED_STEPS if profile else 0):
                    trainer.step()
                    profile.step()
            parts = split(trainer, 1000 * seconds / steps) if by_part else {}
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
        memory=memory,
        first_step=first,
        graphs=of_first - graphs,
        later_graphs=later,
        loss=window["loss"] / window["counted"],
        split=parts,
    )


def run_steps(trainer: Trainer, steps: int) -> float:
    """Seconds that `steps` optimizer steps take, until the device is done."""
    synchronize(trainer.device)
    began = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    synchronize(trainer.device)
    return time.perf_counter() - began


def reset_peak(device: torch.device) -> None:
    """Begin to measure memory anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
