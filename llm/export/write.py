"""A model as a folder that transformers loads: natively, or with its own code (``trust_remote_code=True``)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from llm.config import TrainConfig
from llm.export.bundle import bundle
from llm.export.fla import fla_type, write_fla
from llm.export.modeling_mixlab import MixlabConfig, MixlabForCausalLM
from llm.export.native import Architecture
from llm.layout import layer_names
from llm.model.decoder import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODELING = "llm.export.modeling_mixlab"


def write_native(
    folder: Path, model: Decoder, tokenizer: PreTrainedTokenizerBase, config: TrainConfig, architecture: Architecture
) -> None:
    """Write the model as one of `architecture`: weights (fp32), configuration, generation settings and tokenizer."""
    settings = generation_config(tokenizer)
    exported = architecture.convert(
        model, max_context=config.context, end=settings.eos_token_id, begin=settings.bos_token_id
    )
    settings.use_cache = exported.config.use_cache
    exported.generation_config = settings
    exported.save_pretrained(folder)
    save_tokenizer(folder, tokenizer, config.context)


def write_flash_linear_attention(
    folder: Path, model: Decoder, tokenizer: PreTrainedTokenizerBase, config: TrainConfig
) -> None:
    """Write the model for flash-linear-attention's classes: the same parts. The model must fit (`fla_type`)."""
    kind, _ = fla_type(model)
    settings = generation_config(tokenizer)
    write_fla(folder, model, kind, max_context=config.context, end=settings.eos_token_id, begin=settings.bos_token_id)
    settings.save_pretrained(folder)
    save_tokenizer(folder, tokenizer, config.context)


def write_self_contained(folder: Path, model: Decoder, tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> None:
    """Write the model with its code: weights (fp32), modules, configuration, generation settings and tokenizer."""
    hf_config = mixlab_config(model, config)
    folder.mkdir(parents=True)
    for name, text in bundle(MODELING, class_names(hf_config.mixers)).items():
        (folder / name).write_text(text, encoding="utf-8")
    with torch.device("meta"):
        exported = MixlabForCausalLM(hf_config)
    exported.model = model
    exported.generation_config = generation_config(tokenizer)
    exported.save_pretrained(folder)
    save_tokenizer(folder, tokenizer, config.context)


def mixlab_config(model: Decoder, config: TrainConfig) -> MixlabConfig:
    """The transformers configuration from which `MixlabForCausalLM` builds the same decoder."""
    names = layer_names(config)
    last_part = MODELING.rpartition(".")[2]
    return MixlabConfig(
        vocab_size=model.vocab_size,
        hidden_size=config.model.d_model,
        intermediate_size=model.layers[0].mlp.up_proj.out_features,
        mixer_types=names,
        mixers={name: mixer_settings(config.mixers[name]) for name in dict.fromkeys(names)},
        rms_norm_eps=config.model.norm_eps,
        initializer_range=config.model.init_std,
        max_position_embeddings=config.context,
        tie_word_embeddings=config.model.tie_embeddings,
        residual=config.residual,
        dtype="float32",
        auto_map={
            "AutoConfig": f"{last_part}.{MixlabConfig.__name__}",
            "AutoModelForCausalLM": f"{last_part}.{MixlabForCausalLM.__name__}",
        },
    )


def mixer_settings(settings: Any) -> Any:
    """Settings without what is for Hydra alone (`_convert_` and the like), at every depth."""
    if isinstance(settings, dict):
        kept = {k: v for k, v in settings.items() if not k.startswith("_") or k == "_target_"}
        return {name: mixer_settings(value) for name, value in kept.items()}
    return [mixer_settings(item) for item in settings] if isinstance(settings, list) else settings


def class_names(settings: Any) -> set[str]:
    """Every `_target_` in settings, at every depth."""
    if isinstance(settings, dict):
        own = {settings["_target_"]} if "_target_" in settings else set()
        return own.union(*map(class_names, settings.values()))
    return set().union(*map(class_names, settings)) if isinstance(settings, list) else set()


def generation_config(tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Stop at the end of a document; an empty prompt begins with it where there is no other token for that."""
    end = tokenizer.eos_token_id
    begin = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return GenerationConfig(eos_token_id=end, bos_token_id=begin, pad_token_id=pad)


def save_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase, context: int) -> None:
    """The tokenizer for batches of a decoder: padding on the left, with the end of document if nothing else."""
    tokenizer = copy.deepcopy(tokenizer)
    for name in ("is_local", "local_files_only"):  # how it was loaded here is not a property of it
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"  # the latter is what is written
    tokenizer.model_max_length = context
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
