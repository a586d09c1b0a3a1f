"""Models that an architecture of transformers computes without loss, and their weights under its names.

    llama            softmax attention everywhere
    qwen3            the same with normalised queries and keys, or a sliding window
    qwen3_5_text     Gated DeltaNet and softmax attention in any order
    kimi_linear      Kimi Delta Attention everywhere

Such an export needs no code of ours. Where an architecture does not fit, `blockers` says why. A stack without any
softmax layer loads, but transformers cannot decode it with a cache: it reads the whole text again for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from llm.mixers.base import TokenMixer
from llm.mixers.gdn import GatedDeltaNet
from llm.mixers.kda import KimiDeltaAttention
from llm.mixers.recurrent import RecurrentMixer
from llm.mixers.softmax import SoftmaxAttention
from llm.model.block import Block
from llm.model.decoder import Decoder
from llm.model.residual import STANDARD

Weights = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Architecture:
    """One model type of transformers: which mixers it has, what it asks of them, and how it is configured.

    `needs(mixer)` gives reasons why a mixer does not fit; `settings(model)` the fields of the configuration that depend
    on the mixers; `weights[class](mixer)` a mixer's tensors by their names in a layer. `zero_centred`: norms other than
    a mixer's output norm multiply by 1 + weight. `ties`: embedding and head can share their matrix.
    """

    model_type: str
    weights: dict[type[TokenMixer], Callable[[Any], Weights]]
    needs: Callable[[TokenMixer], Iterable[str]]
    settings: Callable[[list[TokenMixer]], dict[str, Any]]
    zero_centred: bool = False
    ties: bool = True

    def blockers(self, model: Decoder) -> list[str]:
        """Why this architecture cannot hold the model; empty if it can."""
        mixers = [block.mixer for block in model.layers]
        found = [f"has no {type(m).__name__}" for m in mixers if type(m) not in self.weights]
        if not found:
            found = [reason for mixer in mixers for reason in self.needs(mixer)]
        if not found and len(set(_norm_epsilons(model))) > 1:
            found = ["has one epsilon for all norms"]
        if not found:
            for kind in self.weights:
                if len({_sizes(m) for m in mixers if type(m) is kind}) > 1:
                    found.append(f"has equal sizes in all layers of {kind.__name__}")
        return list(dict.fromkeys(found))

    def convert(self, model: Decoder, *, max_context: int, end: int, begin: int) -> PreTrainedModel:
        """The model as one of transformers; `end` and `begin` are the ids of the tokens that delimit documents."""
        tied = self.ties and model.lm_head.weight is model.embeddings.weight
        config = CONFIG_MAPPING[self.model_type](
            vocab_size=model.vocab_size,
            hidden_size=model.embeddings.embedding_dim,
            intermediate_size=model.layers[0].mlp.up_proj.out_features,
            num_hidden_layers=len(model.layers),
            rms_norm_eps=model.norm.eps,
            initializer_range=model.init_std,
            max_position_embeddings=max_context,
            tie_word_embeddings=tied,
            use_cache=has_cache(model),
            dtype="float32",
            eos_token_id=end,
            bos_token_id=begin,
            pad_token_id=None,  # the embedding of a token that is named here gets no gradient
            **self.settings([block.mixer for block in model.layers]),
        )
        exported = _empty(config)
        exported.load_state_dict(self.state_dict(model), strict=True)
        return exported

    def state_dict(self, model: Decoder) -> Weights:
        """The weights by transformers' names, without the padding of the vocabulary."""
        found = {
            "model.embed_tokens.weight": model.embeddings.weight[: model.vocab_size],
            "model.norm.weight": self._norm(model.norm),
            "lm_head.weight": model.head_weight[: model.vocab_size],
        }
        for i, block in enumerate(model.layers):
            found |= {f"model.layers.{i}.{name}": tensor for name, tensor in self._layer(block).items()}
        return {name: tensor.detach() for name, tensor in found.items()}

    def _layer(self, block: Block) -> Weights:
        found = {
            "input_layernorm.weight": self._norm(block.mixer_norm),
            "post_attention_layernorm.weight": self._norm(block.mlp_norm),
            **{f"mlp.{name}": tensor for name, tensor in block.mlp.state_dict().items()},
        }
        for name, tensor in self.weights[type(block.mixer)](block.mixer).items():
            centred = self.zero_centred and name.endswith(("q_norm.weight", "k_norm.weight"))
            found[name] = tensor - 1 if centred else tensor
        return found

    def _norm(self, norm: nn.RMSNorm) -> Tensor:
        return norm.weight - 1 if self.zero_centred else norm.weight


def has_cache(model: Decoder) -> bool:
    """Whether transformers can decode the model with a cache: only where a layer is softmax attention."""
    return any(isinstance(block.mixer, SoftmaxAttention) for block in model.layers)


def fitting(model: Decoder) -> tuple[Architecture | None, str]:
    """The first architecture that holds the model and "", or None and what stands in the way."""
    if model.residual.kind != STANDARD:
        return None, f"no architecture has residual={model.residual.kind}"
    reasons = {}
    for architecture in ARCHITECTURES:
        blockers = architecture.blockers(model)
        if not blockers:
            return architecture, ""
        reasons[architecture] = blockers
    kinds = {type(block.mixer) for block in model.layers}
    close = {a: found for a, found in reasons.items() if kinds <= a.weights.keys()}
    if close:
        return None, "; ".join(f"{a.model_type} {', '.join(found)}" for a, found in close.items())
    return None, f"no architecture has {' and '.join(sorted(kind.__name__ for kind in kinds))}"


def _empty(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration; its weights are about to be loaded."""
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(config).eval()


def _norm_epsilons(model: Decoder) -> list[float]:
    """Of every normalisation, those in mixers included."""
    return [m.eps for m in model.modules() if isinstance(getattr(m, "eps", None), float)]


def _sizes(mixer: TokenMixer) -> tuple:
    """Shapes of the parameters and the numbers among the settings."""
    numbers = {name: v for name, v in vars(mixer).items() if isinstance(v, int | float) and name != "training"}
    shapes = tuple((name, tuple(p.shape)) for name, p in mixer.named_parameters())
    return shapes, tuple(sorted(numbers.items())) if not isinstance(mixer, SoftmaxAttention) else (mixer.rope_theta,)


def _softmax_weights(mixer: SoftmaxAttention) -> Weights:
    return {f"self_attn.{name}": tensor for name, tensor in mixer.state_dict().items()}


def _gated_softmax_weights(mixer: SoftmaxAttention) -> Weights:
    """With the output gate in `q_proj`. Without a gate: sigmoid(0) = 1/2, and `o_proj` doubled."""
    found = _softmax_weights(mixer)
    gate = found.pop("self_attn.g_proj.weight", None)
    if gate is None:
        gate = torch.zeros_like(mixer.q_proj.weight)
        found["self_attn.o_proj.weight"] = 2 * mixer.o_proj.weight
    by_head = [w.unflatten(0, (mixer.num_heads, -1)) for w in (mixer.q_proj.weight, gate)]  # [H, K, D] each
    return found | {"self_attn.q_proj.weight": torch.cat(by_head, dim=1).flatten(0, 1)}


def _convolution(mixer: RecurrentMixer) -> Tensor:
    """One depthwise convolution over q, k and v: [2 H K + H V, 1, taps]."""
    return torch.cat([getattr(mixer, name).weight for name in mixer.conv_names])


def _gdn_weights(mixer: GatedDeltaNet) -> Weights:
    found = {
        "in_proj_qkv.weight": torch.cat([mixer.q_proj.weight, mixer.k_proj.weight, mixer.v_proj.weight]),
        "in_proj_z.weight": mixer.g_proj.weight,
        "in_proj_b.weight": mixer.b_proj.weight,
        "in_proj_a.weight": mixer.a_proj.weight,
        "conv1d.weight": _convolution(mixer),
        "dt_bias": mixer.dt_bias,
        "A_log": mixer.A_log,
        "norm.weight": mixer.o_norm.weight,
        "out_proj.weight": mixer.o_proj.weight,
    }
    return {f"linear_attn.{name}": tensor for name, tensor in found.items()}


def _kda_weights(mixer: KimiDeltaAttention) -> Weights:
    same = ("q_proj", "k_proj", "v_proj", "b_proj", "o_norm", "o_proj")
    found = {f"{name}.weight": getattr(mixer, name).weight for name in same}
    found |= {
        "conv1d.weight": _convolution(mixer),
        "forget_gate.f_a_proj.weight": mixer.f_proj[0].weight,
        "forget_gate.f_b_proj.weight": mixer.f_proj[1].weight,
        "forget_gate.dt_bias": mixer.dt_bias,
        "forget_gate.A_log": mixer.A_log.view(1, 1, -1, 1),
        "g_a_proj.weight": mixer.g_proj[0].weight,
        "g_b_proj.weight": mixer.g_proj[1].weight,
    }
    return {f"self_attn.{name}": tensor for name, tensor in found.items()}


def _llama_needs(mixer: SoftmaxAttention) -> Iterable[str]:
    if not isinstance(mixer.q_norm, nn.Identity):
        yield "has no qk_norm"
    if mixer.window is not None:
        yield "has no window"
    yield from _rotary_needs(mixer)


def _qwen3_needs(mixer: SoftmaxAttention) -> Iterable[str]:
    yield from _qk_norm_needs(mixer)
    yield from _rotary_needs(mixer)


def _qwen3_5_needs(mixer: TokenMixer) -> Iterable[str]:
    if isinstance(mixer, SoftmaxAttention):
        yield from _qk_norm_needs(mixer)
        if mixer.rope_theta is None:
            yield "needs rope_theta"
        if mixer.window is not None:
            yield "has no window"
    else:
        yield from _delta_needs(mixer)


def _kda_needs(mixer: KimiDeltaAttention) -> Iterable[str]:
    yield from _delta_needs(mixer)
    if mixer.head_k_dim != mixer.head_v_dim:
        yield "needs expand_v=1"
    if mixer.gate_lower_bound is not None:
        yield "has no gate_lower_bound"
    if mixer.output_gate_bias:
        yield "has no output_gate_bias"


def _delta_needs(mixer: Any) -> Iterable[str]:
    if not mixer.conv_names:
        yield "needs conv_size"
    if mixer.beta_max != 1:
        yield "has no negative_eigenvalues"
    if mixer.rotation is not None:
        yield "has no selective_rope"
    if mixer.key_heads != mixer.num_heads:
        yield "has no key_heads"


def _qk_norm_needs(mixer: SoftmaxAttention) -> Iterable[str]:
    if isinstance(mixer.q_norm, nn.Identity):
        yield "needs qk_norm=true"


def _rotary_needs(mixer: SoftmaxAttention) -> Iterable[str]:
    if mixer.rope_theta is None:
        yield "needs rope_theta"
    if mixer.g_proj is not None:
        yield "has no output_gate"


def _softmax_settings(mixers: list[TokenMixer]) -> dict[str, Any]:
    mixer = next(m for m in mixers if isinstance(m, SoftmaxAttention))
    return {
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(mixer.rope_theta)},
    }


def _qwen3_settings(mixers: list[Any]) -> dict[str, Any]:
    windows = [m.window for m in mixers]
    return _softmax_settings(mixers) | {
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        "use_sliding_window": any(windows),
        "sliding_window": next((w for w in windows if w is not None), None),
    }


def _qwen3_5_settings(mixers: list[TokenMixer]) -> dict[str, Any]:
    found: dict[str, Any] = {"layer_types": _layer_types(mixers)}
    if "full_attention" in found["layer_types"]:
        found |= _softmax_settings(mixers)
        found["rope_parameters"] |= {"partial_rotary_factor": 1.0}
    linear = next((m for m in mixers if isinstance(m, GatedDeltaNet)), None)
    if linear is not None:
        found |= {
            "linear_conv_kernel_dim": linear.q_conv1d.size,
            "linear_key_head_dim": linear.head_k_dim,
            "linear_value_head_dim": linear.head_v_dim,
            "linear_num_key_heads": linear.num_heads,
            "linear_num_value_heads": linear.num_heads,
        }
    return found


def _kimi_settings(mixers: list[Any]) -> dict[str, Any]:
    return {
        "layer_types": _layer_types(mixers),
        "mlp_layer_types": ["dense"] * len(mixers),
        "linear_head_dim": mixers[0].head_k_dim,
        "linear_num_heads": mixers[0].num_heads,
        "linear_conv_kernel_dim": mixers[0].q_conv1d.size,
    }


def _layer_types(mixers: list[TokenMixer]) -> list[str]:
    return ["full_attention" if isinstance(m, SoftmaxAttention) else "linear_attention" for m in mixers]


ARCHITECTURES = (
    Architecture("llama", {SoftmaxAttention: _softmax_weights}, _llama_needs, _softmax_settings),
    Architecture("qwen3", {SoftmaxAttention: _softmax_weights}, _qwen3_needs, _qwen3_settings),
    Architecture(
        "qwen3_5_text",
        {GatedDeltaNet: _gdn_weights, SoftmaxAttention: _gated_softmax_weights},
        _qwen3_5_needs,
        _qwen3_5_settings,
        zero_centred=True,
    ),
    Architecture("kimi_linear", {KimiDeltaAttention: _kda_weights}, _kda_needs, _kimi_settings, ties=False),
)
