"""Student's t, intervals, paired differences, Holm's correction, and how many more seeds would settle a question.

Sources: the incomplete beta function by the modified Lentz continued fraction (Press et al., Numerical Recipes, 6.4);
Welch 1947 for unequal spreads; Holm 1979 for many comparisons.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance

ALPHA = 0.05  # chance to err
CONFIDENCE = 1 - ALPHA
POWER = 0.8  # chance to find a difference of the size seen, in the number of seeds that is advised
MOST_SEEDS = 1000  # beyond this, no number of seeds is advised


def t_two_sided(t: float, df: float) -> float:
    """P(|T| >= |t|) of Student's distribution with `df` degrees of freedom, which need not be whole."""
    if math.isinf(t):
        return 0.0
    return _incomplete_beta(df / 2, 0.5, df / (df + t * t))


def t_quantile(p: float, df: float) -> float:
    """The t with P(T <= t) = p, for 0.5 <= p < 1."""
    tail = 2 * (1 - p)
    high = 1.0
    while t_two_sided(high, df) > tail:
        high *= 2
    return _bisect(lambda t: t_two_sided(t, df) > tail, 0.0, high)


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds with its interval, which is None for one seed: that says nothing of the spread."""

    n: int
    mean: float
    half_width: float | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Lower and upper end."""
        return None if self.half_width is None else (self.mean - self.half_width, self.mean + self.half_width)


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Mean and t-interval of at least one value."""
    n, mean = len(values), fmean(values)
    if n < 2:
        return Estimate(n, mean, None)
    return Estimate(n, mean, t_quantile((1 + confidence) / 2, n - 1) * stdev(values) / math.sqrt(n))


@dataclass(frozen=True)
class Difference:
    """How far `b` lies from `a`: mean(b) - mean(a), its standard error, degrees of freedom and two-sided p.

    `error`, `df` and `p` are None where the spread is unknown, for want of seeds. `spread` is the standard deviation
    that one more seed (paired) or one more seed on both sides (unpaired) brings.
    """

    mean: float
    n: int
    paired: bool
    error: float | None = None
    df: float | None = None
    spread: float | None = None

    @property
    def p(self) -> float | None:
        """Two-sided p of no difference."""
        if self.error is None:
            return None
        if self.error == 0:
            return 1.0 if self.mean == 0 else 0.0
        return t_two_sided(self.mean / self.error, self.df)

    def interval(self, level: float) -> tuple[float, float] | None:
        """The interval that excludes zero exactly when p < `level`."""
        if self.error is None:
            return None
        half = t_quantile(1 - level / 2, self.df) * self.error
        return self.mean - half, self.mean + half

    def seeds_needed(self, level: float, power: float = POWER) -> int | None:
        """Smallest number of seeds with which a difference of this size would be found with chance `power`.

        None where the spread is unknown, or beyond MOST_SEEDS. The usual approximation by central t quantiles:
        n >= (t(1 - level/2) + t(power))^2 spread^2 / mean^2 at n - 1 degrees of freedom, 2n - 2 when unpaired.
        """
        if self.spread is None or self.mean == 0:
            return None

        def enough(n: int) -> bool:
            df = n - 1 if self.paired else 2 * n - 2
            quantiles = t_quantile(1 - level / 2, df) + t_quantile(power, df)
            return n * self.mean**2 >= (quantiles * self.spread) ** 2

        found = bisect_left(range(MOST_SEEDS + 1), True, lo=2, key=enough)
        return found if found <= MOST_SEEDS else None


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """b - a, seed by seed: what the seeds share cancels."""
    deltas = [y - x for x, y in zip(a, b, strict=True)]
    n = len(deltas)
    if n < 2:
        return Difference(fmean(deltas), n, True)
    return Difference(fmean(deltas), n, True, stdev(deltas) / math.sqrt(n), n - 1, stdev(deltas))


def unpaired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """b - a of runs that have no seed and data order in common, by Welch's test."""
    mean, n = fmean(b) - fmean(a), min(len(a), len(b))
    if n < 2:
        return Difference(mean, n, False)
    parts = [variance(a) / len(a), variance(b) / len(b)]
    error = math.sqrt(sum(parts))
    if error == 0:
        return Difference(mean, n, False, 0.0, float(len(a) + len(b) - 2), 0.0)
    df = sum(parts) ** 2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    return Difference(mean, n, False, error, df, math.sqrt(variance(a) + variance(b)))


def holm_levels(p_values: Sequence[float], alpha: float = ALPHA) -> list[float]:
    """The level at which each p is tested so that all of them together err with chance `alpha` at most.

    Holm's steps: the smallest of m is tested at alpha/m, the next at alpha/(m-1), and so on until one fails; from
    there on none counts, and the level of the one that failed holds for all the rest. So p < level, and hence an
    interval at that level that excludes zero, says exactly what Holm's procedure says.
    """
    levels = [alpha] * len(p_values)
    failed: float | None = None
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        levels[i] = failed or alpha / (len(p_values) - rank)
        if failed is None and p_values[i] >= levels[i]:
            failed = levels[i]
    return levels


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - _incomplete_beta(b, a, 1 - x)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(scale) * _beta_fraction(a, b, x) / a


def _beta_fraction(a: float, b: float, x: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / ((1 + term * d) or tiny)
            c = (1 + term / c) or tiny
            value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return value


def _bisect(below: Callable[[float], bool], low: float, high: float) -> float:
    """The point where `below` turns false."""
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2
