"""Needles in a haystack of real text (after RULER; Hsieh et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from llm.config import DataConfig
from llm.data.batch import IGNORED
from llm.data.encode import Encoder
from llm.data.order import derive_key, digest
from llm.data.rows import HeldOut, Lane, Place, Row, Rows
from llm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOLD = " The secret number of box {key} is {value}."
ASKED = " The secret number of box {key} is"
ANSWER = " {values}."


class Needle:
    """Rows of a text source into which sentences are put that tell secret numbers; at the end, one is asked for.

    `boxes` 1 is the single needle, more are distractors that have to be told apart by their key (multi-key); `numbers`
    of the box that is asked for have all to be given, in the order in which they were told (multi-value). Training
    predicts the text as well, validation the answers alone, so that its accuracy is that of the answers' tokens.
    """

    def __init__(self, text: Any, *, boxes: int = 1, numbers: int = 1) -> None:
        if boxes < 1 or numbers < 1:
            raise UserError(f"data.source.boxes={boxes} numbers={numbers}: at least 1 of each.")
        self._text, self._boxes, self._numbers = text, boxes, numbers

    def training_rows(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> NeedleRows:
        """The endless rows of training."""
        rows = self._text.training_rows(config, tokenizer, context)
        return NeedleRows(rows, self._hider(config, tokenizer, context, only_answers=False))

    def validation_sets(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, context: int
    ) -> dict[str, NeedleHeldOut]:
        """The text's held-out rows with needles in them."""
        sets = self._text.validation_sets(config, tokenizer, context)
        return {
            name: NeedleHeldOut(rows, self._hider(config, tokenizer, rows.context, only_answers=True))
            for name, rows in sets.items()
        }

    def _hider(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, context: int, *, only_answers: bool
    ) -> Hider:
        hider = Hider(Encoder(tokenizer), self._boxes, self._numbers, config.seed, only_answers)
        hider.check(context)
        return hider


@dataclass(frozen=True)
class Hider:
    """Puts needles into a row."""

    encoder: Encoder
    boxes: int
    numbers: int
    seed: int
    only_answers: bool

    def check(self, context: int) -> None:
        """UserError unless half of a row is left to the text."""
        told, _, question, answer = self._sentences(np.random.default_rng(0))
        needed = sum(map(len, told)) + len(question) + len(answer)
        if 2 * needed > context:
            raise UserError(
                f"context={context}: {self.boxes} boxes and {self.numbers} numbers take about {needed} tokens: "
                f"give a context of {2 * needed} or fewer of them."
            )

    def hide(self, row: Row, *key: Any, depth: float | None = None) -> Row:
        """The row, one document, with needles in it and a question and its answer at the end.

        `depth`, a share of the text, is where the needle lies that is asked for (of one number); all others, and it
        too without `depth`, lie anywhere.
        """
        rng = np.random.default_rng(derive_key(self.seed, "needle", *key))
        told, wanted, question, answer = self._sentences(rng)
        length = len(row.ids)
        n_text = length - sum(map(len, told)) - len(question) - len(answer)
        depths = np.sort(rng.integers(0, n_text + 1, len(told)))
        if depth is not None:
            depths[wanted] = round(depth * n_text)
            order = np.argsort(depths, kind="stable")
            told, depths = [told[i] for i in order], depths[order]
        text = np.split(row.ids[:n_text], depths)
        parts = [part for pair in zip(text, [*told, question], strict=True) for part in pair]
        ids = np.concatenate([*parts, answer])
        labels = ids[1:].astype(np.int64)
        if self.only_answers:
            labels[: length - 1 - len(answer)] = IGNORED
        return Row(ids, np.zeros(length, dtype=np.int32), labels=labels, whole=True)

    def _sentences(self, rng: np.random.Generator) -> tuple[list[np.ndarray], int, np.ndarray, np.ndarray]:
        """What is told, in the order of telling, which of it is asked for (first), the question, and the answer."""
        keys = rng.choice(9000, self.boxes, replace=False) + 1000
        values = (rng.choice(9000, self.boxes - 1 + self.numbers, replace=False) + 1000).tolist()
        owners = [int(keys[0])] * self.numbers + keys[1:].tolist()
        order = rng.permutation(len(values)).tolist()
        wanted = ", ".join(str(values[i]) for i in order if owners[i] == keys[0])
        told = [TOLD.format(key=owners[i], value=values[i]) for i in order]
        encoded = [
            tokens[:-1] for tokens in self.encoder([*told, ASKED.format(key=keys[0]), ANSWER.format(values=wanted)])
        ]
        return encoded[:-2], order.index(0), encoded[-2], encoded[-1]


class NeedleRows:
    """Endless rows of text with needles in them."""

    def __init__(self, rows: Rows, hider: Hider) -> None:
        self._rows, self._hider = rows, hider
        self.name, self.context, self.n_rows = rows.name, rows.context, None
        self.fingerprint = digest("needle", rows.fingerprint, hider.boxes, hider.numbers, hider.seed)

    def place(self, row: int) -> Place:
        return self._rows.place(row)

    def lanes(self) -> list[str]:
        return self._rows.lanes()

    def open_lane(self, lane: str, index: int = 0, state: Any = None) -> NeedleLane:
        return NeedleLane(self._rows.open_lane(lane, index, state), self._hider, lane)

    def summary(self) -> dict[str, Any]:
        return self._rows.summary()

    def document_lengths(self, at_most: int) -> np.ndarray:
        return self._rows.document_lengths(at_most)

    def progress(self, state: dict[str, Any]) -> dict[str, float]:
        return self._rows.progress(state)


class NeedleLane:
    """A lane of text with needles in its rows."""

    def __init__(self, lane: Lane, hider: Hider, name: str) -> None:
        self._lane, self._hider, self._name = lane, hider, name

    def read(self, index: int) -> Row:
        return self._hider.hide(self._lane.read(index), "training", self._name, index)

    def state(self) -> Any:
        return self._lane.state()


class NeedleHeldOut:
    """Held-out rows of text with needles in them."""

    def __init__(self, rows: HeldOut, hider: Hider) -> None:
        self._rows, self._hider, self.name, self.context = rows, hider, rows.name, rows.context
        self.fingerprint = digest("needle held out", rows.fingerprint, hider.boxes, hider.numbers, hider.seed)

    @property
    def text(self) -> HeldOut:
        """The rows without needles."""
        return self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Row:
        return self._hider.hide(self._rows.read(index), "validation", self.context, index)

    @property
    def tokens(self) -> int:
        """Tokens of the answers."""
        return sum(int((self.read(index).targets() != IGNORED).sum()) for index in range(len(self)))

    def unigram_entropy(self) -> float:
        """Nats a token of the text's own unigram distribution."""
        return self._rows.unigram_entropy()
