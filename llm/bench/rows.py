"""Random text: rows that cost nothing to read, with documents as long as those of the web."""

from __future__ import annotations

from typing import Any

import numpy as np

from llm.data.rows import Place, Row, starts_within

MEDIAN, SPREAD = 600, 1.0  # tokens of a document, log-normal: mean 1000, as in FineWeb-Edu


class RandomRows:
    """Endless rows of uniformly random tokens; packed ones hold several documents. The lane is the row's number."""

    name, fingerprint, n_rows = "random", "random", None

    def __init__(self, vocab_size: int, context: int, *, packed: bool) -> None:
        self.vocab_size, self.context, self.packed = vocab_size, context, packed

    def place(self, row: int) -> Place:
        return Place("random", row)

    def open_lane(self, lane: str, index: int = 0, state: Any = None) -> RandomRows:
        return self

    def lanes(self) -> list[str]:
        return ["random"]

    def read(self, index: int) -> Row:
        generator = np.random.default_rng(index)
        ids = generator.integers(self.vocab_size, size=self.context + 1)
        if not self.packed:
            return Row(ids, np.zeros(self.context + 1, dtype=np.int32), whole=True)
        lengths = generator.lognormal(np.log(MEDIAN), SPREAD, self.context).astype(int) + 1
        first = lengths.cumsum() - generator.integers(lengths[0])  # the row begins within a document
        return Row(ids, starts_within(first[first <= self.context], self.context + 1))

    def state(self) -> Any:
        return None

    def summary(self) -> dict[str, Any]:
        return {}

    def document_lengths(self, at_most: int) -> np.ndarray:
        return np.empty(0, dtype=np.int64)

    def progress(self, state: dict[str, Any]) -> dict[str, float]:
        return {}
