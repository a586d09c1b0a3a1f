"""The report's files and the command line."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest

from llm.compare import images
from llm.compare.__main__ import main
from llm.compare.analysis import compare
from llm.compare.discover import find, read_all
from llm.compare.figures import build_plots
from llm.compare.page import as_html
from llm.compare.plots import Curve
from llm.compare.tables import Table, as_latex, as_markdown, as_text, build_tables

EXPECTED = {
    "curve-loss", "curve-val_loss", "ratio-val_loss", "ratio-val_accuracy", "ratio-recall", "pareto-tokens_per_second",
    "pareto-state_bytes", "loss_by_length-validation", "loss_by_position-validation", "recall_by_length-needle",
    "decoding_tokens_per_second-batch_1",
}  # fmt: skip


@pytest.fixture
def comparison(sweep):
    return compare(*read_all(find([sweep])[0]))


def test_every_plot_has_every_contender(comparison):
    plots = {plot.id: plot for plot in build_plots(comparison)}
    assert plots.keys() == EXPECTED
    labels = {group.label for group in comparison.groups}
    for name, plot in plots.items():
        expected = {"gdn", "gla", "softmax"} if name.startswith("ratio") else labels
        assert {series.name for series in plot.series} == expected, name
        assert json.loads(json.dumps(plot.as_json(), allow_nan=False))


def test_curves_hold_every_seed_over_tokens_flops_and_hours(comparison):
    plot = next(p for p in build_plots(comparison) if p.id == "curve-val_loss")
    assert list(plot.x_labels) == ["tokens", "flops", "hours", "step"]
    curve = plot.series[0]
    assert curve.xs["tokens"] == [50 * 1024, 100 * 1024, 150 * 1024, 200 * 1024]
    assert len(curve.ys) == 3
    assert curve.each(min)[-1] == min(row[-1] for row in curve.ys) < curve.each(max)[-1]


def test_an_unfinished_run_is_a_curve_of_its_own(make_folder):
    folders = [make_folder(seed=1), make_folder(seed=2, steps=100)]
    plot = build_plots(compare(read_all(folders)[0]))[0]
    assert [(c.name, c.broken, len(c.ys)) for c in plot.series] == [
        ("gdn", False, 1),
        ("gdn, seed 2, unfinished", True, 1),
    ]


def test_ratios_stand_in_the_order_of_their_softmax_layers(comparison):
    plot = next(p for p in build_plots(comparison) if p.id == "ratio-val_loss")
    assert plot.ticks == ["pure", "3:1", "1:1", "softmax"]
    gdn = next(series for series in plot.series if series.name == "gdn")
    assert [mark.x for mark in gdn.marks] == [0, 1, 2]
    assert all(len(mark.values) == 3 and mark.interval for mark in gdn.marks)


def test_the_pareto_front_is_what_none_beats(comparison):
    plot = next(p for p in build_plots(comparison) if p.id == "pareto-tokens_per_second")
    # gla is fastest, gdn next and about as good, 3:1 best; 1:1 and softmax are slower and worse than 3:1
    means = {series.name: (series.marks[0].x, series.marks[0].y) for series in plot.series}
    assert {name for name, point in means.items() if point in plot.front} >= {"gla", "hybrid_gdn_3to1"}
    assert means["softmax"] not in plot.front
    assert means["hybrid_gdn_1to1"] not in plot.front


def test_learning_rates_that_were_not_chosen_are_plotted_too(make_folder):
    folders = [make_folder("gdn", f"optim.lr={lr}", seed=1) for lr in ("1e-4", "1e-3", "1e-2")]
    plots = build_plots(compare(read_all(folders)[0], select_lr=True))
    plot = next(p for p in plots if p.id == "val_loss-against-optim_lr")
    assert [(s.name, [m.x for m in s.marks]) for s in plot.series] == [("gdn", [1e-4, 1e-3, 1e-2])]


def test_any_setting_can_be_plotted_against(make_folder):
    folders = [make_folder("gdn", f"mixers.gdn.conv_size={n}", seed=1) for n in (2, 3, "null")]
    plots = build_plots(compare(read_all(folders)[0]), ["mixers.gdn.conv_size"])
    plot = next(p for p in plots if p.id == "val_loss-against-mixers_gdn_conv_size")
    assert plot.ticks == ["2", "3", "null"]


def test_names_from_a_run_cannot_leave_the_folder(make_folder, tmp_path):
    names = ("../../../evil", "a b", "a_b", "x'\"<")
    series = [{"measure": "recall_by_length", "name": name, "points": [[1, 0.5], [2, 0.4]]} for name in names]
    out = tmp_path / "deep" / "report"
    assert main([str(make_folder(evaluations=series)), "--out", str(out)]) == 0
    assert len(list((out / "plots").glob("recall*.svg"))) == 4
    assert not list(tmp_path.rglob("evil*"))


def test_losses_that_are_not_finite_do_not_stop_anything(make_folder):
    folder = make_folder()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 200, "loss": NaN, "val_loss": Infinity}\n')
    comparison = compare(read_all([folder])[0])
    for plot in build_plots(comparison):
        json.dumps(plot.as_json(), allow_nan=False)


def test_the_report_folder_has_everything(sweep, tmp_path, capsys):
    out = tmp_path / "out" / "report"
    assert main([str(sweep), "--out", str(out), "--title", "A <b>& B"]) == 0
    assert {p.name for p in out.iterdir()} == {
        "index.html", "report.md", "report.tex", "report.json", "runs.csv", "differences.csv", "contenders.csv",
        "settings.csv", "plots",
    }  # fmt: skip
    assert {p.name for p in (out / "plots").iterdir()} == {
        f"{name}.{kind}" for name in EXPECTED for kind in ("png", "svg")
    }
    data = json.loads((out / "report.json").read_text())
    assert (data["metric"], len(data["contenders"]), len(data["runs"]), len(data["plots"])) == ("val_loss", 5, 15, 11)
    rows = list(csv.DictReader(io.StringIO((out / "differences.csv").read_text())))
    assert {row["differs"] for row in rows} == {"True", "False"}
    assert len(list(csv.DictReader(io.StringIO((out / "runs.csv").read_text())))) == 15
    assert "hybrid_gdn_3to1 is better" in capsys.readouterr().out
    assert not list(out.parent.glob(".tmp*"))
    text = (out / "index.html").read_text()
    assert "A &lt;b&gt;&amp; B" in text
    assert not re.search(
        r"""(src|href)\s*=\s*["'](?!data:)|url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)""", text
    )


def test_a_report_is_replaced_only_by_force_and_nothing_else_ever(make_folder, tmp_path, capsys):
    folder, out = str(make_folder()), tmp_path / "report"
    assert main([folder, "--out", str(out)]) == 0
    (out / "mine.txt").write_text("a note")
    assert main([folder, "--out", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert (out / "mine.txt").exists()
    assert main([folder, "--out", str(out), "--force"]) == 0
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").write_text("")
    assert main([folder, "--out", str(other), "--force"]) == 2
    assert "is no report" in capsys.readouterr().err
    assert main([folder, "--out", folder, "--force"]) == 2  # a run least of all


def test_a_failure_leaves_the_old_report(make_folder, tmp_path, monkeypatch):
    folder, out = str(make_folder()), tmp_path / "report"
    assert main([folder, "--out", str(out)]) == 0
    before = sorted(p.name for p in out.iterdir())

    def fail(*_: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(images, "write_images", fail)
    with pytest.raises(OSError, match="no space"):
        main([folder, "--out", str(out), "--force"])
    assert sorted(p.name for p in out.iterdir()) == before
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".tmp")) == []


def test_without_matplotlib_there_are_no_images_and_it_is_said(make_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(images, "available", lambda: False)
    out = tmp_path / "report"
    assert main([str(make_folder()), "--out", str(out)]) == 0
    assert not (out / "plots").exists()
    assert "mixlab[bench]" in capsys.readouterr().err


def test_mistakes_are_one_line(make_folder, tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2
    assert main([str(make_folder()), "--metric", "bleu"]) == 2
    assert all(line.startswith("error: ") for line in capsys.readouterr().err.splitlines())


def test_what_a_run_says_cannot_become_markup(make_folder):
    evil = "</script><img src=x onerror=alert(1)>"
    folder = make_folder("gdn", name="run")
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config + f"extra: {json.dumps(evil)}\n")
    other = make_folder("gdn", name="other")
    comparison = compare(read_all([folder, other])[0])
    assert any(evil in group.label for group in comparison.groups)
    plots = [plot.as_json() for plot in build_plots(comparison)]
    page = as_html("t", "s", build_tables(comparison), {"plots": plots})
    assert "<img" not in page
    assert page.count("</script>") == 2


def test_a_table_in_each_form():
    table = Table("x", "Title", ["a_b", "c"], [["1|2", "5% ± 1"], ["long cell", "{}"]], "A note.")
    assert as_text(table).splitlines()[2:5] == ["a_b        c", "---------  ------", "1|2        5% ± 1"]
    assert "| 1\\|2 | 5% ± 1 |" in as_markdown(table)
    assert r"a\_b & c \\" in as_latex(table)
    assert r"1|2 & 5\% $\pm$ 1 \\" in as_latex(table)


def test_a_curve_without_a_value_at_a_seed_has_no_mean_there():
    curve = Curve("a", 0, {"x": [1, 2]}, [[1.0, None], [3.0, 4.0]])
    assert curve.each(max) == [3.0, None]
