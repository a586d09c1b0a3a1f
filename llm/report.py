"""What a run would be, before it runs: sizes, FLOPs, state, memory, tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llm.config import ModelConfig, TrainConfig, allowed
from llm.identity import mixer_label
from llm.layout import describe_layout, layer_names, ratio_warning
from llm.memory import device_memory, training_memory
from llm.metrics import TRAINING_FLOPS
from llm.model.decoder import Decoder

TOLERANCE = 0.02  # differences beyond this make a comparison unfair


@dataclass
class Report:
    """Figures of a model and its run; `str()` is the page that a dry run prints."""

    title: str
    sections: dict[str, dict[str, str]]
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        width = max(len(key) for rows in self.sections.values() for key in rows)
        lines = [self.title]
        for section, rows in self.sections.items():
            lines += ["", section, *(f"  {key:<{width}}  {value}" for key, value in rows.items())]
        if self.warnings:
            lines += ["", *(f"warning: {w}" for w in self.warnings)]
        return "\n".join(lines)


def report(config: TrainConfig, model: Decoder, steps: int) -> Report:
    """The report of `model` (on any device, the meta device included) trained for `steps` steps of `config`."""
    context, sections = config.context, {}
    sections["parameters"] = parameters_by_part(model)
    flops = training_flops(config, model)
    sections["cost"] = {
        "FLOPs a token, forward and backward": f"{flops:.3e}   (documents of {context:,} tokens)",
        f"decoding state after {context:,} tokens": human_bytes(model.state_bytes(context)),
        f"decoding state after {16 * context:,} tokens": human_bytes(model.state_bytes(16 * context)),
        "state elements of a layer, by mixer": ", ".join(
            f"{n} {e:,}" for n, e in _state_elements(config, model).items()
        ),
    }
    device_bytes, device = device_memory()
    memory = f"training memory, estimated for one GPU of {human_bytes(device_bytes)} ({device})"
    sections[memory] = _memory(config, model, device_bytes)
    sections["run"] = {
        "rows a step": f"{config.batch_tokens // context:,} of {context:,} tokens ({config.batch_tokens:,} tokens)",
        "steps": f"{steps:,}",
        "tokens": f"{steps * config.batch_tokens:,}",
        "FLOPs": f"{flops * steps * config.batch_tokens:.3e}",
    }
    title = f"{config.model.name} {mixer_label(config)}: {describe_layout(layer_names(config))}"
    return Report(title, sections, size_warnings(config, model))


def model_facts(config: TrainConfig, model: Decoder) -> dict[str, Any]:
    """What a comparison needs to know of a model without building it: counts, FLOPs, bytes. JSON data.

    `flops_a_token` is forward and backward over documents of `context` tokens, `state_bytes` of decoding one sequence
    after `context` tokens, `state_elements` of one layer by mixer (0 for a cache that grows).
    """
    context = config.context
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "non_embedding_parameters": model.non_embedding_parameters(),
        "flops_a_token": training_flops(config, model),
        "state_bytes": model.state_bytes(context),
        "state_elements": _state_elements(config, model),
    }


def training_flops(config: TrainConfig, model: Decoder) -> float:
    """FLOPs of training on one token, forward and backward, in documents of `context` tokens."""
    return TRAINING_FLOPS * model.flops(config.context, config.context**2) / config.context


def parameters_by_part(model: Decoder) -> dict[str, str]:
    """Parameters of embedding, mixers, MLPs, norms and head, and their sums."""
    count = lambda *modules: sum(p.numel() for m in modules for p in m.parameters())  # noqa: E731
    tied = model.lm_head.weight is model.embeddings.weight
    layers = model.layers
    mixers, mlps = count(*(b.mixer for b in layers)), count(*(b.mlp for b in layers))
    parts = {
        "embedding": count(model.embeddings),
        "mixers": mixers,
        f"MLPs, width {layers[0].mlp.gate_proj.out_features}": mlps,
        "norms": count(model.norm) + count(*layers) - mixers - mlps,
        "head" + (" (tied to the embedding)" if tied else ""): 0 if tied else count(model.lm_head),
        "without embedding and head": model.non_embedding_parameters(),
        "in all": count(model),
    }
    return {name: f"{value:>15,}" for name, value in parts.items()}


def size_warnings(config: TrainConfig, model: Decoder) -> list[str]:
    """What makes this model an unfair match for others: a ratio not met, parameters or state off by more than 2%."""
    ratio = ratio_warning(config)
    warnings = [] if ratio is None else [ratio]
    target, actual = config.model.parameters, model.non_embedding_parameters()
    if abs(actual / target - 1) > TOLERANCE:
        warnings.append(
            f"{actual:,} non-embedding parameters are {actual / target - 1:+.1%} from the {target:,} of model="
            f"{config.model.name}: runs of this size will not compare fairly."
        )
    expected = state_target(config.model)
    for name, elements in _state_elements(config, model).items():
        if elements and abs(elements / expected - 1) > TOLERANCE:
            warnings.append(
                f"{name} holds {elements:,} state elements a layer, {elements / expected - 1:+.1%} from the "
                f"{expected:,} of linear mixers at model={config.model.name}."
            )
    return warnings


def state_target(sizes: ModelConfig) -> int:
    """State elements a layer of linear mixers at one model size."""
    return sizes.d_model * sizes.linear_head_dim


def human_bytes(count: float) -> str:
    """'1.5 MiB' and the like."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _state_elements(config: TrainConfig, model: Decoder) -> dict[str, int]:
    """Elements of the constant state of one layer, by mixer; 0 for a growing cache."""
    return {n: b.mixer.state_elements() for n, b in zip(layer_names(config), model.layers, strict=True)}


def _memory(config: TrainConfig, model: Decoder, device_bytes: int) -> dict[str, str]:
    """For each choice of activation checkpointing: the estimated peak, and the largest micro-batch."""
    rows, lines = config.micro_batch or config.batch_tokens // config.context, {}
    for choice in allowed(TrainConfig, "activation_checkpointing"):
        try:
            memory = training_memory(config, model, choice)
        except Exception as error:  # a mixer from elsewhere may not run without contents
            return {"not known": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        largest = memory.largest_micro_batch(config.context, device_bytes)
        peak = human_bytes(memory.at(rows * config.context))
        lines[f"activation_checkpointing={choice}"] = f"{peak} at micro_batch={rows}; largest micro_batch {largest}"
    return lines
