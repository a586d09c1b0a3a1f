"""What benchmarks lean on and can be seen without a GPU: reports, and kernels compiled ahead."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mixer_kernels import report
from mixer_kernels.bench import Timing


def timing(who, tokens, both, case="scalar", op="linear_attention"):
    name = case if tokens == 4096 else f"{case}, T {tokens}"
    return Timing(op, name, who, 32768 // tokens, tokens, both / 3, both, 100.0, {"scan": 500 * both})


TIMINGS = [timing(who, tokens, 0.5 + i) for i, who in enumerate(("triton", "fla")) for tokens in (512, 4096, 32768)]


def test_a_table_has_a_line_for_each_timing_and_all_are_kept_as_json(tmp_path):
    report.save(tmp_path, {"GPU": "none"}, [t._replace(first=3.0, floor=0.25) for t in TIMINGS])
    table = (tmp_path / "table.md").read_text()
    assert "| linear_attention | scalar, T 512 | fla | 0.500 | 1.500 | 0.750 | 100 | 0.250 | 3.0 |" in table
    assert table.count("| linear_attention |") == len(TIMINGS)
    kept = json.loads((tmp_path / "timings.json").read_text())
    assert kept["environment"] == {"GPU": "none"}
    assert [Timing(**{k: x for k, x in row.items() if k != "busy"}).both for row in kept["timings"]] == [
        t.both for t in TIMINGS
    ]


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
def test_the_plot_has_a_panel_for_what_was_timed_at_several_lengths(tmp_path):
    curves = report._curves([*TIMINGS, timing("triton", 4096, 1.0, "wide"), timing("cudnn", 512, 1.0, op="softmax")])
    assert list(curves) == ["linear_attention, scalar"]
    assert curves["linear_attention, scalar"]["triton"] == {t: pytest.approx(0.5e6 / 32768) for t in (512, 4096, 32768)}
    report.plot(tmp_path / "plot.png", curves)
    assert (tmp_path / "plot.png").stat().st_size > 1000


NOTING = """
import torch, triton
from triton.backends.compiler import GPUTarget
import kernels_of_this_test as k
from mixer_kernels.precompile import noting

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
noted = set()
with noting(noted):
    k.double[(1,)](torch.zeros(16))
print(sorted((x.module, x.kernel, '"BLOCK"' in x.specialization or "BLOCK" in x.specialization) for x in noted))
print(len(noted), len(k.double.cache))
"""

KERNELS = """
import triton, triton.language as tl

@triton.autotune([triton.Config({"BLOCK": n}) for n in (16, 32, 64)], key=["BLOCK"], cache_results=True)
@triton.jit
def double(x, BLOCK: tl.constexpr):
    at = x + tl.arange(0, BLOCK)
    tl.store(at, 2 * tl.load(at))
"""


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")
def test_every_candidate_of_an_autotuner_is_noted_and_none_launched_or_chosen(tmp_path):
    (tmp_path / "kernels_of_this_test.py").write_text(KERNELS)
    path = os.pathsep.join([str(tmp_path), str(Path(report.__file__).parents[1])])
    environment = os.environ | {
        "PYTHONPATH": path,
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_INTERPRET": "0",
    }
    done = subprocess.run([sys.executable, "-c", NOTING], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "3 0"
    assert done.stdout.count("'kernels_of_this_test', 'double'") == 3
    assert not list((tmp_path / "cache").rglob("*.json"))
