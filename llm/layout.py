"""Which mixer each layer has."""

from __future__ import annotations

from llm.config import HybridConfig, TrainConfig
from llm.errors import UserError


def layer_names(config: TrainConfig) -> list[str]:
    """The name of the mixer of every layer, from `hybrid.per_softmax` or else from `pattern`.

    Raises UserError where a pattern does not divide the depth, or neither is given.
    """
    depth = config.model.n_layers
    if config.hybrid.per_softmax is not None:
        return ratio_layout(config.hybrid, depth)
    pattern = list(config.pattern)
    if not pattern:
        raise UserError(
            "pattern: empty, and hybrid.per_softmax is not set. Choose mixer=..., or pattern=[gdn,softmax]."
        )
    if depth % len(pattern):
        raise UserError(
            f"pattern={pattern}: its length {len(pattern)} does not divide model.n_layers={depth}. "
            "Choose a pattern whose length divides the depth, or change model.n_layers."
        )
    return pattern * (depth // len(pattern))


def ratio_layout(hybrid: HybridConfig, depth: int) -> list[str]:
    """`per_softmax` linear layers to a softmax layer, the softmax layers spread as the last of each group."""
    count = max(1, round(depth / (hybrid.per_softmax + 1)))
    softmax = {round((i + 1) * depth / count) - 1 for i in range(count)}
    return [hybrid.softmax if i in softmax else hybrid.linear for i in range(depth)]


def ratio_warning(config: TrainConfig) -> str | None:
    """What to know of a hybrid whose ratio the depth does not allow: which one it has instead."""
    asked, names = config.hybrid.per_softmax, layer_names(config)
    softmax = names.count(config.hybrid.softmax)
    if asked is None or asked * softmax == len(names) - softmax:
        return None
    return (
        f"hybrid.per_softmax={asked}: {len(names)} layers do not divide by {asked + 1}, so this is "
        f"{len(names) - softmax} to {softmax}. Other ratios may come to the same layout; choose another ratio or depth."
    )


def describe_layout(names: list[str]) -> str:
    """For instance '24 layers: 18 gdn, 6 softmax (3:1); gdn gdn gdn softmax ...'."""
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    text = f"{len(names)} layers: " + ", ".join(f"{n} {name}" for name, n in counts.items())
    if len(counts) == 2:
        first, second = counts.values()
        text += f" ({first / second:.3g}:1)"
    runs: list[list] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return text if len(counts) == 1 else text + "; " + " ".join(f"{n}x{k}" if k > 1 else n for n, k in runs)
