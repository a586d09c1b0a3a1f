"""The decoder as a transformers model. The same file serves inside the project and, with its imports, in an export."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from llm.export.targets import find_class
from llm.mixers.base import MixerState, TokenMixer
from llm.model.decoder import Decoder
from llm.model.recompute import FULL, NONE
from llm.model.room import with_room
from mixer_kernels.segments import Segments

ROOM = 256  # a cache that grows does so by this many tokens at a time
# the name of the cache in outputs: "cache" since transformers 5.2x, "past_key_values" before
CACHE_FIELD = next(f.name for f in dataclasses.fields(CausalLMOutputWithPast) if f.name in ("cache", "past_key_values"))


class MixlabConfig(PreTrainedConfig):
    """Sizes of the decoder, the mixer of each layer (`mixer_types`), and each mixer's class and settings (`mixers`)."""

    model_type = "mixlab"

    def __init__(
        self,
        *,
        vocab_size: int = 0,
        hidden_size: int = 0,
        intermediate_size: int = 0,
        mixer_types: list[str] | None = None,
        mixers: dict[str, dict[str, Any]] | None = None,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        max_position_embeddings: int = 0,
        tie_word_embeddings: bool = False,
        residual: str = "standard",
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.mixer_types = list(mixer_types or [])
        self.mixers = dict(mixers or {})
        self.num_hidden_layers = len(self.mixer_types)
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.max_position_embeddings = max_position_embeddings
        self.residual = residual
        self.use_cache = use_cache
        kwargs.pop("num_hidden_layers", None)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class MixlabCache(Cache):
    """What decoding carries along: the mixers' states, and how many tokens (padding included) they have seen."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: list[MixerState] | None = None
        self.tokens = 0
        self.room = 0

    def advance(self, state: list[MixerState], tokens: int) -> None:
        """Take the state after `tokens` more tokens."""
        self.state, self.tokens = state, self.tokens + tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.tokens, self.room = None, 0, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        select = lambda x: x.index_select(0, indices.to(x.device))  # noqa: E731
        self.state = [{name: select(x) for name, x in layer.items()} for layer in self.state or []]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        repeat = lambda x: x.repeat_interleave(repeats, dim=0)  # noqa: E731
        self.state = [{name: repeat(x) for name, x in layer.items()} for layer in self.state or []]

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("a recurrent state cannot go back: assisted decoding is not possible with this model")

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.state is not None

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # not to be treated as a cache without a length


class MixlabForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder of token mixers with transformers' interface for generation and fine-tuning."""

    config_class = MixlabConfig
    base_model_prefix = "model"
    _no_split_modules = ("Block",)
    _skip_keys_device_placement = ("past_key_values", "cache")
    _tied_weights_keys = {"model.lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012
    supports_gradient_checkpointing = True
    _is_stateful = True  # the state cannot be rolled back, as assisted decoding would

    def __init__(self, config: MixlabConfig) -> None:
        super().__init__(config)
        self.model = Decoder(
            config.vocab_size,
            config.hidden_size,
            [build_mixer(config, i) for i in range(config.num_hidden_layers)],
            config.intermediate_size,
            tie_embeddings=config.tie_word_embeddings,
            norm_eps=config.rms_norm_eps,
            init_std=config.initializer_range,
            residual=config.residual,
        )
        self._keep_in_fp32_modules_strict = small_parameters(self.model, "model")
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MixlabCache | None = None,
        cache: MixlabCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits of tokens [B, T] in fp32, [B, T, W].

        Zeros of `attention_mask` before the first one are left padding, zeros after it are right padding; holes are not
        supported. A 0 in `position_ids` begins a document that does not see what came before it: packed rows.
        `cache` (`past_key_values` in older versions of transformers) is what an earlier call returned.
        """
        if kwargs.get("inputs_embeds") is not None:
            raise ValueError("this model takes input_ids, not inputs_embeds")
        cache = own_cache(past_key_values if cache is None else cache)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        with self._precision():
            if cache is not None and cache.state is not None:
                logits = self._continue(input_ids, attention_mask, cache)
            else:
                cache = (MixlabCache() if cache is None else cache) if use_cache else None
                hidden = self._begin(input_ids, make_segments(input_ids, attention_mask, position_ids), cache)
                kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
                logits = self.model.logits(hidden[:, kept])
        loss = None
        if labels is not None:
            sizes = {"vocab_size": self.config.vocab_size, "num_items_in_batch": num_items_in_batch}
            loss = self.loss_function(logits=logits, labels=labels, **sizes)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE_FIELD: cache})
        return output.to_tuple() if return_dict is False else output

    def _begin(self, input_ids: Tensor, segments: Segments, cache: MixlabCache | None) -> Tensor:
        """Hidden states [B, T, D] of the first tokens; the cache, if any, takes their state."""
        hidden, state, _ = self.model(input_ids, segments, return_state=cache is not None)
        if cache is not None:
            cache.advance(state, input_ids.shape[1])
        return hidden

    def _continue(self, input_ids: Tensor, attention_mask: Tensor | None, cache: MixlabCache) -> Tensor:
        """Logits [B, T, W] of tokens that follow those in the cache, which moves on."""
        tokens = input_ids.shape[1]
        if cache.tokens + tokens > cache.room:
            cache.room = -(-(cache.tokens + tokens) // ROOM) * ROOM
            cache.state = with_room(self.model, cache.state, cache.room)
        if tokens == 1 and not self._is_spread_out():
            logits_BW, state = self.model.step(input_ids[:, 0], cache.state)
            logits = logits_BW[:, None]
        else:
            if attention_mask is not None and not attention_mask[:, -tokens:].all():
                raise ValueError("padding after the first call is not possible: the state has no holes")
            hidden, state, _ = self.model(input_ids, state=cache.state, return_state=True)
            logits = self.model.logits(hidden)
        cache.advance(state, tokens)
        return logits

    def _is_spread_out(self) -> bool:
        """Whether layers lie on several devices, whose hooks see `forward` alone."""
        return len(set(getattr(self, "hf_device_map", {}).values())) > 1

    def _precision(self) -> contextlib.AbstractContextManager:
        """As in training: matrices in 16 bits if they are stored so, everything else in fp32."""
        weight = self.model.embeddings.weight
        if weight.dtype not in (torch.bfloat16, torch.float16):
            return contextlib.nullcontext()
        return torch.autocast(weight.device.type, dtype=weight.dtype)

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        """Blocks keep their inputs alone and compute the rest again in backward; called by transformers."""
        self.gradient_checkpointing = enable
        for block in self.model.layers:
            block.checkpointing = FULL if enable else NONE

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw the weights, unless they were loaded."""
        if not any(getattr(p, "_is_hf_initialized", False) for p in self.model.parameters()):
            self.model.reset_parameters()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        return self.model.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.lm_head = value

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


def build_mixer(config: MixlabConfig, layer_idx: int) -> TokenMixer:
    """The mixer of one layer, from the settings under its name."""
    settings = dict(config.mixers[config.mixer_types[layer_idx]])
    target = find_class(settings.pop("_target_"))
    return target(
        d_model=config.hidden_size, layer_idx=layer_idx, n_layers=config.num_hidden_layers,
        **{name: _instance(value) for name, value in settings.items()},
    )  # fmt: skip


def _instance(value: Any) -> Any:
    """A setting, with mappings that have a `_target_` replaced by the object that they describe."""
    if isinstance(value, list):
        return [_instance(item) for item in value]
    if not isinstance(value, dict):
        return value
    settings = {name: _instance(item) for name, item in value.items() if name != "_target_"}
    return find_class(value["_target_"])(**settings) if "_target_" in value else settings


def small_parameters(model: nn.Module, prefix: str) -> set[str]:
    """Patterns of the names of all parameters but the weights of linear maps and embeddings.

    Norms, biases, decays, short convolutions: few numbers that bf16 would spoil.
    """
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    names = (name for name, p in model.named_parameters() if id(p) not in matrices)
    return {re.sub(r"\d+", r"\\d+", re.escape(f"{prefix}.{name}")) + "$" for name in names}


def make_segments(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Segments:
    """Where documents begin in rows of tokens [B, T]: at the row's first token, after left padding, at positions 0."""
    starts = torch.zeros_like(input_ids, dtype=torch.bool)
    starts[:, 0] = True
    real = torch.ones_like(starts)
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}, expected [B, T]")
        real = attention_mask.bool()
        starts = starts | (real & (real.cumsum(dim=1) == 1))
    if position_ids is not None:
        starts = starts | (real & (position_ids == 0))
    return Segments.from_starts(starts)


def own_cache(cache: Cache | None) -> MixlabCache | None:
    """The cache if it is ours, None if it is empty; TypeError for one that another model filled."""
    if cache is None or isinstance(cache, MixlabCache):
        return cache
    if cache.get_seq_length() == 0:
        return None
    raise TypeError(
        f"cache: expected {MixlabCache.__name__} as an earlier call returned it, got {type(cache).__name__}"
    )
