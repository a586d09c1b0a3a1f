"""torch.compile of the blocks: one graph for all layers of a kind, in training; evaluation stays eager."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from llm.loss import NextTokenLoss, softmax_error

KINDS = 64  # of blocks times shapes that one program may compile; torch's own limit of 8 is soon met by hybrids


def compiles(wanted: bool | None, device: torch.device) -> bool:
    """What `compile=` means on `device`: null is yes on a GPU, no on a CPU, where it takes longer than it saves."""
    return device.type == "cuda" if wanted is None else wanted


def compile_blocks(decoder: nn.Module, backend: str = "inductor", **options: object) -> None:
    """Have each of `decoder.layers` compiled when it is first called; `options` are torch.compile's.

    Blocks are compiled in place, so that names of parameters, and with them checkpoints, stay as they are. Weights are
    arguments of a graph: layers with the same mixer share one. Shapes are static but for the number of documents.
    """
    import torch._dynamo  # seconds, for those who compile alone

    from llm.joining import joining

    torch._dynamo.config.recompile_limit = max(KINDS, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.optimize_ddp = False  # it cuts graphs at DDP's buckets; blocks are pieces enough
    for block in decoder.layers:
        block.compile(backend=joining(backend), **{"dynamic": False, **options})


def compile_objective(objective: nn.Module, backend: str = "inductor", **options: object) -> None:
    """Compile the parts of every `NextTokenLoss` in `objective`: the blocks of its decoder, the error of its logits."""
    for module in objective.modules():
        if isinstance(module, NextTokenLoss):
            compile_blocks(module.decoder, backend, **options)
            module.error = torch.compile(softmax_error, backend=backend, **{"dynamic": False, **options})


def compiled_graphs() -> int:
    """Graphs compiled in this process so far: forward and backward of a kind of block count once."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules eagerly inside, without compiling for other shapes and modes than training's."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
