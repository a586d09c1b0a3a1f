"""Everything that a run is at the end of a step: one state, saved and taken back whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llm.checkpoint import Checkpoints, DamagedCheckpoint, Snapshot, load_weights
from llm.errors import UserError
from llm.guard import SpikeDetector
from llm.metrics import LossWindow
from llm.optim import load_optimizer_tensors, optimizer_tensors
from llm.sharding import shard_like, whole


@dataclass
class TrainState:
    """The state of training after `step` optimizer steps.

    data      position of the data, as `llm.data.merge_states` gives it; None before the first step
    window    sums for the next line of metrics
    spikes    what the loss has been like, to tell a spike from
    reported  whether this step's line of metrics is written; False when a stop came during its evaluation
    probes    values by layer for this step's line of metrics
    latest    the newest value of everything that was logged
    val_loss  the validation loss at this very step, where it was measured
    """

    model: nn.Module
    optimizer: Optimizer
    step: int = 0
    tokens: int = 0
    data: dict[str, Any] | None = None
    window: LossWindow = field(default_factory=LossWindow)
    reported: bool = True
    probes: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    val_loss: float | None = None

    def __post_init__(self) -> None:
        self.spikes = SpikeDetector(torch.device(self.window.device))
        self.copies = CopyStream(torch.device(self.window.device))

    def capture(self, rng_by_rank: list[dict[str, Tensor]], *, keep: bool = True) -> Snapshot:
        """A copy of the whole state on the CPU. `rng_by_rank` comes from `rng_tensors`.

        Sharded tensors are gathered, so every rank has to call it; one with `keep` false gets no model and optimizer.
        From a GPU the copy goes on beside what the GPU does next: call
        `copies.before_update` before the weights change.
        """
        rng = {f"rank{r}.{name}": tensor for r, tensors in enumerate(rng_by_rank) for name, tensor in tensors.items()}
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "data": self.data,
            "window": self.window.state_dict(),
            "spikes": self.spikes.state_dict(),
            "reported": self.reported,
            "probes": self.probes,
            "latest": self.latest,
            "val_loss": self.val_loss,
            "world_size": len(rng_by_rank),
        }
        with self.copies.beside_training():
            model = _copies(model_tensors(self.model), keep)
            optimizer = _copies(optimizer_tensors(self.optimizer, self.model), keep)
        return Snapshot(model, optimizer, rng, state, wait=self.copies.done())

    def restore(self, snapshot: Snapshot, rank: int) -> None:
        """Become what `capture` saw. UserError where model and checkpoint do not fit.

        The random generators of a rank that did not exist then stay as they are.
        """
        load_model_tensors(self.model, snapshot.model)
        load_optimizer_tensors(self.optimizer, self.model, snapshot.optimizer)
        self.step, self.tokens = snapshot.state["step"], snapshot.state["tokens"]
        self.data, self.reported = snapshot.state["data"], snapshot.state["reported"]
        self.probes = snapshot.state["probes"]
        self.latest, self.val_loss = snapshot.state["latest"], snapshot.state["val_loss"]
        self.window.load_state_dict(snapshot.state["window"])
        self.spikes.load_state_dict(snapshot.state["spikes"])
        prefix = f"rank{rank}."
        mine = {k.removeprefix(prefix): tensor for k, tensor in snapshot.rng.items() if k.startswith(prefix)}
        if mine:
            set_rng_tensors(mine)


class CopyStream:
    """Copies from a GPU that go on beside the next forward pass; on a CPU they are done at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.event: torch.cuda.Event | None = None

    @contextmanager
    def beside_training(self) -> Iterator[None]:
        """Within it, copies are queued behind the work that there is, and before none that comes."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        self.event = self.stream.record_event()

    def before_update(self) -> None:
        """Let the device (the host does not stop) wait for the copies before it changes what is copied."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
            self.event = None

    def done(self) -> Callable[[], None]:
        """A function that returns when the copies begun so far are there."""
        return self.event.synchronize if self.event is not None else lambda: None


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a parameter that is tied appears once, under its first name."""
    unique = {name for name, _ in model.named_parameters()}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)} - unique
    return {name: tensor for name, tensor in model.state_dict().items() if name not in aliases}


def load_model_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy tensors of `model_tensors` into a model. UserError naming what is missing, left over or of other shape."""
    own = model_tensors(model)
    for name in sorted(own.keys() ^ tensors.keys()):
        where = "the checkpoint lacks" if name in own else "the model has no"
        raise UserError(f"the checkpoint does not fit the model: {where} {name}. Use the settings of its run.")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise UserError(
                f"the checkpoint does not fit the model: {name} is {list(tensors[name].shape)} there and "
                f"{list(tensor.shape)} here. Use the settings of its run."
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(shard_like(tensor, tensors[name]))


def check_initial_weights(init_from: str) -> Path:
    """The checkpoint's folder that `load_initial_weights` takes. UserError where there is none; nothing is read."""
    run, _, step = init_from.partition("@")
    checkpoints = Checkpoints(Path(run))
    if not checkpoints.steps():
        raise UserError(f"init_from={init_from}: {run} has no checkpoint. Give the folder of a run, or RUN@STEP.")
    if step and (not step.isdigit() or int(step) not in checkpoints.steps()):
        raise UserError(f"init_from={init_from}: {run} has no step {step}. It has: {checkpoints.steps()}.")
    return checkpoints.path(int(step) if step else checkpoints.steps()[-1])


def load_initial_weights(model: nn.Module, init_from: str) -> None:
    """Start from the weights of another run: ``RUN`` (its newest checkpoint) or ``RUN@STEP``."""
    folder = check_initial_weights(init_from)
    try:
        load_model_tensors(model, load_weights(folder))
    except DamagedCheckpoint as error:
        run = folder.parent.parent
        raise UserError(
            f"init_from={init_from}: {error}. Give another one as {run}@STEP: {Checkpoints(run).others(folder)}."
        ) from error


def _copies(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors on the CPU that later steps do not change, or nothing unless `keep`."""
    copies = {}
    for name, tensor in tensors.items():
        gathered = whole(tensor.detach())
        if keep:
            copies[name] = gathered.to("cpu", copy=True, non_blocking=True)
    return copies


def seed_everything(seed: int, rank: int) -> None:
    """Seed all generators of this process; ranks get different streams."""
    random.seed(f"{seed}/{rank}")
    np.random.seed([seed, rank])
    torch.manual_seed(seed * 1_000_003 + rank)


def rng_tensors() -> dict[str, Tensor]:
    """The state of the generators of torch (CPU, current GPU), python and numpy."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "numpy_tail": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def set_rng_tensors(tensors: dict[str, Tensor]) -> None:
    """Take back `rng_tensors`."""
    torch.set_rng_state(tensors["torch"])
    gauss = tensors["python_gauss"].item()
    random.setstate((3, tuple(tensors["python"].tolist()), None if gauss != gauss else gauss))
    position, has_gauss, cached = tensors["numpy_tail"].tolist()
    np.random.set_state(("MT19937", tensors["numpy"].numpy().astype(np.uint32), int(position), int(has_gauss), cached))
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
