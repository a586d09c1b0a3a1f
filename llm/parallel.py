"""The processes of a run: how accelerate is set up, and how ranks agree."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs

from llm.config import TrainConfig


def build_accelerator(config: TrainConfig) -> Accelerator:
    """The accelerator of this process. Call it before anything touches a GPU: `deterministic` has to be set up first.

    Weights stay fp32 in every case; `precision` chooses the autocast of the forward pass.
    """
    if config.deterministic:
        make_deterministic()
    on_gpu = torch.cuda.is_available()
    bf16 = config.precision == "bf16" or (config.precision == "auto" and on_gpu and torch.cuda.is_bf16_supported())
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    return Accelerator(cpu=not on_gpu, mixed_precision="bf16" if bf16 else "no", kwargs_handlers=[ddp])


def make_deterministic() -> None:
    """Choose algorithms that give the same bits each time, at some cost in speed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch._inductor.config.deterministic = True


class Agreement:
    """A number that all ranks share: the greatest of theirs. It goes over gloo, so that no GPU is waited for."""

    def __init__(self) -> None:
        self.distributed = dist.is_initialized() and dist.get_world_size() > 1
        needs_group = self.distributed and dist.get_backend() != "gloo"
        self.group = dist.new_group(backend="gloo") if needs_group else None

    def greatest(self, value: int) -> int:
        """The greatest `value` of all ranks; every rank has to call it."""
        if not self.distributed:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return int(tensor)
