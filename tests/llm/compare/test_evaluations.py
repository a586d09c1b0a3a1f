from __future__ import annotations

import json

import pytest

from llm.compare.analysis import compare
from llm.compare.figures import build_plots
from llm.compare.records import read_run
from llm.evaluate.results import series_of, write


def test_what_evaluate_writes_is_plotted(make_folder):
    """Its own writer and series, not an imitation."""
    result = {
        "schema_version": 1,
        "step": 200,
        "context": 128,
        "device": "CPU",
        "validation": [
            {"set": "validation", "context": 128, "loss": 3.0, "bits_per_byte": 1.1,
             "by_position": [{"from": 1, "to": 1, "loss": 5.0}, {"from": 2, "to": 3, "loss": 4.0}]},
            {"set": "validation", "context": 256, "loss": 2.9},
            {"set": "validation", "context": 512, "skipped": "out of memory"},
        ],
        "recall": [{"probe": "needle", "length": n, "depth": d, "exact": 0.5} for n in (64, 128) for d in (0.0, 1.0)],
        "decoding": [{"context": n, "tokens_per_second": 9.0, "state_bytes": 5} for n in (1024, 2048)],
    }  # fmt: skip
    folder = make_folder()
    write(folder, result | {"series": series_of(result)})
    plots = {plot.id: plot for plot in build_plots(compare([read_run(folder)]))}
    assert plots.keys() >= {
        "loss_by_length-validation", "loss_by_position-validation", "recall_by_length-needle", "recall_by_depth-needle",
        "decoding_tokens_per_second-decoding",
    }  # fmt: skip
    curve = plots["loss_by_length-validation"].series[0]
    assert (curve.xs["x"], curve.ys) == ([128, 256], [[3.0, 2.9]])  # no point where memory ran out
    assert read_run(folder).final("bits_per_byte") == 1.1


def test_the_last_evaluation_counts_and_early_ones_do_not(make_folder):
    folder = make_folder()
    for step, value in ((200, 0.1), (100, 0.9), (200, 0.2)):
        write(folder, {"step": step, "series": [{"measure": "recall", "name": "x", "points": [[0, value]]}]})
    assert read_run(folder).final("recall") == 0.2
    (folder / "evaluations" / "step_00000200-001.json").unlink()
    (folder / "evaluations" / "step_00000200-002.json").unlink()
    run = read_run(folder)
    assert run.final("recall") is None
    assert "evaluation at step 100" in run.notes[0]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"series": [{}]}', '{"series": [{"measure": "a", "name": 1, "points": 3}]}']
)
def test_a_damaged_evaluation_is_named(make_folder, content):
    folder = make_folder(evaluations=[])
    (folder / "evaluations" / "x.json").write_text(content)
    assert read_run(folder).notes == ("evaluations/x.json is unreadable and left out",)


def test_points_that_are_no_numbers_are_left_out(make_folder):
    points = [[2, float("nan")], [4, None], [1, 2.5]]
    folder = make_folder(evaluations=[{"measure": "recall_by_pairs", "name": "x", "points": points}])
    assert read_run(folder).evaluations[0].points == ((1.0, 2.5),)
    assert json.loads((folder / "evaluations" / "all.json").read_text())["schema_version"] == 1
