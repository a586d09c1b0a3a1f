"""What a run measures of itself: losses without a sync each step, throughput, MFU, memory, time left."""

from __future__ import annotations

import math
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Dense bf16 matrix peaks in FLOP/s by a word of the device's name, from the makers' data sheets. (Their headline
# figures for Hopper and Ada assume 2:4 sparsity and are twice these.) The first match counts: special cases come first.
DENSE_BF16_PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI300X": 1307.4e12,
}

# metrics that differ from start to start
TIMINGS = ("tokens_per_second", "mfu", "eta_seconds", "memory_gib", "compiled_graphs")
TRAINING_FLOPS = 3  # backward costs two products for each one of forward


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of `device` in FLOP/s; None for a CPU and for devices that the table lacks."""
    if device.type != "cuda":
        return None
    return named_peak_flops(torch.cuda.get_device_name(device))


def named_peak_flops(name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of the device with this name, as the driver gives it."""
    return next((peak for part, peak in DENSE_BF16_PEAKS.items() if re.search(rf"\b{part}\b", name)), None)


def peak_memory(device: torch.device) -> float:
    """Most memory that this process has held, in GiB: of the GPU where there is one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def sum_len_squared(row_start_BT: Tensor) -> int:
    """Sum over the documents of packed rows of their squared lengths, which softmax attention's cost goes by.

    A token at position p of its document adds 2p + 1, and those sum to the square of the length.
    """
    positions = torch.arange(row_start_BT.shape[-1], device=row_start_BT.device) - row_start_BT.clamp(min=0)
    return int((2 * positions + 1).sum())


class Clock:
    """Time spent training: it stands still while evaluating or saving."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.now = device, now
        self.started = now()
        self.paused_seconds = 0.0

    def seconds(self) -> float:
        """Seconds of training so far."""
        return self.now() - self.started - self.paused_seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens inside out of the count; what the GPU still has to do of training is waited for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        began = self.now()
        try:
            yield
        finally:
            self.paused_seconds += self.now() - began


class Throughput:
    """Tokens and FLOPs against the clock, since the last report."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.peak = peak_flops(clock.device)
        self.restart()

    def restart(self) -> None:
        """Begin a new window."""
        self.began, self.steps, self.tokens, self.flops = self.clock.seconds(), 0, 0, 0.0

    def add(self, *, tokens: int, flops: float) -> None:
        """Count an optimizer step: its tokens over all devices, and the FLOPs of this device."""
        self.steps += 1
        self.tokens += tokens
        self.flops += flops

    def report(self, *, steps_left: int) -> dict[str, float]:
        """{tokens_per_second, mfu (where the peak is known), eta_seconds} of the window, and begin a new one."""
        seconds = self.clock.seconds() - self.began
        if not self.steps or seconds <= 0:
            return {}
        values = {"tokens_per_second": self.tokens / seconds}
        if self.peak and self.flops:
            values["mfu"] = self.flops / seconds / self.peak
        values["eta_seconds"] = steps_left * seconds / self.steps
        self.restart()
        return values


@dataclass
class LossWindow:
    """Sums since the last line of metrics, in fp64 on the device: adding to them waits for nothing.

    They are sums over all ranks, and part of the train state, so that a resumed run writes the same lines.
    """

    device: torch.device | str = "cpu"
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, **values: Tensor) -> None:
        """Add scalars to the sums of their names."""
        for name, value in values.items():
            wide = value.detach().to(torch.float64)
            self.sums[name] = self.sums[name] + wide if name in self.sums else wide

    def state_dict(self) -> dict[str, float]:
        """The sums as JSON data (a float64 survives JSON exactly). Waits for the device."""
        return {name: value.item() for name, value in self.sums.items()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take back `state_dict`."""
        self.sums = {name: torch.tensor(v, dtype=torch.float64, device=self.device) for name, v in state.items()}

    def flush(self) -> dict[str, float]:
        """The sums as numbers, and begin anew. Waits for the device."""
        values = self.state_dict()
        self.sums = {}
        return values


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
