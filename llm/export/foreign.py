"""Models of transformers as ours: the settings that describe them, and their weights under our names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from llm.errors import UserError, suggest

Weights = dict[str, Tensor]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Foreign:
    """A model as we see it.

    `mixers`: settings by mixer name; `pattern`: the mixer of each layer; `sizes`: keys of the model group; `weights`:
    by our decoder's names, embedding and head with as many rows as the original has.
    """

    mixers: dict[str, Settings]
    pattern: list[str]
    sizes: Settings
    weights: Weights
    context: int


def read(config: PreTrainedConfig, weights: Weights) -> Foreign:
    """A model from transformers' configuration and state dict. UserError where ours cannot compute the same."""
    readers: dict[str, Callable[[Any, Weights], tuple[dict[str, Settings], list[str], Weights]]] = {
        "llama": _read_softmax,
        "qwen3": _read_softmax,
        "qwen3_5_text": _read_gdn_hybrid,
        "kimi_linear": _read_kda,
    }
    kind = config.model_type
    if kind not in readers:
        raise UserError(f"model type {kind!r} cannot be imported.{suggest(kind, readers)}")
    _refuse(config, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False})
    mixers, pattern, layers = readers[kind](config, weights)
    sizes = {
        "d_model": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "mlp_width": config.intermediate_size,
        "tie_embeddings": "lm_head.weight" not in weights or bool(config.tie_word_embeddings),
        "norm_eps": config.rms_norm_eps,
        "init_std": config.initializer_range,
    }
    centre = 1.0 if kind == "qwen3_5_text" else 0.0
    found = _frame(weights, config.num_hidden_layers, centre) | layers
    if sizes["tie_embeddings"]:
        found.pop("lm_head.weight", None)
    return Foreign(mixers, pattern, sizes, found, config.max_position_embeddings)


def _frame(weights: Weights, depth: int, centre: float) -> Weights:
    """Embedding, head, block norms and MLPs; `centre` is added to norms."""
    found = {
        "embeddings.weight": weights["model.embed_tokens.weight"],
        "norm.weight": weights["model.norm.weight"] + centre,
    }
    if "lm_head.weight" in weights:
        found["lm_head.weight"] = weights["lm_head.weight"]
    for i in range(depth):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        found[f"{ours}.mixer_norm.weight"] = weights[f"{theirs}.input_layernorm.weight"] + centre
        found[f"{ours}.mlp_norm.weight"] = weights[f"{theirs}.post_attention_layernorm.weight"] + centre
        for name in ("gate_proj", "up_proj", "down_proj"):
            found[f"{ours}.mlp.{name}.weight"] = weights[f"{theirs}.mlp.{name}.weight"]
    return found


def _below(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _in_mixer(layer: int, weights: Weights) -> Weights:
    return {f"layers.{layer}.mixer.{name}": tensor for name, tensor in weights.items()}


def _softmax_settings(config: Any) -> Settings:
    rope = dict(config.rope_parameters or {})
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"rope_parameters={rope}: only plain rotary embedding of whole heads can be imported.")
    return {
        "head_dim": config.head_dim,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "rope_theta": float(rope["rope_theta"]),
        "norm_eps": config.rms_norm_eps,
    }


def _read_softmax(config: Any, weights: Weights) -> tuple[dict[str, Settings], list[str], Weights]:
    """llama and qwen3."""
    settings = _softmax_settings(config) | {"qk_norm": config.model_type == "qwen3"}
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if len(kinds) > 1:
        raise UserError("layer_types: layers with and without a sliding window cannot be imported together.")
    if kinds == {"sliding_attention"}:
        settings["window"] = config.sliding_window
    layers: Weights = {}
    for i in range(config.num_hidden_layers):
        layers |= _in_mixer(i, _below(weights, f"model.layers.{i}.self_attn."))
    return {"softmax": settings}, ["softmax"] * config.num_hidden_layers, layers


def _read_gdn_hybrid(config: Any, weights: Weights) -> tuple[dict[str, Settings], list[str], Weights]:
    """qwen3_5_text. An output gate that is zero everywhere is none."""
    if config.linear_num_key_heads != config.linear_num_value_heads:
        raise UserError("linear_num_value_heads: more value heads than key heads cannot be imported.")
    pattern = ["gdn" if kind == "linear_attention" else "softmax" for kind in config.layer_types]
    mixers: dict[str, Settings] = {}
    if "gdn" in pattern:
        mixers["gdn"] = _linear_settings(config) | {
            "head_k_dim": config.linear_key_head_dim,
            "num_heads": config.linear_num_key_heads,
            "expand_v": config.linear_value_head_dim / config.linear_key_head_dim,
        }
    softmax = [i for i, name in enumerate(pattern) if name == "softmax"]
    gated = any(_split_gate(config, weights, i)[1].any() for i in softmax)
    if softmax:
        mixers["softmax"] = _softmax_settings(config) | {"qk_norm": True, "output_gate": gated}
    layers: Weights = {}
    for i, name in enumerate(pattern):
        layer = _gdn_layer(config, weights, i) if name == "gdn" else _gated_layer(config, weights, i, gated)
        layers |= _in_mixer(i, layer)
    return mixers, pattern, layers


def _split_gate(config: Any, weights: Weights, layer: int) -> tuple[Tensor, Tensor]:
    """Queries and gates [H K, D] of a `q_proj` that has both, head by head."""
    both = weights[f"model.layers.{layer}.self_attn.q_proj.weight"].unflatten(0, (config.num_attention_heads, 2, -1))
    return both[:, 0].flatten(0, 1), both[:, 1].flatten(0, 1)


def _gated_layer(config: Any, weights: Weights, layer: int, gated: bool) -> Weights:
    found = _below(weights, f"model.layers.{layer}.self_attn.")
    found["q_proj.weight"], gate = _split_gate(config, weights, layer)
    for name in ("q_norm.weight", "k_norm.weight"):
        found[name] = found[name] + 1
    if gated:
        return found | {"g_proj.weight": gate}
    return found | {"o_proj.weight": found["o_proj.weight"] / 2}


def _linear_settings(config: Any) -> Settings:
    return {"conv_size": config.linear_conv_kernel_dim, "norm_eps": config.rms_norm_eps}


def _gdn_layer(config: Any, weights: Weights, layer: int) -> Weights:
    theirs = _below(weights, f"model.layers.{layer}.linear_attn.")
    key_dim = config.linear_num_key_heads * config.linear_key_head_dim
    renamed = {
        "g_proj.weight": "in_proj_z.weight",
        "b_proj.weight": "in_proj_b.weight",
        "a_proj.weight": "in_proj_a.weight",
        "dt_bias": "dt_bias",
        "A_log": "A_log",
        "o_norm.weight": "norm.weight",
        "o_proj.weight": "out_proj.weight",
    }
    parts = _split_rows(theirs["in_proj_qkv.weight"], key_dim, "proj")
    return {
        **{ours: theirs[name] for ours, name in renamed.items()},
        **parts,
        **_split_rows(theirs["conv1d.weight"], key_dim, "conv1d"),
    }


def _split_rows(x: Tensor, key_dim: int, name: str) -> Weights:
    """The rows of q, of k (`key_dim` each) and of v."""
    parts = x.split([key_dim, key_dim, len(x) - 2 * key_dim])
    return {f"{letter}_{name}.weight": part for letter, part in zip("qkv", parts, strict=True)}


def _read_kda(config: Any, weights: Weights) -> tuple[dict[str, Settings], list[str], Weights]:
    """kimi_linear, as far as it is all KDA and all dense."""
    depth = config.num_hidden_layers
    if set(config.layer_types) != {"linear_attention"} or set(config.mlp_layer_types) != {"dense"}:
        raise UserError("layer_types, mlp_layer_types: only stacks of KDA layers with dense MLPs can be imported.")
    heads, size = config.linear_num_heads, config.linear_head_dim
    settings = _linear_settings(config) | {"head_k_dim": size, "num_heads": heads, "expand_v": 1.0}
    renamed = {
        "f_proj.0.weight": "forget_gate.f_a_proj.weight",
        "f_proj.1.weight": "forget_gate.f_b_proj.weight",
        "dt_bias": "forget_gate.dt_bias",
        "g_proj.0.weight": "g_a_proj.weight",
        "g_proj.1.weight": "g_b_proj.weight",
        **{f"{name}.weight": f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "b_proj", "o_norm", "o_proj")},
    }
    layers: Weights = {}
    for i in range(depth):
        theirs = _below(weights, f"model.layers.{i}.self_attn.")
        layer = {ours: theirs[name] for ours, name in renamed.items()}
        layer |= _split_rows(theirs["conv1d.weight"], heads * size, "conv1d")
        layers |= _in_mixer(i, layer | {"A_log": theirs["forget_gate.A_log"].flatten()})
    return {"kda": settings}, ["kda"] * depth, layers


def linearised(model: Foreign, weights: Weights, fresh: Weights) -> Weights:
    """Weights of a hybrid that begins from a softmax model: everything that both have, the rest from `fresh`.

    Queries, keys, values and outputs of layers that became linear come from the softmax layers, grouped heads repeated.
    """
    found = dict(fresh)
    settings = model.mixers["softmax"]
    groups = settings["num_heads"] // settings["num_kv_heads"]
    for name, tensor in weights.items():
        if name not in fresh:
            continue
        if tensor.shape != fresh[name].shape and name.endswith(("k_proj.weight", "v_proj.weight")):
            by_head = tensor.unflatten(0, (settings["num_kv_heads"], -1))  # [HKV, K, D]
            tensor = by_head.repeat_interleave(groups, dim=0).flatten(0, 1)
        found[name] = tensor
    return found


def _refuse(config: PreTrainedConfig, expected: Settings) -> None:
    for name, value in expected.items():
        if getattr(config, name, value) != value:
            raise UserError(f"{name}={getattr(config, name)}: only {name}={value} can be imported.")


def fit_vocabulary(weights: Weights, vocab_size: int, padded: int) -> Weights:
    """Embedding and head with `padded` rows: those of the tokenizer's `vocab_size` tokens, then zeros."""
    found = dict(weights)
    for name in {"embeddings.weight", "lm_head.weight"} & weights.keys():
        rows = weights[name][:vocab_size]
        if len(rows) < vocab_size:
            raise UserError(f"The tokenizer has {vocab_size:,} tokens, the model only {len(rows):,}: give its own.")
        found[name] = torch.nn.functional.pad(rows, (0, 0, 0, padded - vocab_size))
    return found
