"""Text as a source of rows: files that are tokenised into memory, streamed, or were prepared before."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from llm.config import DataConfig
from llm.data.encode import Encoder
from llm.data.files import content_hash, file_size, find_files
from llm.data.order import digest
from llm.data.rows import Rows
from llm.data.shards import Shard, documents_of, open_shard
from llm.data.split import is_held_out
from llm.data.store import TokenStore, store_documents
from llm.data.stored import HeldOutRows, StoredRows
from llm.data.stream import Corpus, StreamedRows
from llm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class TextSource:
    """Shards of documents as a source of rows; subclasses say which shards."""

    def training_shards(self) -> list[Shard]:
        """The shards of the text to train on, in a fixed order."""
        raise NotImplementedError

    def validation_shards(self) -> dict[str, list[Shard]]:
        """The shards of held-out text by the name of their set; none: `data.held_out` splits the text to train on."""
        raise NotImplementedError

    def identity(self) -> str:
        """Changes whenever the text to train on does."""
        raise NotImplementedError

    def training_rows(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> Rows:
        """The endless rows of training. Raises UserError for files or settings that cannot be used."""
        encoder = Encoder(tokenizer, bos=config.bos)
        shards = self.training_shards()
        if self._fits_memory(config):
            documents = outside(config.held_out, documents_of(shards))
            store = _into_memory(config.name, encoder.stream(documents))
            return StoredRows(config.name, store, context, seed=config.seed, separate=config.separate)
        corpus = Corpus(
            shards,
            encoder,
            config.seed,
            config.held_out,
            skip_unreadable=config.unreadable == "skip",
            max_streams=config.streams,
        )
        packing = {"packing": config.packing, "separate": config.separate}
        return StreamedRows(config.name, corpus, context, identity=self.identity(), **packing)

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
        named = self.validation_shards()
        if named or not config.held_out:
            return {name: documents_of(shards) for name, shards in named.items()}
        return {"validation": inside(config.held_out, documents_of(self.training_shards()))}

    def _fits_memory(self, config: DataConfig) -> bool:
        return config.mode == "memory"


class TextFiles(TextSource):
    """Local files of documents: jsonl, parquet, arrow (one record a document) and txt (one document), also as .zst."""

    def __init__(self, path: Any, validation_path: Any = None, *, text_column: str = "text") -> None:
        self.path, self.validation_path, self.text_column = path, validation_path, text_column

    def training_shards(self) -> list[Shard]:
        return self._shards(self.path, "data.path")

    def validation_shards(self) -> dict[str, list[Shard]]:
        paths = self.validation_path
        if paths is None:
            return {}
        named = paths if isinstance(paths, Mapping) else {"validation": paths}
        return {name: self._shards(path, "data.validation_path") for name, path in named.items()}

    def identity(self) -> str:
        return digest(self.text_column, [[PurePath(file).name, content_hash(file)] for file in find_files(self.path)])

    def _shards(self, path: Any, key: str) -> list[Shard]:
        return [open_shard(file, text_column=self.text_column) for file in find_files(path, key=key)]

    def _fits_memory(self, config: DataConfig) -> bool:
        size = sum(file_size(file) for file in find_files(self.path))
        small = config.mode == "auto" and size <= config.memory_mb * 1_000_000
        return small or super()._fits_memory(config)


def outside(share: float, documents: Iterable[str]) -> Iterator[str]:
    """The documents that are not held out."""
    return (text for text in documents if not is_held_out(text, share))


def inside(share: float, documents: Iterable[str]) -> Iterator[str]:
    """The documents that are held out."""
    return (text for text in documents if is_held_out(text, share))


def _into_memory(name: str, documents: Iterator[np.ndarray]) -> TokenStore:
    store = store_documents(documents)
    if not store.n_tokens:
        raise UserError(f"data={name}: no document has any text (data.path, data.text_column, data.held_out).")
    log.info("data=%s: %s documents, %s tokens in memory", name, f"{store.n_documents:,}", f"{store.n_tokens:,}")
    return store
