"""Documents -> tokens -> packed rows -> batches, in an order that nothing but the data settings decides.

What the trainer uses::

    rows = training_rows(config.data, source, tokenizer, context=4096)     # Rows: one endless logical sequence
    sets = validation_sets(config.data, source, tokenizer, context=4096)   # dict: name -> HeldOut, fixed order

    for batch in batches(rows, micro_batch=8, rows_per_step=128, rank=0, world_size=1, state=None, workers=0):
        ...                                                                   # endless: Batch after Batch for this rank
    for batch in validation_batches(sets["validation"], micro_batch=8, rank=0, world_size=1, max_rows=None):
        ...                                                                   # finite, the same count on every rank

`source` is what `config.data.source` instantiates. Optimizer step s takes the global rows [s*R, (s+1)*R), R =
`rows_per_step`; pass j of rank r takes rows s*R + (j*world_size + r)*micro_batch + [0, micro_batch), so that a step has
R / (world_size * micro_batch) passes (it must divide: `UserError`).

`batch.state` is the position after the batch, plain JSON data. Those of the last pass of a step make the checkpoint:
`merge_states([state of rank 0, state of rank 1, ...])`, which for one process is that state itself. `batches(...,
state=merged)` goes on exactly after that step, at any world size, micro-batch or number of workers; a state of other
data (sources, tokenizer, seed, context, packing) is refused with a `UserError`.

With `workers` (config.data.workers), `batches` starts processes that read ahead: `loader.close()` ends them.

`HeldOut` has `name`, `context`, `len()`, `tokens` (predicted tokens) and `unigram_entropy()` in nats a token.
`Rows` has `name`, `context`, `fingerprint`, and `summary() -> dict` (documents, tokens, rows an epoch where known);
`rows.progress(batch.state)` gives `data_tokens` and `data_epochs`, of mixtures by source, for the metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm.data.batch import IGNORED, Batch
from llm.data.hub import HubDataset
from llm.data.loader import Loader, batches, merge_states, validation_batches
from llm.data.mixture import Mixture
from llm.data.needle import Needle
from llm.data.rows import HeldOut, Row, Rows
from llm.data.settings import check_settings
from llm.data.stored import HeldOutRows
from llm.data.synthetic import AssociativeRecall, SelectiveCopy, StateTracking
from llm.data.text import TextFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llm.config import DataConfig

__all__ = [
    "IGNORED",
    "AssociativeRecall",
    "Batch",
    "HeldOut",
    "HeldOutRows",
    "HubDataset",
    "Loader",
    "Mixture",
    "Needle",
    "Row",
    "Rows",
    "SelectiveCopy",
    "StateTracking",
    "TextFiles",
    "batches",
    "merge_states",
    "training_rows",
    "validation_batches",
    "validation_sets",
]


def training_rows(config: DataConfig, source: Any, tokenizer: PreTrainedTokenizerBase, context: int) -> Rows:
    """The endless sequence of training rows of `context` tokens; `source` is what `config.source` instantiates.

    Raises UserError for missing, empty or unreadable files, a missing column, too little text, or bad settings.
    """
    check_settings(config, tokenizer)
    return source.training_rows(config, tokenizer, context)


def validation_sets(
    config: DataConfig, source: Any, tokenizer: PreTrainedTokenizerBase, context: int
) -> dict[str, HeldOut]:
    """The held-out rows by name, in a fixed order; empty when the settings name none. Raises UserError as above."""
    check_settings(config, tokenizer)
    return source.validation_sets(config, tokenizer, context)
