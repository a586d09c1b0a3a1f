from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import save_file

from llm.compare.records import UnreadableRun, read_run


def edit_config(folder, change):
    path = folder / "config.yaml"
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(yaml.safe_dump(content))


def test_a_run_as_training_left_it(make_folder):
    run = read_run(make_folder("hybrid_gdn_3to1", seed=3, loss=2.5, starts=2))
    assert (run.mixer, run.pair, run.step, run.steps) == ("hybrid_gdn_3to1", (3, 0), 200, 200)
    assert run.finished
    assert run.resumes == 1
    assert run.final("val_loss") == pytest.approx(2.55, abs=0.01)
    assert run.final("no_such") is None
    assert run.speed == 100_000


def test_a_run_that_training_writes_can_be_read(make_run):
    """The real writer, not this folder's imitation of it."""
    folder = make_run("gdn", "seed=5", "steps=4")
    (folder / "metrics.jsonl").write_text('{"step": 4, "val_loss": 1.5}\n')
    run = read_run(folder)
    assert (run.pair, run.finished, run.final("val_loss")) == (
        (4 - 3, 0) if run.config.seed == 1 else (5, 0),
        True,
        1.5,
    )
    assert run.facts["parameters"] > run.facts["non_embedding_parameters"] > 150_000  # counted from the checkpoint


def test_parameters_are_counted_from_a_checkpoint_without_model_json(make_folder):
    folder = make_folder()
    (folder / "model.json").unlink()
    checkpoint = folder / "checkpoints" / "step_00000200"
    checkpoint.mkdir(parents=True)
    save_file(
        {"embeddings.weight": torch.zeros(128, 8), "layers.0.w": torch.zeros(8, 8)}, checkpoint / "model.safetensors"
    )
    assert read_run(folder).facts == {"parameters": 1088, "non_embedding_parameters": 64}
    (checkpoint / "model.safetensors").write_bytes(b"\xff" * 40)
    assert read_run(folder).facts == {}


def test_keys_that_an_older_version_lacks_have_todays_defaults(make_folder):
    folder = make_folder()
    edit_config(folder, lambda c: (c.pop("probe_every"), c["data"].pop("workers"), c.pop("eval")))
    new = make_folder(seed=2)
    assert read_run(folder).settings.keys() == read_run(new).settings.keys()


def test_keys_that_this_version_does_not_know_are_kept_and_said(make_folder):
    folder = make_folder()
    edit_config(folder, lambda c: c["optim"].update(flux=3))
    run = read_run(folder)
    assert run.settings["optim.flux"] == 3
    assert "optim.flux" in run.notes[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: (f / "config.yaml").unlink(), "no config.yaml"),
        (lambda f: (f / "config.yaml").write_text("{"), "cannot be read"),
        (lambda f: (f / "config.yaml").write_bytes(b"\xff\xfe\x00"), "cannot be read"),
        (lambda f: (f / "config.yaml").write_text("- a\n- b\n"), "no schema_version"),
        (lambda f: (f / "config.yaml").write_text("schema_version: 1\n"), "does not make sense"),
        (lambda f: edit_config(f, lambda c: c.update(schema_version=99)), "newer mixlab"),
        (lambda f: edit_config(f, lambda c: c.update(model=7)), "does not make sense"),
        (lambda f: edit_config(f, lambda c: c.update(seed="one")), "does not make sense"),
        (lambda f: edit_config(f, lambda c: c.update(pattern=["gdn"] * 3, hybrid={})), "does not divide"),
        (lambda f: (f / "metrics.jsonl").unlink(), "no step is logged"),
        (lambda f: (f / "metrics.jsonl").write_text("{torn"), "no step is logged"),
    ],
)
def test_what_is_no_run_says_why(make_folder, change, says):
    folder = make_folder()
    change(folder)
    with pytest.raises(UnreadableRun, match=says):
        read_run(folder)


def test_torn_and_odd_lines_are_left_out_and_counted(make_folder):
    folder = make_folder()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 200, "loss": NaN, "note": "text"}\n[1]\n{"loss": 3}\n\xff{"step"')
    run = read_run(folder)
    assert run.metrics[-1].keys() == {"step", "loss"}  # of a step written twice the later line counts
    assert "3 unreadable lines" in run.notes[0]


@pytest.mark.parametrize("name", ["environment.json", "model.json"])
@pytest.mark.parametrize("content", ["", "[1, 2]", '"text"', "{}", '[{"git": 3, "devices": 4}]'])
def test_other_files_may_be_anything(make_folder, name, content):
    from llm.compare.analysis import compare
    from llm.compare.tables import build_tables

    folder = make_folder()
    (folder / name).write_text(content)
    assert build_tables(compare([read_run(folder)]))


def test_hours_are_tokens_over_throughput_across_resumes(make_folder):
    folder = make_folder()
    lines = [{"step": s, "loss": 1.0, "tokens_per_second": r} for s, r in ((1, 10.0), (10, 1024.0), (200, 512.0))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)  # 1024 tokens a step
    assert run.axis("hours") == pytest.approx([102.4 / 3600, 111.4 / 3600, 491.4 / 3600])
    assert run.axis("tokens") == [1024, 10_240, 204_800]
    assert run.axis("flops")[0] == pytest.approx(1024 * 2.4e9)


def test_nothing_that_a_config_names_is_imported(make_folder):
    folder = make_folder()
    edit_config(folder, lambda c: c["mixers"]["gdn"].update(_target_="antigravity.fly"))
    assert read_run(folder).mixer == "gdn"
    assert "antigravity" not in sys.modules


def test_torch_is_not_imported():
    code = "import sys, llm.compare.__main__, llm.compare.follow, llm.compare.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
