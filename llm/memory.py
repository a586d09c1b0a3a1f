"""How much memory training takes on a GPU, estimated before it runs."""

from __future__ import annotations

import copy
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llm.config import TrainConfig
from llm.loss import CHUNK_BYTES
from llm.model.decoder import Decoder
from llm.model.recompute import recomputed
from mixer_kernels.segments import Segments

ASSUMED_BYTES = 80 * 2**30  # of a GPU, where this machine has none to ask
USABLE = 0.92  # of a GPU's memory: the rest is CUDA's own, and lost between blocks of the allocator
STATE_BYTES = 16  # a parameter, in fp32: weight, gradient, two moments of AdamW
# What compiled blocks keep, as a multiple of the results of their products and operators: peaks of 36.3, 44.3, 58.1 and
# 42.3 GiB of softmax, GDN, KDA and a 3:1 hybrid of GDN at 340M, 8 rows of 4096 tokens (H200, torch 2.11)
COMPILED_KEEP = 1.45
PROBE_TOKENS = (256, 512)  # two sizes tell what grows with the tokens from what does not


@dataclass(frozen=True)
class Memory:
    """Bytes of training, at its two peaks: in the loss, and in the backward pass of the block that needs most.

    `fixed` whatever the micro-batch, `by_token` of what is kept for the backward pass, `loss` of a chunk of logits,
    `backward_by_token` while one block computes gradients.
    """

    fixed: float
    by_token: float
    loss: float
    backward_by_token: float

    def at(self, tokens: int) -> float:
        """Peak with micro-batches of `tokens` tokens."""
        return self.fixed + tokens * self.by_token + max(self.loss, tokens * self.backward_by_token)

    def largest_micro_batch(self, context: int, device_bytes: int) -> int:
        """Rows of `context` tokens for which a device of that size has room; 0 where not even one fits."""
        room = USABLE * device_bytes - self.fixed
        tokens = min((room - self.loss) / self.by_token, room / (self.by_token + self.backward_by_token))
        return max(0, int(tokens // context))


def training_memory(config: TrainConfig, model: Decoder, checkpointing: str) -> Memory:
    """The peak of training `model` (the meta device will do) under bf16 autocast, on one GPU that has all weights.

    A forward pass of each kind of block with tensors that have no contents tells what it keeps. Assumed: compiled
    blocks keep `COMPILED_KEEP` times the results of their products and operators; the backward pass of a block takes as
    much again as it keeps without checkpointing; and a chunk of logits `CHUNK_BYTES`, twice that if not compiled.
    """
    compiled = config.compile is not False
    kinds: dict[str, tuple[tuple[float, float], float]] = {}
    for block in model.layers:
        if repr(block) not in kinds:
            kinds[repr(block)] = _kept(block, checkpointing, compiled), _kept(block, "none", compiled)[1]
    kept = [kinds[repr(block)][0] for block in model.layers]
    head = 4 * model.head_weight.numel()  # its gradient, which the loss makes
    hidden = 3 * 4 * config.model.d_model  # in and out of the last norm, and the gradient
    return Memory(
        fixed=STATE_BYTES * sum(p.numel() for p in model.parameters()) + sum(fixed for fixed, _ in kept) + head,
        by_token=sum(by_token for _, by_token in kept) + hidden,
        loss=CHUNK_BYTES * (1 if compiled else 2),
        backward_by_token=max(unchecked for _, unchecked in kinds.values()),
    )


def device_memory() -> tuple[int, str]:
    """(bytes of this machine's GPU, its name), or what is assumed where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name(0)
    return ASSUMED_BYTES, "assumed"


def _kept(block: nn.Module, checkpointing: str, compiled: bool) -> tuple[float, float]:
    """(bytes whatever the tokens, bytes by token) that a block keeps between its forward and its backward pass."""
    small, large = PROBE_TOKENS
    few, many = (_bytes_kept(block, tokens, checkpointing, compiled) for tokens in PROBE_TOKENS)
    by_token = (many - few) / (large - small)
    excess = COMPILED_KEEP if compiled and checkpointing == "none" else 1.0
    return few - small * by_token, excess * by_token


def _bytes_kept(block: nn.Module, tokens: int, checkpointing: str, compiled: bool) -> int:
    block = copy.deepcopy(block)
    block.checkpointing = checkpointing
    products_only = compiled and checkpointing == "none"
    if getattr(block.mixer, "impl", None) == "auto":
        with suppress(ValueError):  # a GPU will run Triton, where the kernels take such inputs
            block.mixer.impl = "triton"
            return _count(block, tokens, products_only)
        block.mixer.impl = "auto"
    return _count(block, tokens, products_only)


def _count(block: nn.Module, tokens: int, products_only: bool) -> int:
    """Bytes of the tensors that live between a forward and a backward pass under autocast; none has any contents."""
    shapes = {name: p.shape for name, p in block.named_parameters()}
    with FakeTensorMode():
        weights = {name: torch.empty(shape, requires_grad=True) for name, shape in shapes.items()}
        segments = Segments.whole_rows(1, tokens)
        x_BTD = torch.empty(1, tokens, block.mixer.d_model, requires_grad=True)

        def run(x_BTD: Tensor) -> Tensor:
            return torch.func.functional_call(block, weights, (x_BTD, segments)).y

        with _Living() as living, torch.autocast("cpu", torch.bfloat16):
            y_BTD = recomputed(run, x_BTD, keep_products=True) if products_only else run(x_BTD)
        kept = living.bytes()  # what backward needs hangs on the graph of y, and lives as long as it
        del y_BTD
    return kept


class _Living(TorchDispatchMode):
    """Remembers the storages that operations make, without holding them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return out

    def bytes(self) -> int:
        """Of those that are still there."""
        return sum(size for storage, size in self.seen.values() if storage() is not None)
