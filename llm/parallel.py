"""The processes of a run: how accelerate is set up, where the weights lie, and how ranks agree."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from llm.config import TrainConfig
from llm.errors import UserError


def build_accelerator(config: TrainConfig) -> Accelerator:
    """The accelerator of this process. Call it before anything touches a GPU: `deterministic` has to be set up first.

    Weights stay fp32 in every case; `precision` chooses the autocast of the forward pass. UserError where accelerate
    has been told to share the weights out itself.
    """
    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise UserError(f"accelerate is set up for {name}. Start without it, and choose parallel=fsdp or hsdp.")
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


def distribute(objective: nn.Module, config: TrainConfig, accelerator: Accelerator) -> nn.Module:
    """`objective` (a `NextTokenLoss`) on its device, under autocast, as `config.parallel` has it:

    ddp   every process has all weights
    fsdp  weights, gradients and optimizer state are sharded over all processes (FSDP2), gathered block by block for use
    hsdp  sharded over `config.shard_over` processes (null: those of one machine), copied between such groups

    Build the optimizer afterwards: sharding replaces the parameters. One process has nothing to share.
    """
    objective.to(accelerator.device)
    if config.parallel == "ddp" or accelerator.num_processes == 1:
        return accelerator.prepare_model(objective)
    # accelerate itself would leave FSDP2 out on a CPU without a word; done here, it is tested there
    _shard(objective, _mesh(config, accelerator))
    return accelerator.prepare_model(objective, device_placement=False, evaluation_mode=True)  # autocast, no DDP


def _shard(objective: nn.Module, mesh: DeviceMesh) -> None:
    # weights stay fp32 and autocast makes the casts, as under DDP; the sums of gradients are fp32
    policy = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32)
    for block in objective.decoder.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(objective, mesh=mesh, mp_policy=policy)  # embedding, last norm and head stay whole through a step


def _mesh(config: TrainConfig, accelerator: Accelerator) -> DeviceMesh:
    processes, kind = accelerator.num_processes, accelerator.device.type
    shards = group_size(config, processes)
    if config.parallel == "fsdp":
        return init_device_mesh(kind, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (processes // shards, shards), mesh_dim_names=("copy", "shard"))


def group_size(config: TrainConfig, processes: int) -> int:
    """Processes that share one copy of the weights. UserError where that does not divide them."""
    if config.parallel != "hsdp":
        return processes if config.parallel == "fsdp" else 1
    shards = config.shard_over or int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if processes % shards:
        raise UserError(f"shard_over={shards}: does not divide the {processes} processes. Choose a divisor.")
    return shards


@contextmanager
def last_pass(objective: nn.Module, last: bool, accelerator: Accelerator) -> Iterator[None]:
    """Ranks exchange gradients in the last backward pass of a step only."""
    if isinstance(objective, FSDPModule):
        objective.set_requires_gradient_sync(last)
        yield
    else:
        with nullcontext() if last else accelerator.no_sync(objective):
            yield


@contextmanager
def outer_weights(objective: nn.Module) -> Iterator[None]:
    """Within it, parts of `objective` outside its blocks can be called without it; every rank has to enter."""
    sharded = isinstance(objective, FSDPModule)
    if sharded:
        objective.unshard()
    try:
        yield
    finally:
        if sharded:
            objective.reshard()


def settle(accelerator: Accelerator) -> None:
    """Call it when there is nothing more to agree on, before connections between processes end, however that comes.

    A thread of gloo wants Python's lock to let go of the last exchange, and whoever ends the connection waits for that
    thread with the lock held (seen with torch 2.13: one rank in three then hangs). So it gets a moment first.
    """
    if accelerator.num_processes > 1:
        time.sleep(0.3)


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
