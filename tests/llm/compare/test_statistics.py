"""Against tables, hand-worked examples and published worked problems; no library is the judge."""

from __future__ import annotations

import math

import pytest

from llm.compare.statistics import (
    estimate,
    holm_levels,
    paired_difference,
    t_quantile,
    t_two_sided,
    unpaired_difference,
)

# Student's t, from the usual printed table
TABLE = [
    (0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 4, 2.776), (0.975, 9, 2.262), (0.975, 30, 2.042),
    (0.995, 2, 9.925), (0.995, 5, 4.032), (0.9, 1, 3.078), (0.8, 9, 0.883), (0.9995, 3, 12.924), (0.975, 1e6, 1.960),
]  # fmt: skip


@pytest.mark.parametrize(("p", "df", "t"), TABLE)
def test_quantiles_are_those_of_the_table(p, df, t):
    assert t_quantile(p, df) == pytest.approx(t, abs=6e-4)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 5.0, 40.0, 1e4])
def test_distribution_has_its_closed_forms(t):
    assert t_two_sided(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, rel=1e-9, abs=1e-15)
    assert t_two_sided(t, 2) == pytest.approx(2 / (2 + t * t + t * math.sqrt(2 + t * t)), rel=1e-9)


def test_tails_far_out_and_at_high_degrees_of_freedom():
    assert t_two_sided(math.inf, 3) == 0
    assert t_two_sided(1.959963985, 1e7) == pytest.approx(0.05, rel=1e-5)
    assert t_two_sided(-2.776, 4) == t_two_sided(2.776, 4)


def test_estimate_by_hand():
    # 1, 2, 3: mean 2, standard deviation 1, half width 4.303 / sqrt(3)
    found = estimate([1.0, 2.0, 3.0])
    assert (found.n, found.mean) == (3, 2.0)
    assert found.half_width == pytest.approx(2.4843, abs=2e-4)
    assert found.interval == pytest.approx((-0.4843, 4.4843), abs=2e-4)


def test_one_seed_has_no_interval():
    assert estimate([3.0]).interval is None
    single = paired_difference([1.0], [2.0])
    assert (single.mean, single.p, single.interval(0.05), single.seeds_needed(0.05)) == (1.0, None, None, None)
    assert unpaired_difference([1.0, 2.0], [2.0]).p is None


def test_paired_difference_of_students_sleep_data():
    """Student 1908, extra sleep under two drugs: mean 1.58, t = 4.0621 at 9 degrees, p = 0.002833."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = paired_difference(first, second)
    assert found.mean == pytest.approx(1.58)
    assert found.mean / found.error == pytest.approx(4.0621, abs=1e-4)
    assert found.p == pytest.approx(0.002833, abs=1e-6)
    assert found.interval(0.05) == pytest.approx((0.7001, 2.4599), abs=1e-4)
    unpaired = unpaired_difference(first, second)  # the same without pairs: t = 1.8608, df = 17.776, p = 0.07939
    assert unpaired.mean / unpaired.error == pytest.approx(1.8608, abs=1e-4)
    assert unpaired.df == pytest.approx(17.776, abs=1e-3)
    assert unpaired.p == pytest.approx(0.07939, abs=1e-5)


def test_pairs_cancel_what_seeds_share():
    a, b = [1.0, 5.0, 9.0], [1.1, 5.1, 9.2]
    assert paired_difference(a, b).p < 0.06 < 0.9 < unpaired_difference(a, b).p


def test_seeds_that_always_agree():
    """No spread at all: zero difference is none, any other is one; no division by zero."""
    assert paired_difference([1.0, 2.0], [1.0, 2.0]).p == 1
    assert paired_difference([1.0, 2.0], [1.5, 2.5]).p == 0
    assert unpaired_difference([1.0, 1.0], [2.0, 2.0]).p == 0
    assert paired_difference([1.0, 2.0], [1.5, 2.5]).interval(0.05) == (0.5, 0.5)


def test_holm_by_hand():
    # m = 4: 0.005 < 0.0125 counts; 0.01 < 0.0167 counts; 0.03 >= 0.025 fails, and so does 0.04 behind it
    p = [0.01, 0.04, 0.03, 0.005]
    levels = holm_levels(p)
    assert levels == pytest.approx([0.05 / 3, 0.025, 0.025, 0.0125])
    assert [x < level for x, level in zip(p, levels, strict=True)] == [True, False, False, True]
    assert holm_levels([0.04]) == [pytest.approx(0.05)]
    assert holm_levels([]) == []


def test_interval_excludes_zero_exactly_when_p_is_below_the_level():
    found = paired_difference([1.0, 2.0, 3.0, 4.0], [1.2, 2.1, 3.4, 4.1])
    for level, outside in ((found.p * 1.001, True), (found.p * 0.999, False)):
        low, high = found.interval(level)
        assert (low > 0 or high < 0) is outside


@pytest.mark.parametrize(("effect", "seeds"), [(1.0, 10), (0.5, 34), (2.0, 5)])
def test_seeds_needed_are_those_of_power_tables(effect, seeds):
    """Paired t-test, two-sided 5%, power 80%: the tables (Cohen 1988) give 10 and 34 pairs for d = 1 and 0.5.

    For d = 2 by hand: 4 pairs fall short, (3.182 + 0.978)^2 / 4 = 4.33; 5 do, (2.776 + 0.941)^2 / 4 = 3.45.
    """
    spread = 1.0
    a = [0.0, 0.0]
    b = [effect - spread / math.sqrt(2), effect + spread / math.sqrt(2)]
    assert paired_difference(a, b).seeds_needed(0.05) == seeds


def test_no_number_of_seeds_for_next_to_nothing():
    assert paired_difference([0.0, 0.0], [1.0, -0.9999]).seeds_needed(0.05) is None
