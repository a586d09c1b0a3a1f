"""What a training step spends its time on: its parts, each run alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from llm.compiling import compiles
from llm.loss import NextTokenLoss, linear_cross_entropy
from llm.trainer import Trainer
from mixer_kernels.segments import Segments

ROUNDS = 5


def split(trainer: Trainer, step: float) -> dict[str, float]:
    """Milliseconds of mixers, MLPs, loss, optimizer and data in a step of `step` milliseconds, and what is left.

    Forward and backward of a mixer with its norm and residual, of an MLP with its own, compiled where the run is, times
    the layers of that kind; the head with the loss; clipping with the update. Batches are made while the device works:
    `data` counts only where it is not the host's turn to wait. Parts alone do not add up exactly to the step.
    """
    model, batch = trainer.model, next(trainer.batches).to(trainer.device)
    x = torch.randn(*batch.tokens.shape, model.layers[0].mlp_norm.weight.shape[0], device=trainer.device)
    compiled = compiles(trainer.config.compile, trainer.device)
    mix, feed = (torch.compile(f, dynamic=False) if compiled else f for f in (_mix, _feed))
    kinds: dict[type[nn.Module], list[nn.Module]] = {}
    for block in model.layers:
        kinds.setdefault(type(block.mixer), []).append(block)
    parts = {}
    for kind, blocks in kinds.items():
        alone = _both_passes(trainer, lambda x, b=blocks[0]: mix(b, x, batch.segments), x, blocks[0].mixer)
        parts[kind.__name__] = len(blocks) * alone
    block = model.layers[0]
    parts["MLP"] = len(model.layers) * _both_passes(trainer, lambda x: feed(block, x), x, block.mlp)
    parts["loss"] = _both_passes(trainer, lambda x: _loss(trainer, x, batch.targets), x, model.lm_head)
    passes = trainer.plan.passes
    parts = {name: passes * value for name, value in parts.items()}
    parts["optimizer"] = _optimizer(trainer)
    parts["rest"] = step - sum(parts.values())
    parts["data (host)"] = passes * _milliseconds(trainer, lambda: next(trainer.batches).to(trainer.device))
    return parts


def _mix(block: nn.Module, x: Tensor, segments: Segments) -> Tensor:
    return x + block.mixer(block.mixer_norm(x), segments).y


def _feed(block: nn.Module, x: Tensor) -> Tensor:
    return x + block.mlp(block.mlp_norm(x))


def _loss(trainer: Trainer, hidden: Tensor, targets: Tensor) -> Tensor:
    error = next(m.error for m in trainer.objective.modules() if isinstance(m, NextTokenLoss))
    model = trainer.model
    return linear_cross_entropy(hidden, model.head_weight, targets, model.vocab_size, error=error)[0]


def _both_passes(trainer: Trainer, function: Callable[[Tensor], Tensor], x: Tensor, module: nn.Module) -> float:
    leaf = x.detach().requires_grad_()
    wanted = [leaf, *module.parameters()]

    def both() -> None:
        with trainer.accelerator.autocast():
            y = function(leaf)
        torch.autograd.grad(y, wanted, torch.ones_like(y))

    return _milliseconds(trainer, both)


def _optimizer(trainer: Trainer) -> float:
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def update() -> None:
        trainer.clip()
        trainer.state.optimizer.step()

    return _milliseconds(trainer, update)


def _milliseconds(trainer: Trainer, function: Callable[[], object]) -> float:
    """Of one call, after one that compiles."""
    function()
    synchronize(trainer.device)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        function()
    synchronize(trainer.device)
    return 1000 * (time.perf_counter() - began) / ROUNDS


def synchronize(device: torch.device) -> None:
    """Wait for `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
