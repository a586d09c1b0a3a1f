"""Text as a source of rows: files that are tokenised into memory, streamed, or were prepared before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from llm.config import DataConfig
from llm.data.encode import Encoder
from llm.data.files import content_hash, entries_of, file_size, find_files, sets_of
from llm.data.order import derive_key, digest, permutation
from llm.data.prepared import is_prepared, open_prepared
from llm.data.rows import Rows
from llm.data.shards import Shard, documents_of, open_shard
from llm.data.split import is_held_out, nothing_held_out, nothing_left
from llm.data.store import TokenStore, store_documents
from llm.data.stored import HeldOutRows, StoredRows, pack
from llm.data.stream import Corpus, StreamedRows
from llm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

SPREAD = 16  # shards that held-out documents are drawn from by turns


class TextSource:
    """Shards of documents as a source of rows; subclasses say which shards."""

    def training_shards(self) -> list[Shard]:
        """The shards of the text to train on, in a fixed order."""
        raise NotImplementedError

    def validation_shards(self) -> dict[str, list[Shard]]:
        """The shards of held-out text by the name of their set; none: `data.held_out` splits the text to train on."""
        raise NotImplementedError

    def validates_itself(self) -> bool:
        """Is there held-out text beside the text to train on?"""
        raise NotImplementedError

    def share(self, config: DataConfig) -> float:
        """The share of documents to hold out: none where there is other text to validate on."""
        return 0.0 if self.validates_itself() else config.held_out

    def identity(self) -> str:
        """Changes whenever the text to train on does."""
        raise NotImplementedError

    def training_rows(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> Rows:
        """The endless rows of training. Raises UserError for files or settings that cannot be used."""
        encoder = Encoder(tokenizer, bos=config.bos)
        if self.mode(config) == "stream":
            return self._streamed_rows(config, encoder, context)
        store = self.training_store(config, encoder)
        layout = pack(store, context, config.packing, padding_id=encoder.eos_id)
        return StoredRows(config.name, layout, seed=config.seed, separate=config.separate)

    def training_store(self, config: DataConfig, encoder: Encoder) -> TokenStore:
        """All tokens of the text to train on."""
        shards, share = self.training_shards(), self.share(config)
        store = store_documents(encoder.stream(t for t in documents_of(shards) if not is_held_out(t, share)))
        if not store.n_tokens:
            raise nothing_left(f"data={config.name}", shards, share)
        documents, tokens = f"{store.n_documents:,} documents", f"{store.n_tokens:,} tokens"
        log.info("data=%s: %s, %s in memory", config.name, documents, tokens)
        return store

    def validation_sets(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, context: int
    ) -> dict[str, HeldOutRows]:
        """The held-out rows by name: at `context`, and as NAME@CONTEXT at each of `data.validation_contexts`."""
        encoder = Encoder(tokenizer, bos=config.bos)
        sets: dict[str, HeldOutRows] = {}
        for name, store in self.validation_stores(config, encoder).items():
            for length in dict.fromkeys([context, *config.validation_contexts]):
                label = name if length == context else f"{name}@{length}"
                sets[label] = HeldOutRows(label, store, length, padding_id=encoder.eos_id, separate=config.separate)
        return sets

    def validation_stores(self, config: DataConfig, encoder: Encoder) -> dict[str, TokenStore]:
        """The tokens of the held-out documents by the name of their set."""
        limit, share = config.validation_tokens, self.share(config)
        if share:
            documents = (text for text in spread(self.training_shards()) if is_held_out(text, share))
            store = store_documents(encoder.stream(documents), max_tokens=limit)
            if not store.n_tokens:
                raise nothing_held_out(f"data={config.name}", share)
            return {"validation": store}
        named = {name: documents_of(shards) for name, shards in self.validation_shards().items()}
        return {name: store_documents(encoder.stream(texts), max_tokens=limit) for name, texts in named.items()}

    def mode(self, config: DataConfig) -> str:
        """How the text is read: memory, stream or prepared."""
        if config.mode == "prepared":
            raise UserError("data.mode=prepared: this source is not prepared. Run scripts/prepare_data.py first.")
        return "stream" if config.mode == "auto" else config.mode

    def _streamed_rows(self, config: DataConfig, encoder: Encoder, context: int) -> StreamedRows:
        corpus = Corpus(
            self.training_shards(),
            encoder,
            config.seed,
            self.share(config),
            skip_unreadable=config.unreadable == "skip",
            max_streams=config.streams,
        )
        packing = {"packing": config.packing, "separate": config.separate}
        return StreamedRows(config.name, corpus, context, identity=self.identity(), **packing)


class TextFiles(TextSource):
    """Files of documents: jsonl, parquet, arrow (one record a document) and txt (one document), also as .zst and .gz.

    `path` may also be one folder that scripts/prepare_data.py wrote.
    """

    def __init__(self, path: Any, validation_path: Any = None, *, text_column: str = "text") -> None:
        if path is not None:
            entries_of(path)
        self._validation = sets_of(validation_path)
        self.path, self.text_column = path, text_column

    def training_shards(self) -> list[Shard]:
        return self._shards(self.path, "data.path")

    def validation_shards(self) -> dict[str, list[Shard]]:
        return {name: self._shards(path, "data.validation_path") for name, path in self._validation.items()}

    def validates_itself(self) -> bool:
        return bool(self._validation)

    def identity(self) -> str:
        return digest(self.text_column, [[PurePath(file).name, content_hash(file)] for file in find_files(self.path)])

    def mode(self, config: DataConfig) -> str:
        if is_prepared(self.path) or config.mode == "prepared":
            return "prepared"
        if config.mode != "auto":
            return config.mode
        size = sum(file_size(file) for file in find_files(self.path))
        return "memory" if size <= config.memory_mb * 1_000_000 else "stream"

    def training_store(self, config: DataConfig, encoder: Encoder) -> TokenStore:
        if self.mode(config) == "prepared":
            return open_prepared(self.path, "train", encoder)
        return super().training_store(config, encoder)

    def validation_stores(self, config: DataConfig, encoder: Encoder) -> dict[str, TokenStore]:
        if self.mode(config) != "prepared" or self.validates_itself():
            return super().validation_stores(config, encoder)
        store = open_prepared(self.path, "validation", encoder)
        return {"validation": store.head(config.validation_tokens)} if store.n_tokens else {}

    def _shards(self, path: Any, key: str) -> list[Shard]:
        return [open_shard(file, text_column=self.text_column) for file in find_files(path, key=key)]


def spread(shards: list[Shard]) -> Iterator[str]:
    """Every document of the shards, those of several shards and of places all over them by turns.

    So the first of them, whatever number of them is wanted, are of every kind that the shards hold.
    """
    order = permutation(len(shards), derive_key("spread", len(shards)))
    for start in range(0, len(order), SPREAD):
        some = order[start : start + SPREAD]
        running = [shards[i].groups(key=derive_key("spread", i), part=0, parts=1, skip=0) for i in some]
        while running:
            for groups in list(running):
                group = next(groups, None)
                if group is None:
                    running.remove(groups)
                else:
                    yield from group
