"""Orders: permutations that are keyed, cover everything, and mix."""

from __future__ import annotations

import numpy as np
import pytest

from llm.data.order import Feistel, derive_key, permutation
from llm.data.stored import GroupedOrder


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 100, 1000, 4097])
def test_a_permutation_covers_every_item_once(n):
    assert sorted(permutation(n, 5)) == list(range(n))
    assert [Feistel(n, 5)(i) for i in range(min(n, 50))] == permutation(n, 5)[:50]


def test_huge_permutations_need_no_memory_and_have_no_collisions():
    order = Feistel(10**15 + 7, 3)
    found = order.map(np.arange(100_000))
    assert len(np.unique(found)) == 100_000
    assert found.min() >= 0
    assert found.max() < 10**15 + 7
    assert abs(found.mean() / (10**15 / 2) - 1) < 0.02


def test_permutations_of_other_keys_have_nothing_in_common():
    a, b = (np.array(permutation(10_000, key)) for key in (1, 2))
    assert (a == b).sum() < 20
    assert abs(np.corrcoef(a, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 0.05


def test_keys_depend_on_every_part():
    assert len({derive_key(0, "a", 1), derive_key(1, "a", 1), derive_key(0, "b", 1), derive_key(0, "a", 2)}) == 4
    assert derive_key(0, "rows", 0) == 4850760342213053763  # the same on every machine and in every version


@pytest.mark.parametrize("n_windows", [1, 5, 64, 65, 200])
def test_a_grouped_order_covers_every_row_once(n_windows):
    sizes = np.arange(n_windows) % 7 + 1
    order = GroupedOrder(np.concatenate([[0], np.cumsum(sizes)]), 9)
    assert sorted(order(i) for i in range(sizes.sum())) == list(range(sizes.sum()))
