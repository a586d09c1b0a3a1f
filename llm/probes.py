"""Which layer is it? Norms by layer at an interval, to see where a run blows up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from llm.data.batch import Batch
from llm.sharding import whole

LAYER = re.compile(r"layers\.\d+")


def gradient_norms(decoder: nn.Module) -> dict[str, float]:
    """grad_norm/<part>: norm of the gradient of each block and of what else the decoder has (embeddings, ...)."""
    parts: dict[str, list[Tensor]] = {}
    for name, parameter in decoder.named_parameters():
        if parameter.grad is not None:
            layer = LAYER.match(name)
            parts.setdefault(layer[0] if layer else name.split(".")[0], []).append(parameter.grad)
    return _numbers(
        {f"grad_norm/{part}": whole(nn.utils.get_total_norm(gradients)) for part, gradients in parts.items()}
    )


@torch.no_grad()
def forward_statistics(decoder: nn.Module, batch: Batch) -> dict[str, float]:
    """activation_rms/<layer> behind each block, and of the first row of `batch` by layer and entry of the state:

    state_rms at its end, and log_decay_mean, _min and _max of what multiplies the state at each token.

    It costs a forward pass of one row, run eagerly, so that compiled blocks are not compiled anew for it.
    """
    row = Batch(batch.tokens[:1], batch.targets[:1], batch.row_start[:1])
    with torch.compiler.set_stance("force_eager"), _outputs_of_layers(decoder) as found, _decays(decoder) as decays:
        out = decoder(row.tokens, row.segments, return_state=True)
    found |= decays
    found |= {
        f"state_rms/layers.{i}/{entry}": _rms(value)
        for i, state in enumerate(out.state)
        for entry, value in state.items()
        if value.is_floating_point()
    }
    return _numbers(found)


@contextmanager
def _outputs_of_layers(decoder: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collects the RMS of what each block puts out."""
    found: dict[str, Tensor] = {}

    def watch(name: str) -> object:
        def hook(module: nn.Module, args: object, output: tuple[Tensor, ...]) -> None:
            found[f"activation_rms/{name}"] = _rms(output[0])

        return hook

    handles = [m.register_forward_hook(watch(n)) for n, m in decoder.named_modules() if LAYER.fullmatch(n)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _decays(decoder: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collects what the mixers tell of their log-decays."""
    found: dict[str, Tensor] = {}

    def watch(layer: str) -> Callable[[str, Tensor], None]:
        def note(entry: str, log_decay: Tensor) -> None:
            wide = log_decay.float()
            for name, value in (("mean", wide.mean()), ("min", wide.amin()), ("max", wide.amax())):
                found[f"log_decay_{name}/{layer}/{entry}"] = value

        return note

    for i, block in enumerate(decoder.layers):
        block.mixer.watch = watch(f"layers.{i}")
    try:
        yield found
    finally:
        for block in decoder.layers:
            del block.mixer.watch


def _rms(tensor: Tensor) -> Tensor:
    return tensor.float().square().mean().sqrt()


def _numbers(values: dict[str, Tensor]) -> dict[str, float]:
    """One wait for the device for all of them."""
    return dict(zip(values, torch.stack([v.float() for v in values.values()]).tolist(), strict=True)) if values else {}
