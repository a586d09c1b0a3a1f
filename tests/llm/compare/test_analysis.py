"""Which runs count for what, what is compared with what, and what is said of it."""

from __future__ import annotations

import json

import pytest

from llm.compare.analysis import compare
from llm.compare.discover import find, read_all
from llm.compare.figures import against_setting, build_plots
from llm.compare.records import read_run
from llm.compare.statistics import paired_difference
from llm.compare.tables import build_tables, verdict_text
from llm.errors import UserError


def comparison_of(*folders, **options):
    runs, skipped = read_all(find(folders)[0])
    return compare(runs, skipped, **options)


def verdict(comparison, a, b):
    return next(v for v in comparison.verdicts if {v.a.label, v.b.label} == {a, b})


def flag_topics(comparison):
    return {flag.topic for flag in comparison.flags}


def test_a_sweep_is_pooled_by_contender_and_told_from_chance(sweep):
    comparison = comparison_of(sweep)
    assert comparison.metric == "val_loss"
    assert [g.label for g in comparison.groups] == ["gdn", "hybrid_gdn_3to1", "hybrid_gdn_1to1", "gla", "softmax"]
    assert all(e.n == 3 for e in comparison.estimates.values())
    assert len(comparison.verdicts) == 10
    assert comparison.best.label == "hybrid_gdn_3to1"
    told = verdict(comparison, "gdn", "hybrid_gdn_3to1")
    assert told.differs
    assert told.interval[1] < 0  # hybrid - gdn
    assert verdict_text(told, "val_loss") == "hybrid_gdn_3to1 is better"
    luck = verdict(comparison, "gdn", "gla")
    assert not luck.differs
    assert luck.interval[0] < 0 < luck.interval[1]
    assert f"about {luck.seeds_missing} more seeds would settle" in verdict_text(luck, "val_loss")
    assert not comparison.flags


def test_numbers_are_those_of_the_runs(make_folder):
    a, b = [[make_folder(m, seed=s, loss=x + s) for s in (1, 2, 3)] for m, x in (("gdn", 2.0), ("gla", 2.1))]
    comparison = comparison_of(*a, *b)
    finals = [[read_run(f).metrics[-1]["val_loss"] for f in folders] for folders in (a, b)]
    expected = paired_difference(*finals)
    assert comparison.verdicts[0].difference == expected
    assert comparison.estimates["gdn"].mean == pytest.approx(sum(finals[0]) / 3)


def test_many_comparisons_are_corrected_for(sweep):
    """The same pair is held to a stricter level among ten than alone."""
    alone = verdict(comparison_of(sweep / "gdn-1", sweep / "gla-1", *sweep.glob("g*-[23]")), "gdn", "gla")
    among = verdict(comparison_of(sweep), "gdn", "gla")
    assert alone.level == pytest.approx(0.05)
    best = min(comparison_of(sweep).verdicts, key=lambda v: v.difference.p)
    assert best.level == pytest.approx(0.005)
    assert among.difference == alone.difference


def test_a_baseline_leaves_fewer_comparisons(sweep):
    comparison = comparison_of(sweep, baseline="softmax")
    assert {v.a.label for v in comparison.verdicts} == {"softmax"}
    assert len(comparison.verdicts) == 4
    with pytest.raises(UserError, match=r"'mamba'.*There are: gdn, "):
        comparison_of(sweep, baseline="mamba")


def test_one_seed_has_neither_interval_nor_verdict(make_folder):
    comparison = comparison_of(make_folder("gdn"), make_folder("gla", loss=2.0))
    assert comparison.estimates["gdn"].interval is None
    assert not comparison.verdicts[0].differs
    text = "\n".join(" ".join(row) for table in build_tables(comparison) for row in table.rows)
    assert "(one seed)" in text
    assert "none can be told apart: train at least three" in text


def test_unfinished_runs_do_not_count_and_are_named(make_folder):
    folders = [make_folder("gdn", seed=s) for s in (1, 2)]
    half = make_folder("gdn", seed=3, loss=99.0, steps=100)
    others = [make_folder("gla", seed=s) for s in (1, 2, 3, 4)]
    comparison = comparison_of(*folders, half, *others)
    gdn = comparison.groups[0]
    assert comparison.estimates["gdn"].n == 2
    assert comparison.estimates["gdn"].mean < 4
    assert verdict(comparison, "gdn", "gla").difference.n == 2
    assert comparison.notes(gdn) == ["seed 3 left out: unfinished, at step 100 of 200", "seed 4 missing"]
    assert ["gdn", "2 of 3"] in [row[:2] for row in build_tables(comparison)[0].rows]


def test_a_run_that_stopped_at_the_accuracy_that_was_enough_is_finished(make_folder):
    assert not read_run(make_folder("gdn", seed=1, steps=100)).finished
    assert read_run(make_folder("gdn", "eval.enough_accuracy=0.2", seed=2, steps=100)).finished


def test_resumed_runs_count_and_are_marked(make_folder):
    comparison = comparison_of(make_folder("gdn", starts=3), make_folder("gla"))
    assert comparison.notes(comparison.groups[0]) == ["seed 1 resumed 2x"]


def test_runs_pair_by_both_seeds(make_folder):
    folders = [make_folder(m, f"data.seed={d}", seed=1) for m in ("gdn", "gla") for d in (0, 1)]
    comparison = comparison_of(*folders)
    assert len(comparison.groups) == 2  # seeds of data make no contenders
    assert comparison.verdicts[0].difference.n == 2


def test_runs_on_other_data_are_not_paired(make_folder):
    folders = [make_folder("gdn", seed=s) for s in (1, 2)] + [
        make_folder("gla", "data.packing=fit", seed=s) for s in (1, 2)
    ]
    comparison = comparison_of(*folders)
    assert not comparison.verdicts[0].difference.paired
    assert flag_topics(comparison) == {"data and their order"}
    assert "but they also differ in data and their order" in verdict_text(comparison.verdicts[0], "val_loss")


@pytest.mark.parametrize(
    ("topic", "other"),
    [
        ("tokens", {"words": ["batch_tokens=2048"]}),
        ("data and their order", {"words": ["context=64"]}),
        ("tokenizer", {"words": ["tokenizer.vocab_size=5000"]}),
        ("optimizer and schedule", {"words": ["optim.weight_decay=0.3"]}),
        ("optimizer and schedule", {"words": ["optim.lr=3e-4"]}),
        ("precision", {"words": ["precision=fp32"]}),
        ("code version", {"commit": "b" * 40}),
    ],
)
def test_what_differs_is_flagged(make_folder, topic, other):
    comparison = comparison_of(make_folder("gdn"), make_folder("gla", *other.pop("words", []), **other))
    assert topic in flag_topics(comparison)
    assert topic in comparison.apart(comparison.groups[1])


@pytest.mark.parametrize(("factor", "flagged"), [(1.019, False), (1.021, True), (None, True)])
def test_sizes_are_flagged_beyond_two_percent_or_where_unknown(make_folder, factor, flagged):
    sizes = lambda n: {"non_embedding_parameters": n, "state_elements": {"gla": n, "softmax": 0}}  # noqa: E731
    other = sizes(round(1000 * factor)) if factor else {"parameters": 1}
    comparison = comparison_of(make_folder("gdn", facts=sizes(1000)), make_folder("gla", facts=other))
    expected = {"parameters", "state size of linear layers"} if flagged else set()
    assert flag_topics(comparison) == expected
    unknown = "" if factor else " (unknown)"
    assert set(comparison.verdicts[0].caveats) == {f"{topic}{unknown}" for topic in expected}


def test_a_size_apart_from_one_contender_is_no_caveat_between_two_others(make_folder):
    sizes = {"gdn": 1000, "gla": 1015, "kda": 1030}
    folders = [
        make_folder(m, facts={"non_embedding_parameters": n, "state_elements": {m: 9}}) for m, n in sizes.items()
    ]
    comparison = comparison_of(*folders)
    assert verdict(comparison, "gdn", "gla").caveats == ()
    assert verdict(comparison, "gdn", "kda").caveats == ("parameters",)


def test_code_that_changed_between_seeds_is_flagged(make_folder):
    comparison = comparison_of(make_folder(seed=1), make_folder(seed=2, commit="b" * 40))
    assert flag_topics(comparison) == {"code version"}


def test_a_device_does_not_bear_on_quality(make_folder):
    a, b = make_folder("gdn"), make_folder("gla")
    start = json.loads((b / "environment.json").read_text())
    start[0]["devices"] = ["NVIDIA A100"] * 2
    (b / "environment.json").write_text(json.dumps(start))
    comparison = comparison_of(a, b)
    assert flag_topics(comparison) == {"device"}
    assert comparison.verdicts[0].caveats == ()


def test_contenders_of_one_mixer_are_named_by_what_differs(make_folder):
    words = [(), ("mixers.gdn.conv_size=3",), ("mixers.gdn.conv_size=3", "optim.lr=3e-4")]
    comparison = comparison_of(*(make_folder("gdn", *w, name=f"r{i}") for i, w in enumerate(words)))
    assert {g.label for g in comparison.groups} == {
        "gdn conv_size=4 lr=0.001",
        "gdn conv_size=3 lr=0.001",
        "gdn conv_size=3 lr=0.0003",
    }


def test_settings_that_may_differ_are_ignored_on_request(make_folder):
    folders = [make_folder("gdn", seed=1), make_folder("gdn", "data.path=/elsewhere/train.jsonl", seed=2)]
    assert len(comparison_of(*folders).groups) == 2
    (group,) = comparison_of(*folders, ignore=["data.*path"]).groups
    assert len(group.runs) == 2


def rates(make_folder, losses: dict[str, dict[int, float]], mixer: str = "gdn"):
    return [
        make_folder(mixer, f"optim.lr={lr}", seed=seed, loss=loss)
        for lr, by_seed in losses.items()
        for seed, loss in by_seed.items()
    ]


def test_the_best_learning_rate_is_chosen_and_named(make_folder):
    folders = rates(make_folder, {"1e-4": {1: 3.3, 2: 3.3}, "1e-3": {1: 3.0, 2: 3.1}, "1e-2": {1: 3.2, 2: 3.0}})
    comparison = comparison_of(*folders, make_folder("gla", seed=1), select_lr=True)
    gdn = comparison.groups[0]
    assert (gdn.label, gdn.lr, gdn.tried) == ("gdn", 1e-3, [1e-4, 1e-3, 1e-2])
    assert comparison.notes(gdn)[0] == "lr 0.001, the best of 0.0001, 0.001, 0.01"
    assert not comparison.flags  # the rate was chosen for each: it does not set them apart
    assert "chosen by val_loss on these very seeds" in comparison.remarks[0]


def test_no_learning_rate_wins_by_its_seeds(make_folder):
    """At 1e-2 the lucky seed 1 alone finished; on that seed 1e-3 is the better one."""
    folders = rates(make_folder, {"1e-3": {1: 2.0, 2: 3.9}, "1e-2": {1: 2.1}})
    (gdn,) = comparison_of(*folders, select_lr=True).groups
    assert gdn.lr == 1e-3


def test_a_choice_that_cannot_be_made_or_lies_at_the_edge_is_said(make_folder):
    apart = comparison_of(*rates(make_folder, {"1e-3": {1: 2.0}, "1e-2": {2: 2.1}}), select_lr=True)
    assert len(apart.groups) == 2
    assert "no seed is finished at every learning rate" in apart.remarks[1]
    edge = comparison_of(*rates(make_folder, {"1e-3": {1: 2.0}, "1e-2": {1: 2.1}}, "gla"), select_lr=True)
    assert "0.001, is the lowest tried" in edge.remarks[1]


def test_higher_is_better_for_an_accuracy(make_folder):
    folders = [make_folder(m, seed=s, loss=x) for m, x in (("gdn", 2.0), ("gla", 4.0)) for s in (1, 2, 3)]
    comparison = comparison_of(*folders, metric="val_accuracy")
    assert comparison.best.label == "gdn"
    assert verdict_text(comparison.verdicts[0], "val_accuracy") == "gdn is better"


def test_a_measure_of_an_evaluation_can_be_compared(sweep):
    comparison = comparison_of(sweep, metric="recall")
    assert comparison.best.label == "hybrid_gdn_3to1"


def test_a_metric_that_no_run_has_is_a_mistake(sweep):
    with pytest.raises(UserError, match=r"--metric bleu: no run has it. There are: .*val_loss"):
        comparison_of(sweep, metric="bleu")


def test_nothing_to_compare_is_a_mistake_that_says_why(make_folder):
    folder = make_folder()
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"no run to compare.*no step is logged"):
        comparison_of(folder)


def test_runs_under_way_can_be_compared_at_a_common_step(make_folder):
    folders = [make_folder("gdn", seed=s, steps=100 + 50 * s, loss=2.0) for s in (1, 2)]
    folders += [make_folder("gla", seed=1, steps=150, loss=3.0), make_folder("gla", seed=2, steps=100, loss=3.0)]
    comparison = comparison_of(*folders, at=150)
    gdn, gla = comparison.groups
    assert [len(group.runs) for group in comparison.groups] == [2, 1]
    assert comparison.notes(gla) == ["seed 2 left out: unfinished, at step 100 of 150"]
    assert comparison.verdicts[0].difference.mean == pytest.approx(1.0)
    assert gdn.runs[2, 0].step == 150  # what it did later is not looked at
    assert "after step 150, not the last" in build_tables(comparison)[0].note


def test_a_setting_that_follows_another_does_not_part_a_series(make_folder):
    """A learning rate chosen for each state size goes along with it; one that does not is a series of its own."""
    folders = [
        make_folder("gdn", f"mixers.gdn.expand_v={v}", f"optim.lr={lr}", seed=1)
        for v, lr in ((1.0, "1e-3"), (2.0, "3e-3"), (4.0, "1e-3"))
    ]
    plot = against_setting("mixers.gdn.expand_v", "val_loss", comparison_of(*folders).groups)
    assert [(s.name, [m.x for m in s.marks]) for s in plot.series] == [("gdn", [1.0, 2.0, 4.0])]
    more = make_folder("gdn", "mixers.gdn.expand_v=1.0", "optim.lr=1e-2", seed=1)
    plot = against_setting("mixers.gdn.expand_v", "val_loss", comparison_of(*folders, more).groups)
    assert sorted(len(s.marks) for s in plot.series) == [1, 1, 2]


def test_validation_sets_that_differ_by_a_number_are_one_plot(make_folder):
    folder = make_folder("gdn")
    lines = '{"step": 200, "val_loss": 2, "val_validation@4096_loss": 1.5, "val_pairs_4_accuracy": 1, '
    (folder / "metrics.jsonl").write_text(lines + '"val_pairs_64_accuracy": 0.5, "val_code_loss": 3}\n')
    plots = {plot.id: plot for plot in build_plots(comparison_of(folder))}
    assert plots["accuracy-by-pairs"].series[0].ys == [[1, 0.5]]
    assert plots["loss-by-validation"].series[0].xs == {"x": [4096]}
    assert "curve-val_code_loss" in plots
    assert "curve-val_validation@4096_loss" not in plots


def test_a_ratio_that_the_depth_does_not_allow_is_said(make_folder):
    comparison = comparison_of(make_folder("hybrid_gdn_7to1"))  # of four layers
    (note,) = comparison.notes(comparison.groups[0])
    assert "this is 3 to 1" in note
    assert comparison.groups[0].ratio == "3:1"


def test_a_seed_that_diverged_is_named_and_not_averaged(make_folder):
    folders = [make_folder(m, seed=s) for m in ("gdn", "gla") for s in (1, 2, 3)]
    with (folders[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 200, "loss": NaN, "val_loss": NaN}\n')
    comparison = comparison_of(*folders)
    assert comparison.estimates["gdn"].n == 2
    assert comparison.notes(comparison.groups[0]) == ["seed 1 left out: no finite val_loss at the end"]
    assert comparison.verdicts[0].difference.n == 2
