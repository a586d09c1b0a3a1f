"""How an optimizer step is shared out."""

from __future__ import annotations

from dataclasses import dataclass

from llm.config import TrainConfig
from llm.errors import UserError


@dataclass(frozen=True)
class StepPlan:
    """How the rows of an optimizer step are shared out: `passes` times `micro_batch` rows on each of the ranks."""

    rows: int
    micro_batch: int
    passes: int

    @classmethod
    def make(cls, config: TrainConfig, world_size: int) -> StepPlan:
        """From `batch_tokens`, `context` and `micro_batch`. UserError where they do not divide."""
        rows, rest = divmod(config.batch_tokens, config.context)
        if rest or not rows:
            raise UserError(
                f"batch_tokens={config.batch_tokens} is not a multiple of context={config.context}: change either."
            )
        micro_batch = config.micro_batch or max(1, rows // world_size)
        if rows % (micro_batch * world_size):
            raise UserError(
                f"micro_batch={micro_batch} on {world_size} device(s) does not divide the {rows} rows of a step "
                f"(batch_tokens={config.batch_tokens} / context={config.context}): change micro_batch or batch_tokens."
            )
        return cls(rows, micro_batch, rows // (micro_batch * world_size))
