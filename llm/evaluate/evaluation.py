"""An evaluation put together: from a run's folder to its result."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llm.build import build_leaf
from llm.config import TrainConfig
from llm.data import HeldOut, validation_sets
from llm.errors import UserError
from llm.evaluate.decoding import store_matrices, time_decoding
from llm.evaluate.losses import Fit
from llm.evaluate.recall import probe, text_of
from llm.evaluate.results import SCHEMA_VERSION, series_of
from llm.evaluate.validation import bytes_of_tokens, evaluate_set
from llm.model.decoder import Decoder
from llm.runs import checkpoint_folder, load_run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECTIONS = ("validation", "recall", "decoding")


@dataclass(frozen=True)
class Options:
    """What is evaluated. None is a default that depends on the run or the device."""

    only: tuple[str, ...] = SECTIONS
    lengths: tuple[int, ...] = (1, 2, 4, 8, 16)  # rows of so many times the training length
    max_tokens: int | None = None  # of a set at one length
    micro_batch: int | None = None
    chunk: int | None = None  # tokens of a row at a time
    recall_lengths: tuple[int, ...] = (1, 2, 4)
    samples: int | None = None  # rows of a probe at one depth and length
    contexts: tuple[int, ...] | None = None  # tokens before decoding
    decoding_batch: int = 1
    new_tokens: int = 32
    precision: str = "auto"


def evaluate_run(run_dir: Path, step: int | str | None, device: torch.device, options: Options) -> dict[str, Any]:
    """The result for one checkpoint of a run (see `results`). UserError where there is none to read."""
    model, tokenizer, config = load_run(run_dir, step, device)
    bf16 = uses_bf16(options.precision, config.precision, device)
    result = {
        "schema_version": SCHEMA_VERSION,
        "run": run_dir.resolve().name,
        "step": int(checkpoint_folder(run_dir, step).name.removeprefix("step_")),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.orig_argv,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "precision": "bf16" if bf16 else "fp32",
        "context": config.context,
        "settings": dataclasses.asdict(options),
        **{section: [] for section in SECTIONS},
        "notes": [],
    }
    on_gpu = device.type == "cuda"
    options = dataclasses.replace(
        options,
        max_tokens=options.max_tokens or (2_000_000 if on_gpu else 65_536),
        samples=options.samples or (50 if on_gpu else 8),
        contexts=options.contexts or ((1024, 4096, 16384, 65536, 131072) if on_gpu else (128, 512, 2048)),
    )
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        if "validation" in options.only:
            _validate(result, model, tokenizer, config, options)
        if "recall" in options.only:
            _probe(result, model, tokenizer, config, options)
        if "decoding" in options.only:
            if bf16:
                store_matrices(model, torch.bfloat16)  # or autocast would convert them at each token
            _decode(result, model, config, options)
    result["series"] = series_of(result)
    return result


def _validate(
    result: dict[str, Any], model: Decoder, tokenizer: PreTrainedTokenizerBase, config: TrainConfig, options: Options
) -> None:
    bytes_W = bytes_of_tokens(tokenizer, model.vocab_size)
    for held_out in held_out_sets(result, config, tokenizer, options.lengths):
        is_text = text_of(held_out) is held_out
        found = evaluate_set(
            model,
            held_out,
            bytes_W if is_text else None,
            max_tokens=options.max_tokens,
            fit=_fit(config, held_out, options),
        )
        name = held_out.name.partition("@")[0]
        result["validation"].append({"set": name, "context": held_out.context, **found})


def _probe(
    result: dict[str, Any], model: Decoder, tokenizer: PreTrainedTokenizerBase, config: TrainConfig, options: Options
) -> None:
    texts: dict[int, HeldOut] = {}  # the first set of text at each length
    for held_out in held_out_sets(result, config, tokenizer, options.recall_lengths):
        text = text_of(held_out)
        if text is not None:
            texts.setdefault(text.context, text)
    if not texts:
        result["notes"].append("no recall probes: the run has no held-out text to hide needles in")
    for text in texts.values():
        fit = _fit(config, text, options)
        result["recall"] += probe(model, text, tokenizer, config.data, samples=options.samples, fit=fit)


def _decode(result: dict[str, Any], model: Decoder, config: TrainConfig, options: Options) -> None:
    for context in options.contexts:
        fit = Fit(1, options.chunk or max(config.context, 2048))
        found = time_decoding(model, context, batch=options.decoding_batch, new_tokens=options.new_tokens, fit=fit)
        result["decoding"].append(found)


def held_out_sets(
    result: dict[str, Any], config: TrainConfig, tokenizer: PreTrainedTokenizerBase, lengths: tuple[int, ...]
) -> Iterator[HeldOut]:
    """The run's validation sets in rows of `lengths` times its context; what cannot be had is noted in the result."""
    source = build_leaf("data.source", config.data.source)
    longer = [length * config.context for length in lengths if length != 1]
    data = dataclasses.replace(config.data, validation_contexts=longer)
    try:
        sets = validation_sets(data, source, tokenizer, config.context)
    except UserError as error:
        result["notes"].append(f"no held-out data: {error}")
        return
    if not sets:
        result["notes"].append("no held-out data: the run was told of none (data.validation_path, data.held_out)")
    for held_out in sets.values():
        if 1 not in lengths and held_out.context == config.context:
            continue
        if len(held_out) == 0:
            result["notes"].append(f"{held_out.name}: too little text for a row of {held_out.context} tokens")
            continue
        yield held_out


def uses_bf16(asked: str, trained: str, device: torch.device) -> bool:
    """Does evaluation run under bf16 autocast? As training would on this device, unless another precision is asked."""
    wanted = trained if asked == "auto" else asked
    return wanted == "bf16" or (wanted == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported())


def _fit(config: TrainConfig, held_out: HeldOut, options: Options) -> Fit:
    """As many tokens at a time as a micro-batch of training has, in chunks of at least the training length."""
    rows = config.micro_batch or max(1, config.batch_tokens // config.context)
    tokens = (options.micro_batch or rows) * config.context
    return Fit(max(1, tokens // held_out.context), options.chunk or max(config.context, 2048))
