"""Models of flash-linear-attention (0.6): stacks of GLA, Gated DeltaNet or KDA under its names, there and back.

Its classes hold our parameters almost name by name. They run on a GPU only, but are written and read without them:
settings are JSON, weights safetensors. Their attention layers need a further package and have no QK-norm: hybrids are
left to the other forms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from llm.errors import UserError
from llm.export.foreign import Foreign
from llm.mixers.base import TokenMixer
from llm.mixers.gdn import GatedDeltaNet
from llm.mixers.gla import GatedLinearAttention
from llm.mixers.kda import KimiDeltaAttention
from llm.model.decoder import Decoder
from llm.model.residual import STANDARD

Weights = dict[str, Tensor]
Settings = dict[str, Any]


@dataclass(frozen=True, eq=False)
class FlaType:
    """A model type of flash-linear-attention and the mixer of ours that it has in every layer.

    `needs(mixer)` gives reasons why a mixer does not fit. `settings(mixer)` are the fields of its configuration that
    `mixer_settings(fields)` turns into ours again. `only`: fields that must have these values to be read. `renamed`:
    parts of a mixer under other names there.
    """

    model_type: str
    architecture: str
    mixer: type[TokenMixer]
    name: str
    needs: Callable[[Any], Iterable[str]]
    settings: Callable[[Any], Settings]
    mixer_settings: Callable[[Settings], Settings]
    only: Settings
    renamed: dict[str, str]


def fla_type(model: Decoder) -> tuple[FlaType | None, str]:
    """The type that computes the same as the model and "", or None and what stands in the way."""
    if model.residual.kind != STANDARD:
        return None, f"flash-linear-attention has no residual={model.residual.kind}"
    mixers = [block.mixer for block in model.layers]
    kinds = {type(mixer) for mixer in mixers}
    found = next((t for t in TYPES if kinds == {t.mixer}), None)
    if found is None:
        return None, f"flash-linear-attention has no stack of {' and '.join(sorted(k.__name__ for k in kinds))}"
    reasons = [reason for mixer in mixers for reason in found.needs(mixer)]
    if len({m.eps for m in model.modules() if isinstance(getattr(m, "eps", None), float)}) > 1:
        reasons.append("has one epsilon for all norms")
    if len({tuple(sorted(found.settings(mixer).items())) for mixer in mixers}) > 1:
        reasons.append("has equal layers")
    reasons = list(dict.fromkeys(reasons))
    return (None, f"{found.model_type} {', '.join(reasons)}") if reasons else (found, "")


def write_fla(folder: Path, model: Decoder, kind: FlaType, *, max_context: int, end: int, begin: int) -> None:
    """Write configuration and weights (fp32) into the new `folder`; `end` and `begin`: ids of delimiting tokens."""
    folder.mkdir(parents=True)
    config = {
        "model_type": kind.model_type,
        "architectures": [kind.architecture],
        "vocab_size": model.vocab_size,
        "hidden_size": model.embeddings.embedding_dim,
        "num_hidden_layers": len(model.layers),
        "intermediate_size": model.layers[0].mlp.up_proj.out_features,
        "hidden_act": "swish",
        "norm_eps": model.norm.eps,
        "initializer_range": model.init_std,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": model.lm_head.weight is model.embeddings.weight,
        "attn": None,
        "dtype": "float32",
        "eos_token_id": end,
        "bos_token_id": begin,
        **kind.settings(model.layers[0].mixer),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: tensor.contiguous() for name, tensor in fla_weights(model, kind).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def fla_weights(model: Decoder, kind: FlaType) -> Weights:
    """The weights under flash-linear-attention's names, without the padding of the vocabulary."""
    found = {"model.norm.weight": model.norm.weight, "model.embeddings.weight": model.embeddings.weight}
    if model.lm_head.weight is not model.embeddings.weight:
        found["lm_head.weight"] = model.lm_head.weight
    for name in found.keys() - {"model.norm.weight"}:
        found[name] = found[name][: model.vocab_size]
    for i, block in enumerate(model.layers):
        for name, tensor in block.state_dict().items():
            found[f"model.layers.{i}.{_theirs(name, kind)}"] = tensor
        if isinstance(block.mixer, KimiDeltaAttention):  # theirs always has this bias
            missing = torch.zeros(block.mixer.value_dim)
            found.setdefault(f"model.layers.{i}.attn.g_proj.1.bias", missing)
    return {name: tensor.detach() for name, tensor in found.items()}


def read_fla(config: Settings, weights: Weights) -> Foreign:
    """A model from flash-linear-attention's config.json and weights. UserError where ours cannot compute the same."""
    kind = next(t for t in TYPES if t.model_type == config["model_type"])
    grouped = {key: config.get(key) for key in ("num_kv_heads", "num_v_heads")}
    config = config | {key: None for key, heads in grouped.items() if heads == config.get("num_heads")}
    for key, values in (COMMON | kind.only).items():
        value = config.get(key, values[0])
        if value not in values:
            raise UserError(
                f"{key}={value}: only {' or '.join(map(repr, values))} can be imported from fla's {kind.name}."
            )
    depth, tied = config["num_hidden_layers"], config.get("tie_word_embeddings", False)
    found = {_ours(name, kind): tensor for name, tensor in weights.items()}
    settings = kind.mixer_settings(config | {"weights": found}) | {"norm_eps": config.get("norm_eps", 1e-6)}
    if kind.mixer is KimiDeltaAttention and not settings["output_gate_bias"]:
        found = {name: tensor for name, tensor in found.items() if not name.endswith("g_proj.1.bias")}
    if tied:
        found.pop("lm_head.weight", None)
    sizes = {
        "d_model": config["hidden_size"],
        "n_layers": depth,
        "mlp_width": found["layers.0.mlp.down_proj.weight"].shape[1],
        "tie_embeddings": tied,
        "norm_eps": config.get("norm_eps", 1e-6),
        "init_std": config.get("initializer_range", 0.02),
    }
    return Foreign(
        {kind.name: settings}, [kind.name] * depth, sizes, found, config.get("max_position_embeddings", 2048)
    )


def _theirs(name: str, kind: FlaType) -> str:
    """Ours: mixer_norm.weight, mixer.o_norm.weight. Theirs: attn_norm.weight, attn.g_norm_swish_gate.weight."""
    first, _, rest = name.partition(".")
    if first == "mixer":
        part, _, tail = rest.partition(".")
        part = kind.renamed.get(part, part)
        return f"attn.{part}.{tail}" if tail else f"attn.{part}"
    return name.replace("mixer_norm", "attn_norm", 1)


def _ours(name: str, kind: FlaType) -> str:
    """The inverse of `_theirs`, for whole names."""
    found = name.removeprefix("model.").replace(".attn_norm.", ".mixer_norm.").replace(".attn.", ".mixer.")
    for ours, theirs in kind.renamed.items():
        found = found.replace(f".mixer.{theirs}.", f".mixer.{ours}.")
    return found


def _gla_needs(mixer: GatedLinearAttention) -> Iterable[str]:
    if mixer.gate_normalizer != 16:
        yield "needs gate_normalizer=16"
    if mixer.gk_proj[0].out_features != 16:
        yield "needs gate_rank=16"
    if mixer.rotation is not None:
        yield "has no selective_rope"
    if mixer.key_heads != mixer.num_heads:
        yield "has no key_heads"


def _delta_needs(mixer: Any) -> Iterable[str]:
    if not mixer.conv_names:
        yield "needs conv_size"
    if mixer.rotation is not None:
        yield "has no selective_rope"
    if mixer.key_heads != mixer.num_heads:
        yield "has no key_heads"


def _conv(mixer: Any) -> Settings:
    return {"use_short_conv": True, "conv_size": mixer.q_conv1d.size} if mixer.conv_names else {"use_short_conv": False}


def _gla_settings(mixer: GatedLinearAttention) -> Settings:
    return {
        "num_heads": mixer.num_heads,
        "expand_k": mixer.key_dim / mixer.d_model,
        "expand_v": mixer.value_dim / mixer.d_model,
        **_conv(mixer),
    }


def _delta_settings(mixer: GatedDeltaNet | KimiDeltaAttention) -> Settings:
    return {
        "num_heads": mixer.num_heads,
        "head_dim": mixer.head_k_dim,
        "expand_v": mixer.head_v_dim / mixer.head_k_dim,
        "allow_neg_eigval": mixer.beta_max == 2,
        **_conv(mixer),
    }


def _kda_settings(mixer: KimiDeltaAttention) -> Settings:
    bounded = mixer.gate_lower_bound is not None
    return _delta_settings(mixer) | {"safe_gate": bounded, "lower_bound": mixer.gate_lower_bound}


def _read_gla(config: Settings) -> Settings:
    heads = config.get("num_heads", 4)
    key, value = (config["hidden_size"] * config.get(f"expand_{kv}", d) for kv, d in (("k", 0.5), ("v", 1.0)))
    conv = config.get("conv_size", 4) if config.get("use_short_conv", False) else None
    return {"num_heads": heads, "head_k_dim": round(key) // heads, "expand_v": value / key, "conv_size": conv}


def _read_delta(config: Settings) -> Settings:
    return {
        "num_heads": config["num_heads"],
        "head_k_dim": config["head_dim"],
        "expand_v": config.get("expand_v", 2.0 if config["model_type"] == "gated_deltanet" else 1.0),
        "conv_size": config.get("conv_size", 4),
        "negative_eigenvalues": config.get("allow_neg_eigval", False),
    }


def _read_kda(config: Settings) -> Settings:
    biases = [x for name, x in config["weights"].items() if name.endswith("mixer.g_proj.1.bias")]
    return _read_delta(config) | {
        "gate_lower_bound": config.get("lower_bound") if config.get("safe_gate", False) else None,
        "output_gate_bias": any(bias.any() for bias in biases),
    }


COMMON: Settings = {"hidden_act": ("swish", "silu"), "attn": (None,), "attnres_block_size": (None,)}
TYPES = (
    FlaType(
        "gla", "GLAForCausalLM", GatedLinearAttention, "gla", _gla_needs, _gla_settings, _read_gla,
        only={
            "feature_map": (None,), "use_output_gate": (True,), "clamp_min": (None,), "use_gk": (True,),
            "use_gv": (False,), "num_kv_heads": (None,), "elementwise_affine": (True,),
        },
        renamed={"o_norm": "g_norm_swish_gate"},
    ),
    FlaType(
        "gated_deltanet", "GatedDeltaNetForCausalLM", GatedDeltaNet, "gdn", _delta_needs, _delta_settings, _read_delta,
        only={
            "use_gate": (True,), "use_short_conv": (True,), "num_v_heads": (None,),
            "output_gate_activation": ("swish", "silu"),
        },
        renamed={},
    ),
    FlaType(
        "kda", "KDAForCausalLM", KimiDeltaAttention, "kda", _delta_needs, _kda_settings, _read_kda,
        only={"use_short_conv": (True,), "num_v_heads": (None,)},
        renamed={},
    ),
)  # fmt: skip
