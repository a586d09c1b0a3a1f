"""Clock, throughput, peaks, and sums that survive JSON."""

from __future__ import annotations

import json

import pytest
import torch

from llm.metrics import Clock, LossWindow, Throughput, named_peak_flops, peak_flops, perplexity, sum_len_squared
from mixer_kernels.segments import Segments

CPU = torch.device("cpu")


class Time:
    """A clock that goes on when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_evaluation_and_saving_do_not_count():
    time = Time()
    clock = Clock(CPU, now=time)
    throughput = Throughput(clock)
    for _ in range(4):
        time.now += 0.5
        throughput.add(tokens=100, flops=1e6)
    with clock.paused():
        time.now += 60
    assert throughput.report(steps_left=10) == {"tokens_per_second": 200, "eta_seconds": 5}
    assert throughput.report(steps_left=10) == {}, "nothing happened since"
    time.now += 1
    throughput.add(tokens=100, flops=1e6)
    throughput.peak = 4e6
    assert throughput.report(steps_left=1)["mfu"] == 0.25


def test_a_pause_counts_even_when_what_is_inside_fails():
    time = Time()
    clock = Clock(CPU, now=time)

    def fail():
        with clock.paused():
            time.now += 60
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert clock.seconds() == 0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA A10G", None),
    ],
)
def test_peaks_by_name(name, peak):
    assert named_peak_flops(name) == peak
    assert peak_flops(CPU) is None


def test_squared_lengths_of_packed_documents():
    starts = torch.zeros(2, 10, dtype=torch.bool)
    starts[:, 0] = starts[0, 3] = starts[0, 4] = True
    assert sum_len_squared(Segments.from_starts(starts).row_start) == (9 + 1 + 36) + 100


def test_sums_survive_json_bit_for_bit():
    window = LossWindow()
    for value in torch.rand(7):
        window.add(loss=value, counted=torch.tensor(3))
    twin = LossWindow()
    twin.load_state_dict(json.loads(json.dumps(window.state_dict())))
    for w in (window, twin):
        w.add(loss=torch.tensor(0.1))
    assert window.flush() == twin.flush()
    assert window.flush() == {}


def test_perplexity_overflows_to_infinity():
    assert perplexity(0) == 1
    assert perplexity(1e4) == float("inf")
