"""Text as a source of rows: files that are tokenised into memory, streamed, or were prepared before."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from llm.config import DataConfig
from llm.data.encode import Encoder
from llm.data.files import find_files
from llm.data.rows import HeldOutRows, Rows, StoredRows
from llm.data.shards import read_documents
from llm.data.store import TokenStore, store_documents
from llm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class TextFiles:
    """Local files of documents: jsonl, parquet, arrow (one record a document) and txt (one document), also as .zst."""

    def __init__(self, path: Any, validation_path: Any = None, *, text_column: str = "text") -> None:
        self.path, self.validation_path, self.text_column = path, validation_path, text_column

    def training_rows(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> Rows:
        """The endless rows of training. Raises UserError for files or settings that cannot be used."""
        files = find_files(self.path)
        encoder = Encoder(tokenizer, bos=config.bos)
        documents = outside(config.held_out, read_documents(files, self.text_column))
        store = _into_memory(config.name, encoder.stream(documents))
        return StoredRows(config.name, store, context, seed=config.seed, separate=config.separate)

    def validation_sets(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, context: int
    ) -> dict[str, HeldOutRows]:
        """The held-out rows by name: at `context`, and as NAME@CONTEXT at each of `data.validation_contexts`."""
        encoder = Encoder(tokenizer, bos=config.bos)
        sets = {}
        for name, documents in self._held_out(config).items():
            store = store_documents(encoder.stream(documents), max_tokens=config.validation_tokens)
            for length in dict.fromkeys([context, *config.validation_contexts]):
                label = name if length == context else f"{name}@{length}"
                sets[label] = HeldOutRows(label, store, length, padding_id=encoder.eos_id, separate=config.separate)
        return sets

    def _held_out(self, config: DataConfig) -> dict[str, Iterable[str]]:
        """The held-out documents by the name of their set."""
        paths = self.validation_path
        if paths is None:
            files = find_files(self.path)
            split = inside(config.held_out, read_documents(files, self.text_column))
            return {"validation": split} if config.held_out else {}
        named = paths if isinstance(paths, Mapping) else {"validation": paths}
        return {
            name: read_documents(find_files(path, key="data.validation_path"), self.text_column)
            for name, path in named.items()
        }


def is_held_out(text: str, share: float) -> bool:
    """Does the document belong to the `share` of all documents that is held out? Decided by its text alone."""
    draw = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    return draw < share * 2**64


def outside(share: float, documents: Iterable[str]) -> Iterator[str]:
    """The documents that are not held out."""
    return (text for text in documents if not is_held_out(text, share)) if share else iter(documents)


def inside(share: float, documents: Iterable[str]) -> Iterator[str]:
    """The documents that are held out."""
    return (text for text in documents if is_held_out(text, share))


def _into_memory(name: str, documents: Iterator[np.ndarray]) -> TokenStore:
    store = store_documents(documents)
    if not store.n_tokens:
        raise UserError(f"data={name}: no document has any text (data.path, data.text_column, data.held_out).")
    log.info("data=%s: %s documents, %s tokens in memory", name, f"{store.n_documents:,}", f"{store.n_tokens:,}")
    return store
