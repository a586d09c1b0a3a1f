"""Tasks made on the fly from the seed, as sources of rows: what separates token mixers at small scale.

Only the answers are predicted, so that the accuracy of a validation is the share of right answers. A row is one
document. Row i is a function of the seed and i alone: any position can be resumed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from llm.config import DataConfig
from llm.data.batch import IGNORED
from llm.data.order import derive_key, digest
from llm.data.rows import Place, Row
from llm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

N_LANES = 16  # that processes can share


class Task(ABC):
    """A kind of row. A source of rows too: the methods that `llm.data` asks of one."""

    validation_rows = 512

    @abstractmethod
    def make(self, rng: np.random.Generator, context: int) -> Row:
        """A row of context + 1 tokens."""

    @abstractmethod
    def check(self, context: int) -> None:
        """UserError unless rows of `context` tokens have room for the task."""

    @abstractmethod
    def n_ids(self) -> int:
        """Token ids that are used: 0 .. n_ids - 1."""

    def settings(self) -> dict[str, Any]:
        """What the rows depend on."""
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    def training_rows(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> TaskRows:
        """The endless rows of training."""
        self._check(tokenizer, context)
        return TaskRows(config.name, self, context, config.seed)

    def validation_sets(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, context: int
    ) -> dict[str, TaskHeldOut]:
        """Rows that training does not have, at `context` and at each of `data.validation_contexts`."""
        sets = {}
        for length in dict.fromkeys([context, *config.validation_contexts]):
            self._check(tokenizer, length)
            for name, task in self.variants().items():
                label = name if length == context else f"{name}@{length}"
                sets[label] = TaskHeldOut(label, task, length, config.seed, self.validation_rows)
        return sets

    def variants(self) -> dict[str, Task]:
        """The tasks to validate on, by the name of their set: this one, and parts of it."""
        return {"validation": self}

    def _check(self, tokenizer: PreTrainedTokenizerBase, context: int) -> None:
        if self.n_ids() > len(tokenizer):
            raise UserError(
                f"{type(self).__name__} uses {self.n_ids():,} token ids, the tokenizer has {len(tokenizer):,}: "
                "make data.source.vocabulary smaller or take a larger tokenizer (tokenizer.path)."
            )
        self.check(context)


class TaskRows:
    """The endless rows of a task."""

    n_rows = None

    def __init__(self, name: str, task: Task, context: int, seed: int) -> None:
        self.name, self.context, self._task, self._seed = name, context, task, seed
        self.fingerprint = digest("task", type(task).__name__, task.settings(), context, seed)

    def place(self, row: int) -> Place:
        return Place(str(row % N_LANES), row // N_LANES)

    def lanes(self) -> list[str]:
        return [str(lane) for lane in range(N_LANES)]

    def open_lane(self, lane: str, index: int = 0, state: Any = None) -> TaskLane:
        return TaskLane(self._task, self.context, self._seed, int(lane))

    def summary(self) -> dict[str, Any]:
        return {"task": type(self._task).__name__, **self._task.settings()}

    def document_lengths(self, at_most: int) -> np.ndarray:
        return np.zeros(0, dtype=np.int64)

    def progress(self, state: dict[str, Any]) -> dict[str, float]:
        return {"data_tokens": state["row"] * self.context}


class TaskLane:
    """Every N_LANES-th row of a task."""

    def __init__(self, task: Task, context: int, seed: int, lane: int) -> None:
        self._task, self._context, self._seed, self._lane = task, context, seed, lane

    def read(self, index: int) -> Row:
        key = derive_key(self._seed, "training", index * N_LANES + self._lane)
        return self._task.make(np.random.default_rng(key), self._context)

    def state(self) -> None:
        return None


class TaskHeldOut:
    """A fixed number of a task's rows, from keys that training does not use."""

    def __init__(self, name: str, task: Task, context: int, seed: int, count: int) -> None:
        self.name, self.context, self._task, self._seed, self._count = name, context, task, seed, count
        self.fingerprint = digest("task held out", type(task).__name__, task.settings(), context, seed, count)

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> Row:
        key = derive_key(self._seed, "validation", self.context, index)
        return self._task.make(np.random.default_rng(key), self.context)

    @property
    def tokens(self) -> int:
        """Answers."""
        return len(self._answers())

    def unigram_entropy(self) -> float:
        """Nats an answer of the answers' own distribution: the least loss without any context."""
        _, counts = np.unique(self._answers(), return_counts=True)
        shares = counts / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    def _answers(self) -> np.ndarray:
        targets = np.concatenate([self.read(index).targets() for index in range(len(self))])
        return targets[targets != IGNORED]


def one_document(ids: np.ndarray, labels: np.ndarray) -> Row:
    """A row without boundaries whose targets are `labels`."""
    return Row(ids, np.zeros(len(ids), dtype=np.int32), labels=labels, whole=True)


def answers_at(ids: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Labels that are the next token at the positions `asked` and IGNORED elsewhere."""
    labels = np.full(len(ids) - 1, IGNORED, dtype=np.int64)
    labels[asked] = ids[asked + 1]
    return labels


class AssociativeRecall(Task):
    """Multi-query associative recall (MQAR; Arora et al. 2023, "Zoology").

    A row begins with `pairs` pairs of a key and a value; later each key comes up again once, and its value has to
    follow. How much later: slot i of the rest is drawn with probability ~ i ** (gap_power - 1), so that a small power
    makes most gaps short and 1 makes them uniform. Keys are the lower half of the `vocabulary`, values the upper half;
    values at random fill the rest.

    Of several numbers of `pairs` each row has one, drawn evenly; each is validated as a set `pairs_<number>` too.
    """

    def __init__(self, pairs: int | Sequence[int] = 32, *, vocabulary: int = 4096, gap_power: float = 0.01) -> None:
        self.pairs = [pairs] if isinstance(pairs, int) else list(pairs)
        if not self.pairs or min(self.pairs) < 1 or vocabulary < 2 * max(self.pairs):
            raise UserError(f"data.source.pairs={pairs}: from 1 to half of data.source.vocabulary={vocabulary}.")
        self.vocabulary, self.gap_power = vocabulary, gap_power

    def variants(self) -> dict[str, Task]:
        if len(self.pairs) == 1:
            return super().variants()
        settings = {"vocabulary": self.vocabulary, "gap_power": self.gap_power}
        return super().variants() | {f"pairs_{n}": AssociativeRecall(n, **settings) for n in self.pairs}

    def n_ids(self) -> int:
        return self.vocabulary

    def check(self, context: int) -> None:
        most = max(self.pairs)
        if context + 1 < 4 * most:
            raise UserError(f"context={context}: {most} pairs and their questions need {4 * most - 1}.")

    def make(self, rng: np.random.Generator, context: int) -> Row:
        pairs = self.pairs[0] if len(self.pairs) == 1 else int(rng.choice(self.pairs))
        half, length, shown = self.vocabulary // 2, context + 1, 2 * pairs
        keys = rng.permutation(half)[:pairs]
        values = rng.integers(half, self.vocabulary, pairs)
        n_slots = (length - shown) // 2
        weights = np.arange(1, n_slots + 1) ** (self.gap_power - 1.0)
        # the first of competing Poisson clocks: a draw by weight without replacement, like rng.choice's but faster
        asked = shown + 2 * np.argsort(rng.standard_exponential(n_slots) / weights)[:pairs]
        ids = rng.integers(half, self.vocabulary, length)
        ids[0:shown:2], ids[1:shown:2] = keys, values
        ids[asked], ids[asked + 1] = keys, values
        return one_document(ids, answers_at(ids, asked))


class SelectiveCopy(Task):
    """Selective copying (Gu and Dao 2023, "Mamba", section 4.1.1): repeat the marked tokens, in order, at the end.

    `copied` tokens of the `vocabulary` lie at random places among noise (id 0); after a marker (id 1) they have to be
    said again in their order.
    """

    def __init__(self, copied: int = 16, *, vocabulary: int = 64) -> None:
        if copied < 1 or vocabulary < 3:
            raise UserError(
                f"data.source.copied={copied} vocabulary={vocabulary}: at least 1 and 3 (noise and marker)."
            )
        self.copied, self.vocabulary = copied, vocabulary

    def n_ids(self) -> int:
        return self.vocabulary

    def check(self, context: int) -> None:
        if context < 2 * self.copied:
            raise UserError(f"context={context}: copying {self.copied} tokens needs {2 * self.copied}.")

    def make(self, rng: np.random.Generator, context: int) -> Row:
        marker = context - self.copied
        ids = np.zeros(context + 1, dtype=np.int64)
        places = np.sort(rng.choice(marker, self.copied, replace=False))
        ids[places] = rng.integers(2, self.vocabulary, self.copied)
        ids[marker] = 1
        ids[marker + 1 :] = ids[places]
        return one_document(ids, answers_at(ids, np.arange(marker, context)))


class StateTracking(Task):
    """The running product of permutations (the word problem of S_n; Merrill et al. 2024, "The Illusion of State").

    Each token is a permutation of `degree` things, each target the product of all so far. Degree 2 is parity; degree 5
    has 120 permutations and cannot be tracked by linear recurrences with diagonal transitions of positive sign.
    """

    def __init__(self, degree: int = 5) -> None:
        if not 2 <= degree <= 6:
            raise UserError(f"data.source.degree={degree}: from 2 (parity) to 6 (720 permutations).")
        self.degree = degree
        self._elements = np.array(list(permutations(range(degree))))
        number = {tuple(element): index for index, element in enumerate(self._elements.tolist())}
        # _product[a, b]: first a, then b
        self._product = np.array([[number[tuple(b[a].tolist())] for b in self._elements] for a in self._elements])

    def n_ids(self) -> int:
        return len(self._elements)

    def check(self, context: int) -> None:
        """Any length will do."""

    def make(self, rng: np.random.Generator, context: int) -> Row:
        ids = rng.integers(0, len(self._elements), context + 1)
        labels = np.empty(context, dtype=np.int64)
        state = 0  # the identity comes first
        for t in range(context):
            state = labels[t] = self._product[state, ids[t]]
        return one_document(ids, labels)
