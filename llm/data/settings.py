"""Checks of the data settings that need no data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm.data.files import sets_of
from llm.errors import UserError, suggest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llm.config import DataConfig

CHOICES = {"mode": ("auto", "memory", "stream", "prepared"), "packing": ("cut", "fit"), "unreadable": ("raise", "skip")}
AT_LEAST = {"memory_mb": 0, "validation_tokens": 2, "streams": 1, "workers": 0}


def check_settings(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """UserError for a setting that no data could go with."""
    sets_of(config.validation_path)
    for key, known in CHOICES.items():
        value = getattr(config, key)
        if value not in known:
            raise UserError(f"data.{key}={value} is unknown.{suggest(value, known)}")
    for key, least in AT_LEAST.items():
        if getattr(config, key) < least:
            raise UserError(f"data.{key}={getattr(config, key)}: it has to be at least {least}.")
    if not 0 <= config.held_out < 1:
        raise UserError(f"data.held_out={config.held_out}: it is a share of the documents, from 0 up to but not 1.")
    if config.bos and tokenizer.bos_token_id is None:
        raise UserError("data.bos=true, but the tokenizer has no bos_token: set data.bos=false.")
