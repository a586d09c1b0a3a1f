"""Numbers that are not finite, and losses that jump."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from llm.data.batch import Batch
from llm.errors import UserError


class NonFiniteError(UserError):
    """A loss or a gradient was not finite, and training may not go on."""


class Guard:
    """Decides whether an optimizer step may happen.

    raise     training ends with an error. Nothing waits for the device at each step: the first bad step is noted on the
              device, and read when values are read anyway, before anything is saved
    skip      the weights stay as they are; step, schedule and data go on
    rollback  back to the newest checkpoint, but the data go on behind the bad step

    The latter two read one flag each step. More than `limit` bad steps without getting beyond them are an error.
    """

    def __init__(self, policy: str, limit: int, device: torch.device) -> None:
        self.policy, self.limit = policy, limit
        self.first_bad = torch.zeros((), dtype=torch.int64, device=device)
        self.last_bad, self.in_a_row = 0, 0

    def admits(self, step: int, loss: Tensor, grad_norm: Tensor) -> bool:
        """May `step`, with this loss and gradient norm, change the weights?"""
        bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        if self.policy == "raise":
            self.first_bad = torch.where(bad & (self.first_bad == 0), step, self.first_bad)
            return True
        if not bad.item():
            if step > self.last_bad:
                self.in_a_row = 0
            return True
        self.last_bad, self.in_a_row = step, self.in_a_row + 1
        if self.in_a_row > self.limit:
            raise NonFiniteError(
                f"the loss or the gradient of step {step} is not finite, for the {self.in_a_row}th time in a row "
                f"(max_skips={self.limit}). Start again from an earlier checkpoint with a lower optim.lr (init_from)."
            )
        return False

    def check(self) -> None:
        """NonFiniteError if a step so far was bad under `raise`. Waits for the device."""
        if bad := self.first_bad.item():
            raise NonFiniteError(
                f"the loss or the gradient of step {bad} is not finite (on_nonfinite=raise). The newest checkpoint is "
                "older than that. Lower optim.lr, lengthen schedule.warmup, choose on_nonfinite=skip or rollback, or "
                f"look at it with: python -m llm.replay RUN --step {bad}"
            )


class SpikeDetector:
    """Counts steps whose loss is far above those before: by `sigmas` deviations of the last hundred or so.

    Means run on the device in fp64, so that noting a step waits for nothing; they are part of the train state.
    """

    def __init__(self, device: torch.device, *, sigmas: float = 6.0, memory: float = 0.99, warmup: int = 50) -> None:
        self.sigmas, self.memory, self.warmup = sigmas, memory, warmup
        self.moments = torch.zeros(3, dtype=torch.float64, device=device)  # weight, sum, sum of squares: all decayed
        self.seen = 0

    def is_spike(self, loss: Tensor) -> Tensor:
        """bool scalar: is the mean loss of a step a spike? Then it is left out of the means."""
        loss = loss.detach().double()
        weight, total, squares = self.moments.unbind()
        mean = total / weight.clamp(min=1e-9)
        deviation = (squares / weight.clamp(min=1e-9) - mean**2).clamp(min=0).sqrt()
        spike = (loss > mean + self.sigmas * deviation) if self.seen >= self.warmup else torch.zeros_like(loss).bool()
        new = self.memory * self.moments + torch.stack([torch.ones_like(loss), loss, loss**2])
        self.moments = torch.where(spike | ~torch.isfinite(loss), self.moments, new)
        self.seen += 1
        return spike

    def state_dict(self) -> dict[str, list[float] | int]:
        """JSON data. Waits for the device."""
        return {"moments": self.moments.tolist(), "seen": self.seen}

    def load_state_dict(self, state: dict[str, list[float] | int]) -> None:
        """Take back `state_dict`."""
        self.moments = torch.tensor(state["moments"], dtype=torch.float64, device=self.moments.device)
        self.seen = state["seen"]


def save_offending_batches(run_dir: Path, step: int, rank: int, micro_batches: list[Batch]) -> Path:
    """Store the rows of a bad step for inspection: nonfinite/step_S_rank_R.safetensors with the tensors of `Batch`."""
    path = run_dir / "nonfinite" / f"step_{step:08d}_rank_{rank}.safetensors"
    path.parent.mkdir(exist_ok=True)
    names = ("tokens", "targets", "row_start")
    rows = {name: torch.cat([getattr(batch, name) for batch in micro_batches]).cpu() for name in names}
    safetensors.torch.save_file(rows, path)
    return path
