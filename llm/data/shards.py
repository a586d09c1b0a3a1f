"""Shards: files of documents, read in groups that can be reached without reading what comes before.

A shard is a sequence of blocks (a span of bytes of a line file, a row group, a record batch), a block a sequence of
groups, a group a list of documents. `groups` yields them in a given order of blocks, from any group on.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import urlsplit

from llm.data.compression import open_gzip, open_zstd
from llm.data.order import permutation
from llm.data.remote import is_url, open_url
from llm.errors import UserError

SPAN = 1 << 20  # bytes of a line file that make a block: some hundred documents, a fraction of a second to tokenise
GROUP_ROWS = 256  # rows of a table that make a group

Opener = Callable[[], BinaryIO]

COMPRESSED = {".zst": open_zstd, ".gz": open_gzip}
_SURROGATE = re.compile("[\ud800-\udfff]")


class Shard(Protocol):
    """A file of documents."""

    name: str

    def groups(self, *, key: int | None, part: int, parts: int, skip: int) -> Iterator[list[str]]:
        """The documents of part `part` of `parts` of the file, a list at a time, without its first `skip` lists.

        `key` orders the blocks (None: as in the file); part p has the blocks p, p + parts, ... of that order.
        Raises UserError when the file cannot be read as what its name says.
        """

    def n_blocks(self) -> int | None:
        """How many blocks there are; None when only reading the whole file would tell."""


def open_shard(name: str, *, text_column: str = "text") -> Shard:
    """The shard for the file `name`, a local path or a URL, by its suffix."""
    opener: Opener = partial(open_url, name) if is_url(name) else partial(open, name, "rb")
    bare, suffix = os.path.splitext(urlsplit(name).path if is_url(name) else name)
    if suffix in COMPRESSED:
        opener = partial(COMPRESSED[suffix], name, opener)
    else:
        bare, suffix = bare + suffix, ""
    if bare.endswith(".txt"):
        return TextShard(name, opener)
    if bare.endswith(".parquet"):
        return ParquetShard(name, opener, text_column)
    if bare.endswith(".arrow"):
        return ArrowShard(name, opener, text_column)
    return (CompressedLineShard if suffix else LineShard)(name, opener, text_column)


def documents_of(shards: Iterable[Shard]) -> Iterator[str]:
    """Every document of the shards, in order."""
    for shard in shards:
        for group in shard.groups(key=None, part=0, parts=1, skip=0):
            yield from group


def read_documents(files: Iterable[Path | str], text_column: str = "text") -> Iterator[str]:
    """Every document of the files, in order."""
    return documents_of(open_shard(str(file), text_column=text_column) for file in files)


def _block_order(n_blocks: int, key: int | None, part: int, parts: int) -> Sequence[int]:
    """The blocks of one part, in the order that `key` asks for."""
    order = range(n_blocks) if key is None else permutation(n_blocks, key)
    return order[part::parts]


class TextShard:
    """A plain text file: one document."""

    def __init__(self, name: str, opener: Opener) -> None:
        self.name, self._open = name, opener

    def n_blocks(self) -> int:
        return 1

    def groups(self, *, key: int | None, part: int, parts: int, skip: int) -> Iterator[list[str]]:
        if part == 0 and skip == 0:
            with self._open() as file:
                try:
                    yield [file.read().decode("utf-8")]
                except UnicodeDecodeError as error:
                    raise UserError(f"{self.name}: byte {error.start:,} is not UTF-8 text.") from error


class LineShard:
    """JSON lines. A block is the lines that begin in a span of bytes, so that no index of lines is needed."""

    def __init__(self, name: str, opener: Opener, text_column: str) -> None:
        self.name, self._open, self._column = name, opener, text_column

    def n_blocks(self) -> int:
        with self._open() as file:
            return -(-file.seek(0, io.SEEK_END) // SPAN)

    def groups(self, *, key: int | None, part: int, parts: int, skip: int) -> Iterator[list[str]]:
        with self._open() as file:
            n_blocks = -(-file.seek(0, io.SEEK_END) // SPAN)
            for block in _block_order(n_blocks, key, part, parts)[skip:]:
                start, lines = self._lines(file, block)
                yield [text for text in self._texts(file, start, lines) if text]

    def _lines(self, file: BinaryIO, block: int) -> tuple[int, list[bytes]]:
        """Byte of the first line that begins in the block, and the block's lines."""
        start, end = block * SPAN, (block + 1) * SPAN
        if start:
            file.seek(start - 1)
            start += len(file.readline()) - 1  # the rest of a line that began before; only "\n" if one begins at start
        if start >= end:
            return start, []
        file.seek(start)
        return start, (file.read(end - start) + self._rest(file, end)).splitlines()

    @staticmethod
    def _rest(file: BinaryIO, end: int) -> bytes:
        """What the line that holds byte end - 1 has from `end` on."""
        file.seek(end - 1)
        return file.readline()[1:]

    def _texts(self, file: BinaryIO, start: int, lines: list[bytes]) -> Iterator[str]:
        for index, line in enumerate(lines):
            try:
                yield text_of_line(line, self._column)
            except ValueError as error:
                file.seek(0)
                number = file.read(start).count(b"\n") + index + 1
                raise UserError(f"{self.name}, line {number:,}: {error}") from error


class CompressedLineShard:
    """JSON lines in a compressed file: each part reads all of it and parses its own spans alone."""

    def __init__(self, name: str, opener: Opener, text_column: str) -> None:
        self.name, self._open, self._column = name, opener, text_column

    def n_blocks(self) -> None:
        return None

    def groups(self, *, key: int | None, part: int, parts: int, skip: int) -> Iterator[list[str]]:
        with self._open() as file:
            number = 1
            for ordinal, lines in enumerate(iter(lambda: file.readlines(SPAN), [])):
                mine = ordinal % parts == part
                if mine and ordinal // parts >= skip:
                    yield [text for text in self._texts(lines, number) if text]
                number += len(lines)

    def _texts(self, lines: list[bytes], number: int) -> Iterator[str]:
        for index, line in enumerate(lines):
            try:
                yield text_of_line(line, self._column)
            except ValueError as error:
                raise UserError(f"{self.name}, line {number + index:,}: {error}") from error


def text_of_line(line: bytes, column: str) -> str:
    """The text of one JSON record; '' for a blank line. Raises ValueError saying what is wrong with it."""
    if not line.strip():
        return ""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not a JSON record ({error}).") from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object: each line is one record.")
    return text_of_record(record, column)


def text_of_record(record: dict[str, Any], column: str) -> str:
    """The text of a record. Raises ValueError naming the columns there are."""
    if column not in record:
        raise ValueError(f"no column {column!r} (data.text_column). The columns are: {', '.join(map(str, record))}.")
    text = record[column]
    if not isinstance(text, str):
        raise ValueError(f"column {column!r} holds {type(text).__name__}, not text (data.text_column).")
    if not text.isascii() and _SURROGATE.search(text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # no tokenizer takes half a character
    return text


class _TableShard:
    """What parquet and arrow files share: blocks of rows, cut into groups of `GROUP_ROWS`."""

    def __init__(self, name: str, opener: Opener, text_column: str) -> None:
        self.name, self._open, self._column = name, opener, text_column

    def groups(self, *, key: int | None, part: int, parts: int, skip: int) -> Iterator[list[str]]:
        with self._open() as file:
            table = self._read_footer(file)
            sizes = self._block_sizes(table)
            for block in _block_order(len(sizes), key, part, parts):
                n_groups = -(-sizes[block] // GROUP_ROWS)
                if skip >= n_groups:
                    skip -= n_groups
                    continue
                yield from self._groups_of_block(table, block, skip)
                skip = 0

    def n_blocks(self) -> int:
        with self._open() as file:
            return len(self._block_sizes(self._read_footer(file)))

    def _groups_of_block(self, table: Any, block: int, skip: int) -> Iterator[list[str]]:
        pending: list[str] = []
        for texts in self._read_block(table, block):
            pending += texts
            while len(pending) >= GROUP_ROWS:
                group, pending = pending[:GROUP_ROWS], pending[GROUP_ROWS:]
                if skip == 0:
                    yield self._checked(group)
                skip = max(0, skip - 1)
        if pending and skip == 0:
            yield self._checked(pending)

    def _checked(self, texts: list[str | None]) -> list[str]:
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"{self.name}: column {self._column!r} has rows without text (data.text_column).")
        return [text for text in texts if text]

    def _check_column(self, names: list[str]) -> None:
        if self._column not in names:
            raise UserError(f"{self.name}: {_missing(self._column, names)}")

    def _read_footer(self, file: BinaryIO) -> Any:
        raise NotImplementedError

    def _block_sizes(self, table: Any) -> list[int]:
        raise NotImplementedError

    def _read_block(self, table: Any, block: int) -> Iterator[list[str]]:
        raise NotImplementedError


def _missing(column: str, names: list[str]) -> str:
    return f"no column {column!r} (data.text_column). The columns are: {', '.join(names)}."


class ParquetShard(_TableShard):
    """A parquet file; a block is a row group."""

    def _read_footer(self, file: BinaryIO) -> Any:
        arrow = _arrow(self.name)
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.ParquetFile(file)
        except arrow.ArrowInvalid as error:
            raise UserError(f"{self.name}: not a whole parquet file ({error}).") from error
        self._check_column(table.schema_arrow.names)
        return table

    def _block_sizes(self, table: Any) -> list[int]:
        return [table.metadata.row_group(block).num_rows for block in range(table.metadata.num_row_groups)]

    def _read_block(self, table: Any, block: int) -> Iterator[list[str]]:
        for batch in table.iter_batches(batch_size=GROUP_ROWS, row_groups=[block], columns=[self._column]):
            yield batch.column(0).to_pylist()


class ArrowShard(_TableShard):
    """An arrow file, in the file format or the stream format that `datasets` saves; a block is a record batch."""

    def _read_footer(self, file: BinaryIO) -> Any:
        arrow = _arrow(self.name)
        try:
            table = _arrow_batches(arrow, file)
        except arrow.ArrowInvalid as error:
            raise UserError(f"{self.name}: not a whole arrow file ({error}).") from error
        self._check_column(table[0].schema.names if table else [self._column])
        return table

    def _block_sizes(self, table: Any) -> list[int]:
        return [batch.num_rows for batch in table]

    def _read_block(self, table: Any, block: int) -> Iterator[list[str]]:
        yield table[block].column(self._column).to_pylist()


def _arrow_batches(arrow: Any, file: BinaryIO) -> list[Any]:
    """The record batches of a file in either format; those of a local file are views of a memory map."""
    source = arrow.memory_map(file.name) if isinstance(getattr(file, "name", None), str) else file
    try:
        reader = arrow.ipc.open_file(source)
        return [reader.get_batch(index) for index in range(reader.num_record_batches)]
    except arrow.ArrowInvalid:
        source.seek(0)
        return list(arrow.ipc.open_stream(source))


def _arrow(name: str) -> Any:
    try:
        import pyarrow.ipc
    except ImportError as error:
        raise UserError(f"{name}: reading this file needs pyarrow: pip install 'mixlab[data]'.") from error
    return pyarrow
