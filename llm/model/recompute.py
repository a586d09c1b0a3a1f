"""Activation checkpointing: what a block keeps for its backward pass, and what it computes again there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

NONE, SELECTIVE, FULL = "none", "selective", "full"

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
OPERATORS = "mixer_kernels"


def recomputed(function: Callable[[Tensor], Any], x: Tensor, *, keep_products: bool = False) -> Any:
    """``function(x)``, whose intermediate results are computed again in backward instead of being kept.

    With `keep_products`, the results of matrix products, of attention and of the operators of `mixer_kernels` are kept:
    only what is cheap is done again. `function` must not draw random numbers.
    """
    # contexts as a constant of the module, so that torch.compile sees the same function in every layer
    contexts = {"context_fn": keeping_products} if keep_products else {}
    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False, **contexts)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    namespace, _, name = operator.name().partition("::")
    name = name.partition(".")[0] or namespace
    dear = namespace.startswith(OPERATORS) or name in PRODUCTS or "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


keeping_products = partial(create_selective_checkpoint_contexts, _policy)
