"""Between tensors that are spread over processes and tensors that are whole."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered where it is sharded: then every rank has to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(pattern: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, which every rank has whole, as `pattern` of the same shape lies: on its device and sharded as it is.

    Every rank takes its part; nothing is sent.
    """
    tensor = tensor.to(pattern.device)
    if not isinstance(pattern, DTensor):
        return tensor
    return distribute_tensor(tensor, pattern.device_mesh, pattern.placements, src_data_rank=None)
