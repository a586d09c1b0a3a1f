"""Equal sizes for fair comparison: the MLP width that makes any mix of mixers meet the model's parameter count."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from llm.config import ModelConfig
from llm.errors import UserError


def mlp_width(sizes: ModelConfig, mixers: Sequence[nn.Module]) -> int:
    """One MLP width for all layers, a multiple of `mlp_multiple`, with which the blocks come closest to `parameters`.

    `sizes.mlp_width` overrides it. Raises UserError where the mixers alone are larger than the target.
    """
    if sizes.mlp_width is not None:
        return sizes.mlp_width
    norms = sizes.d_model * (2 * len(mixers) + 1)
    left = sizes.parameters - norms - sum(p.numel() for m in mixers for p in m.parameters())
    width = round(left / (3 * sizes.d_model * len(mixers) * sizes.mlp_multiple)) * sizes.mlp_multiple
    if width < sizes.mlp_multiple:
        raise UserError(
            f"model.parameters={sizes.parameters}: the mixers leave no room for an MLP. "
            "Raise it, make the mixers' heads smaller or fewer, or set model.mlp_width."
        )
    return width
