"""Which layer gets which mixer."""

from __future__ import annotations

import pytest

from llm.config import HybridConfig
from llm.errors import UserError
from llm.layout import describe_layout, layer_names, ratio_layout, ratio_warning


def layout(per_softmax: int, depth: int = 24) -> list[str]:
    return ratio_layout(HybridConfig(linear="gdn", softmax="softmax", per_softmax=per_softmax), depth)


@pytest.mark.parametrize(("per_softmax", "expected"), [(1, 12), (2, 8), (3, 6), (5, 4), (7, 3), (11, 2), (23, 1)])
def test_exact_ratios_at_24_layers(per_softmax, expected):
    names = layout(per_softmax)
    assert names.count("softmax") == expected
    group = per_softmax + 1
    assert [i for i, n in enumerate(names) if n == "softmax"] == list(range(per_softmax, 24, group))


@pytest.mark.parametrize("depth", [1, 3, 4, 7, 24, 32])
@pytest.mark.parametrize("per_softmax", [1, 2, 3, 6, 12, 100])
def test_other_ratios_are_as_near_as_can_be(per_softmax, depth):
    names = layout(per_softmax, depth)
    assert len(names) == depth
    assert names.count("softmax") == max(1, round(depth / (per_softmax + 1)))
    assert names[-1] == "softmax"  # each group ends with its softmax layer


def test_pattern_repeats(make_config):
    assert layer_names(make_config("softmax", "pattern=[softmax,gdn]")) == ["softmax", "gdn"] * 2


def test_pattern_that_does_not_divide_the_depth(make_config):
    with pytest.raises(UserError, match=r"pattern=\['gdn', 'gdn', 'softmax'\].*does not divide model.n_layers=4"):
        make_config("softmax", "pattern=[gdn,gdn,softmax]")


def test_a_ratio_that_the_depth_does_not_allow_is_said(make_config):
    assert ratio_warning(make_config("hybrid_gdn_3to1")) is None
    text = ratio_warning(make_config("hybrid_gdn_7to1"))
    assert "hybrid.per_softmax=7: 4 layers do not divide by 8, so this is 3 to 1" in text


def test_description_counts_layers_and_ratio():
    assert describe_layout(layout(3, 8)) == "8 layers: 6 gdn, 2 softmax (3:1); gdnx3 softmax gdnx3 softmax"
