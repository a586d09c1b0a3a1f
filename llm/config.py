"""The typed configuration of a run. Hydra yaml files fill it; an unknown key or a value of the wrong type is an error.

Leaves that users swap for classes of their own (mixers, the data source, the optimizer, loggers) are mappings with a
`_target_` and that class's settings; `llm/build.py` instantiates them and checks the settings against its signature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from math import inf
from typing import Any

from omegaconf import MISSING

from llm.errors import UserError

LARGEST_SEED = 2**31 - 1  # what every generator takes


def option(
    help: str,
    default: Any = MISSING,
    *,
    free: bool = False,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field with a line of help for `--help`; `free` where it may change when a run is resumed.

    `check_values` holds numbers (and those in lists) to low <= number <= high and number > above, words to `choices`.
    """
    metadata = {"help": help, "free": free, "low": low, "above": above, "high": high, "choices": choices}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_values(config: Any, prefix: str = "") -> None:
    """UserError naming key, value and what is allowed for the first value that is out of its range."""
    for spec in fields(config):
        value, key = getattr(config, spec.name), f"{prefix}{spec.name}"
        if is_dataclass(value):
            check_values(value, f"{key}.")
        for single in value if isinstance(value, list) else [value]:
            wrong = None if single is None else _out_of_range(single, spec.metadata)
            if wrong:
                raise UserError(f"{key}={value}: must be {wrong}.")


def _out_of_range(value: Any, allowed: Mapping[str, Any]) -> str | None:
    """What a value must be and is not; NaN is out of every range."""
    choices, low, above, high = (allowed.get(name) for name in ("choices", "low", "above", "high"))
    if choices and value not in choices:
        return f"one of {', '.join(choices)}"
    if low is not None and high is not None and not low <= value <= high:
        return f"between {low} and {high}"
    if low is not None and high is None and not low <= value < inf:
        return f"a number from {low} on"
    if above is not None and not above < value < inf:
        return f"a number above {above}"
    return None


def allowed(schema: type, key: str) -> tuple[str, ...]:
    """The words that a field of a part of the configuration takes."""
    return schema.__dataclass_fields__[key].metadata["choices"]


@dataclass
class ModelConfig:
    """Sizes of the decoder (configs/model)."""

    name: str = option("name of the size, used in run names")
    d_model: int = option("width of the residual stream", low=1)
    n_layers: int = option("number of blocks", low=1)
    head_dim: int = option("size of a softmax head", low=1)
    linear_head_dim: int = option("key size of a linear mixer's head", low=1)
    parameters: int = option("non-embedding parameters aimed at; the MLP width is chosen to meet it", low=1)
    mlp_multiple: int = option("the MLP width is a multiple of this", 64, low=1)
    mlp_width: int | None = option("MLP width; null: chosen to meet `parameters`", None, low=1)
    tie_embeddings: bool = option("share the embedding matrix with the output head", False)
    norm_eps: float = option("epsilon of the block norms", 1e-6, above=0)
    init_std: float = option("standard deviation of the initial weights", 0.02, above=0)


@dataclass
class HybridConfig:
    """The layout of `mixer=hybrid`: softmax layers spread among linear ones."""

    linear: str = option("mixer of the other layers", "gdn")
    softmax: str = option("mixer of the layers that see everything", "softmax")
    per_softmax: int | None = option("linear layers for each softmax layer; null: not a ratio hybrid", None, low=1)


@dataclass
class DataConfig:
    """Where the text comes from and how it is packed (configs/data)."""

    name: str = option("name of the data, used in run names")
    source: dict[str, Any] = option("class that yields documents or rows, and its settings", {})
    path: Any = option("file, folder, glob or list of them with training text, or a prepared folder")
    validation_path: Any = option("the same for held-out text, or a mapping: name of the set -> path", None)
    validation_contexts: list[int] = option("tokens a row in further validations, beside `context`", [], low=1)
    validation_tokens: int = option("most held-out tokens that are read for a validation set", 2_000_000, low=1)
    held_out: float = option(
        "without validation_path: share of documents held out, chosen by a hash of their text", 0.0, low=0, high=0.9
    )
    text_column: str = option("field of a record that holds the text", "text")
    mode: str = option(
        "memory: tokenised at the start; stream: as needed; prepared; auto: by kind and size",
        "auto",
        choices=("auto", "memory", "stream", "prepared"),
    )
    memory_mb: int = option("mode=auto keeps local text up to this size in memory", 64, low=0)
    packing: str = option(
        "cut: documents end to end, cut into rows; fit: best fit, cutting only what is longer",
        "cut",
        choices=("cut", "fit"),
    )
    separate: bool = option("documents of a row do not see each other and are not predicted across boundaries", True)
    bos: bool = option("put the tokenizer's beginning-of-document token before each document", False)
    seed: int = option("seed of the data order", 0, low=0, high=LARGEST_SEED)
    unreadable: str = option(
        "mode=stream, a file that stays unreadable: raise, or skip it with a warning",
        "raise",
        choices=("raise", "skip"),
    )
    streams: int = option("mode=stream: sequences read side by side, shared out among devices and workers", 64, low=1)
    workers: int = option("processes that tokenise ahead of need; 0: in the trainer's process", 0, free=True, low=0)


@dataclass
class TokenizerConfig:
    """The tokenizer (configs/tokenizer)."""

    path: str = option("folder that transformers' AutoTokenizer loads, or a hub name")
    vocab_size: int | None = option("tokens that the model knows; null: as many as the tokenizer has", None, low=1)


@dataclass
class OptimConfig:
    """Optimizer and clipping (configs/optim)."""

    name: str = option("name of the optimizer, used in run names")
    lr: float = option("peak learning rate", low=0)
    weight_decay: float = option(
        "decay of matrices and convolutions; norms, biases, A_log, dt_bias have none", 0.1, low=0
    )
    embedding_weight_decay: float = option("decay of the embedding and the output head", 0.0, low=0)
    clip: float | None = option("largest norm of the gradient; null: no clipping", 1.0, above=0)
    optimizer: dict[str, Any] = option("class of the optimizer and its settings", {})


@dataclass
class ScheduleConfig:
    """The learning rate as a function of the step (configs/schedule)."""

    name: str = option("cosine, wsd, linear or constant")
    warmup: float = option("warm-up: a number of steps, or below 1 a share of all steps", 0.05, low=0)
    decay: float = option("wsd: length of the final decay, in steps, or below 1 a share of all steps", 0.2, low=0)
    floor: float = option("final learning rate as a share of the peak", 0.1, low=0, high=1)


@dataclass
class EvalConfig:
    """Validation during training."""

    every: int = option("steps between validations; 0: only at the end", 100, free=True, low=0)
    max_rows: int | None = option("most rows of held-out text a validation; null: all", None, free=True, low=1)
    enough_accuracy: float | None = option(
        "end training once every validation set has this share of right predictions; null: never",
        None,
        free=True,
        above=0,
        high=1,
    )


@dataclass
class CheckpointConfig:
    """When checkpoints are written."""

    every: int = option("steps between checkpoints; 0: only at the end or when stopped", 500, free=True, low=0)
    keep: int = option("newest checkpoints that are kept", 2, free=True, low=1)
    keep_every: int = option("checkpoints of every so many steps are kept for good; 0: none", 0, free=True, low=0)
    keep_best: bool = option("keep the checkpoint with the lowest validation loss", False, free=True)
    background: bool = option("write checkpoints while training goes on", True, free=True)


@dataclass
class TrainConfig:
    """Everything that a run depends on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    mixers: dict[str, Any] = option("settings of each mixer by name: mixers.<name>.<setting>", {})
    pattern: list[str] = option("mixers of the first layers, repeated down the stack", [])
    hybrid: HybridConfig = field(default_factory=HybridConfig)
    residual: str = option(
        "standard; delta_attention: blocks attend to what others added; value_routing: mixers' values join the sum",
        "standard",
        choices=("standard", "delta_attention", "value_routing"),
    )
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    loggers: dict[str, Any] = option("sinks of metrics by name (metrics.jsonl is always written)", {}, free=True)

    run_dir: str | None = option(
        "folder of the run; null: runs/<name made of the settings that matter>", None, free=True
    )
    steps: int | None = option("optimizer steps of the whole schedule (or give tokens)", None, low=1)
    tokens: int | None = option("tokens of the whole schedule (or give steps)", None, low=1)
    stop_after: int | None = option(
        "stop after this step, resumable; the schedule is not shortened", None, free=True, low=1
    )
    context: int = option("tokens a row", low=1)
    batch_tokens: int = option("tokens an optimizer step, over all devices", low=1)
    micro_batch: int | None = option(
        "rows a device at a time; accumulation follows; null: all rows of a step at once", None, free=True, low=1
    )
    parallel: str = option(
        "several processes: ddp, each has all weights; fsdp, weights are sharded; hsdp, sharded within groups",
        "ddp",
        free=True,
        choices=("ddp", "fsdp", "hsdp"),
    )
    shard_over: int | None = option(
        "parallel=hsdp: processes that share one copy of the weights; null: those of a machine", None, free=True, low=1
    )
    activation_checkpointing: str = option(
        "compute again in backward rather than keep: none; selective: MLPs and what is cheap; full: whole blocks",
        "none",
        free=True,
        choices=("none", "selective", "full"),
    )
    seed: int = option("seed of the weights", 0, low=0, high=LARGEST_SEED)
    resume: str = option(
        "auto: continue the run if there is one; must: there has to be; never: no",
        "auto",
        free=True,
        choices=("auto", "must", "never"),
    )
    init_from: str | None = option("RUN or RUN@STEP whose weights to start from, with a new schedule", None)
    dry_run: bool = option("print what would run (parameters, FLOPs, memory, tokens) and stop", False, free=True)
    deterministic: bool = option("bitwise reproducible on a GPU too, slower", False)
    compile: bool | None = option("torch.compile the blocks; null: on a GPU", None, free=True)
    profile: bool = option("write a profiler trace of a few steps into the run", False, free=True)
    max_wall_time: str | None = option(
        "save and stop cleanly before this long has passed: 3600, 90m or 11h30m", None, free=True
    )
    precision: str = option(
        "bf16: autocast over fp32 weights; fp32; auto: bf16 where a GPU has it",
        "auto",
        choices=("auto", "bf16", "fp32"),
    )
    on_nonfinite: str = option(
        "when a loss or gradient is not finite: raise, skip or rollback",
        "raise",
        free=True,
        choices=("raise", "skip", "rollback"),
    )
    max_skips: int = option("most steps in a row that on_nonfinite=skip or rollback pass over", 10, free=True, low=0)
    probe_every: int = option(
        "steps between norms of gradient, activation and state by layer; 0: none", 0, free=True, low=0
    )
    log_every: int = option("steps between lines of metrics", 10, free=True, low=1)
