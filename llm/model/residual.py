"""How what the blocks add to the residual stream reaches later blocks: `residual=` of a run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llm.model.precision import widen

STANDARD, DELTA_ATTENTION, VALUE_ROUTING = "standard", "delta_attention", "value_routing"
RESIDUALS = (STANDARD, DELTA_ATTENTION, VALUE_ROUTING)


class Residual(nn.Module):
    """The residual stream between the blocks of a decoder.

    standard         each block's input is the sum of the embedding and of all that the blocks before have added.
    delta_attention  Delta Attention Residuals (Luo et al. 2026, arXiv 2605.18855), by block: a block's input is a mean
                     of these increments, weighted by the softmax of w . RMSNorm(increment) with a learned w for each
                     block, w at first 0. Inferred: a source that is zero is among them, and the mean is scaled by the
                     number of sources, so that a model begins as with standard residuals, exactly.
    value_routing    Cross-layer value routing: what a mixer writes into its memory, v, joins the stream through a
                     projection that starts at zero (see `TokenMixer.route_values`). Inferred: the MLP of the same layer
                     sees it as well.
    """

    def __init__(self, kind: str, d_model: int, blocks: int, eps: float) -> None:
        super().__init__()
        if kind not in RESIDUALS:
            raise ValueError(f"residual={kind!r}: choose one of {', '.join(RESIDUALS)}")
        self.kind, self.eps = kind, eps
        attends = kind == DELTA_ATTENTION
        self.queries = nn.ParameterList(torch.empty(d_model) for _ in range(blocks + 1)) if attends else None

    def begin(self, embedded: Tensor) -> Stream:
        """The stream that begins with the embedding of tokens [.., D]."""
        return Stream(embedded) if self.queries is None else AttendedStream(embedded, self.queries, self.eps)

    def reset_parameters(self) -> None:
        """Queries at zero."""
        for query in self.queries or ():
            nn.init.zeros_(query)


class Stream:
    """The standard residual stream, as blocks take from it and leave it."""

    def __init__(self, embedded: Tensor) -> None:
        self.x = embedded

    def enter(self) -> Tensor:
        """The input of the next block (or of the final norm), [.., D]."""
        return self.x

    def leave(self, x: Tensor) -> None:
        """Take what a block has made of its input."""
        self.x = x


class AttendedStream(Stream):
    """Increments of all blocks so far, of which each input is a weighted mean."""

    def __init__(self, embedded: Tensor, queries: nn.ParameterList, eps: float) -> None:
        super().__init__(embedded)
        self.queries, self.eps, self.increments = iter(queries), eps, [embedded]

    def enter(self) -> Tensor:
        query = widen(next(self.queries))
        increments = torch.stack(self.increments, dim=-2)  # [.., N, D]
        logits = nn.functional.rms_norm(widen(increments), query.shape, eps=self.eps) @ query  # [.., N]
        logits = torch.cat([logits, torch.zeros_like(logits[..., :1])], dim=-1)  # with the source that is zero
        weights = logits.shape[-1] * logits.softmax(-1)[..., :-1]
        self.x = (weights[..., None] * increments).sum(-2)
        return self.x

    def leave(self, x: Tensor) -> None:
        self.increments.append(x - self.x)
