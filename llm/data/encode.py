"""Texts -> tokens of documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from llm.tokenizer import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_CHARACTERS = 1 << 18  # text tokenised at a time: enough to fill a few threads, little enough to wait for


class Encoder:
    """Tokenises documents: the text's tokens, then end-of-document; a beginning-of-document token first if asked."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, bos: bool = False) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer = tokenizer if self._backend is None else None  # the backend alone travels lightly to processes
        self.eos_id: int = tokenizer.eos_token_id
        self._prefix = [tokenizer.bos_token_id] if bos else []
        self.dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
        self.fingerprint = f"{fingerprint(tokenizer)}{'-bos' if bos else ''}"

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """The tokens of each document, uint16 or uint32, without any that the tokenizer itself would add."""
        if self._backend is not None:
            ids = [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [np.asarray([*self._prefix, *document, self.eos_id], dtype=self.dtype) for document in ids]

    def stream(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """The tokens of each document, tokenised some at a time."""
        waiting: list[str] = []
        characters = 0
        for text in texts:
            waiting.append(text)
            characters += len(text)
            if characters >= BATCH_CHARACTERS:
                yield from self(waiting)
                waiting, characters = [], 0
        if waiting:
            yield from self(waiting)
