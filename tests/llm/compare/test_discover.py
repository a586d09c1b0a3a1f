from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llm.compare.discover import find, gather, read_all, without_copies
from llm.errors import UserError


def test_runs_at_and_below_a_path_each_once(make_folder, tmp_path):
    a = make_folder(seed=1, inside="x/deep")
    b = make_folder(seed=2, inside="x")
    (tmp_path / "x" / ".hydra").mkdir()
    (tmp_path / "x" / ".hydra" / "config.yaml").write_text("a: 1")
    (a / "checkpoints" / "inner").mkdir(parents=True)
    (a / "checkpoints" / "inner" / "config.yaml").write_text("")
    folders, absent = find([tmp_path / "x", a, b])
    assert set(folders) == {a, b}
    assert not absent


def test_a_path_that_is_no_folder_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        find([tmp_path / "none"])


def test_broken_and_empty_runs_are_named(make_folder, tmp_path):
    good, broken, empty = (make_folder(seed=seed) for seed in (1, 2, 3))
    (broken / "config.yaml").unlink()
    (empty / "metrics.jsonl").unlink()
    runs, skipped = read_all(find([tmp_path])[0])
    assert [run.path for run in runs] == [good]
    assert {s.path: s.reason for s in skipped} == {
        str(broken): "it has no config.yaml",
        str(empty): "no step is logged yet",
    }


def test_a_sweep_stands_for_its_jobs_and_names_those_without_a_run(make_folder, tmp_path):
    done = make_folder(seed=1)
    make_folder(seed=7)  # beside it, and not of the sweep
    jobs = [
        {"run_dir": "../../runs/" + done.name, "words": ["seed=1"], "status": "done"},
        {"run_dir": "../../runs/gone", "words": ["seed=2"], "status": "failed", "reason": "out of memory"},
    ]
    sweep = tmp_path / "sweeps" / "s"
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text(json.dumps({"schema_version": 1, "jobs": jobs}))
    folders, absent = find([sweep])
    assert folders == [done]
    assert absent[0].path == str(tmp_path / "runs" / "gone")
    assert "seed=2" in absent[0].reason
    assert "failed (out of memory)" in absent[0].reason


def test_a_copied_sweep_finds_its_runs_where_they_were_copied_to(make_folder, tmp_path):
    beside, elsewhere = make_folder(seed=1, inside="copy/runs"), make_folder(seed=2, inside="other")
    broken = make_folder(seed=3, inside="copy/runs")
    (broken / "metrics.jsonl").unlink()
    paths = ["../../../gone/" + folder.name for folder in (beside, elsewhere, broken)]
    status = ["done", "done", "failed"]
    jobs = [{"run_dir": p, "words": [], "status": s, "reason": "NaN"} for p, s in zip(paths, status, strict=True)]
    sweep = tmp_path / "copy" / "sweep"
    sweep.mkdir()
    (sweep / "sweep.json").write_text(json.dumps({"schema_version": 1, "jobs": jobs}))
    runs, skipped = gather([sweep, tmp_path / "other"])
    assert [run.path for run in runs] == [beside, elsewhere]
    assert [(s.path, s.reason) for s in skipped] == [(str(broken), "no step is logged yet; job '' failed (NaN)")]


@pytest.mark.parametrize("content", ["", "[]", '{"jobs": [{}]}', '{"jobs": 3}'])
def test_a_damaged_sweep_is_named(tmp_path, content):
    (tmp_path / "sweep.json").write_text(content)
    assert find([tmp_path]) == ([], [find([tmp_path])[1][0]])
    assert find([tmp_path])[1][0].reason == "unreadable"


def test_a_copy_is_no_further_evidence(make_folder, tmp_path):
    first = make_folder(seed=1)
    copy = Path(shutil.copytree(first, tmp_path / "elsewhere"))
    behind = make_folder(seed=2, steps=100)
    ahead = make_folder(seed=2, name="again")
    runs, skipped = without_copies(read_all([first, copy, behind, ahead])[0])
    assert [run.path for run in runs] == [first, ahead]
    assert [s.path for s in skipped] == [str(copy), str(behind)]
