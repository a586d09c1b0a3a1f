"""What people use today, at the size of `model=340m` and trained in the same way: transformers' Llama, fla's models.

fp32 weights, bf16 autocast, fused AdamW, clipping; rows are one document each, since none of them takes packed ones the
same way. The weights are those of `model=340m`, 374 million, with the mixers' state of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from llm.bench.rows import RandomRows
from llm.bench.timing import WARMUP, Timing
from llm.metrics import peak_memory

SIZES = {"hidden_size": 1024, "num_hidden_layers": 24, "vocab_size": 32000, "use_cache": False}
CLIP = 1.0
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def llama(context: int, *, liger: bool = False, liger_loss: bool = False) -> nn.Module:
    """transformers' Llama, with all of liger-kernel's replacements (loss, norms, SwiGLU, rotary), or its loss alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if liger or liger_loss:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(rope=liger, rms_norm=liger, swiglu=liger, fused_linear_cross_entropy=True)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "attn_implementation": "sdpa"}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **heads, intermediate_size=2816, max_position_embeddings=context))


def fla_kda(context: int) -> nn.Module:
    """flash-linear-attention's Kimi Delta Attention."""
    from fla.models import KDAConfig, KDAForCausalLM

    sizes = {"head_dim": 128, "num_heads": 8, "expand_v": 1.0, "intermediate_size": 2624}
    return KDAForCausalLM(KDAConfig(**SIZES, **sizes, max_position_embeddings=context))


def fla_gdn(context: int) -> nn.Module:
    """flash-linear-attention's Gated DeltaNet."""
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
    from fla.ops.common import chunk_o

    # it refuses gated backward on Hopper with Triton 3.4 to 3.7.0; its gradients at K = 128 were found right there
    chunk_o.TRITON_ABOVE_3_7_1 = True
    sizes = {"head_dim": 128, "num_heads": 4, "expand_v": 2.0, "intermediate_size": 2816}
    return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**SIZES, **sizes, max_position_embeddings=context))


def fla_gla(context: int) -> nn.Module:
    """flash-linear-attention's gated linear attention."""
    from fla.models import GLAConfig, GLAForCausalLM

    sizes = {"num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "intermediate_size": 2816}
    return GLAForCausalLM(GLAConfig(**SIZES, **sizes, max_position_embeddings=context))


class Peer(NamedTuple):
    """A model as people train it. torch.compile fails on liger's loss, so it gets the rest of the model then."""

    build: Callable[[int], nn.Module]
    compiled: bool = False
    cudnn: bool = False


LIGER, LIGER_LOSS = partial(llama, liger=True), partial(llama, liger_loss=True)
PEERS = {
    "llama": Peer(llama),
    "llama-compiled": Peer(llama, compiled=True),
    "llama-compiled-cudnn": Peer(llama, compiled=True, cudnn=True),
    "llama-liger": Peer(LIGER),
    "llama-liger-cudnn": Peer(LIGER, cudnn=True),
    "llama-liger-compiled-cudnn": Peer(LIGER, compiled=True, cudnn=True),
    "llama-liger-loss-compiled-cudnn": Peer(LIGER_LOSS, compiled=True, cudnn=True),
    "fla-kda": Peer(fla_kda),
    "fla-gdn": Peer(fla_gdn),
    "fla-gla": Peer(fla_gla),
}


def time_peer(name: str, *, context: int, tokens: int, steps: int) -> Timing:
    """Time `steps` training steps of a peer behind the first and `WARMUP` others, on the GPU."""
    build, compiled, cudnn = PEERS[name]
    with torch.device("cuda"):
        model = build(context).train()
    if compiled:
        part = model.model if "liger" in name else model
        part.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    rows = RandomRows(SIZES["vocab_size"], context, packed=False)
    per_step = tokens // context

    def step(number: int) -> Tensor:
        texts = [rows.read(number * per_step + i).ids[:-1] for i in range(per_step)]
        ids = torch.from_numpy(np.stack(texts)).pin_memory().to("cuda", non_blocking=True)
        with _attention(cudnn), torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        with _attention(cudnn):
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    first, _ = _timed(step, range(1))
    _timed(step, range(1, 1 + WARMUP))
    seconds, loss = _timed(step, range(1 + WARMUP, 1 + WARMUP + steps))
    return Timing(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        context=context,
        rows=per_step,
        packed=False,
        milliseconds=1000 * seconds / steps,
        tokens_per_second=steps * tokens / seconds,
        memory=peak_memory(torch.device("cuda")),
        first_step=first,
        loss=loss.item(),
    )


def _attention(cudnn: bool) -> AbstractContextManager[None]:
    return sdpa_kernel(CUDNN_FIRST, set_priority=True) if cudnn else nullcontext()


def _timed(step: Callable[[int], Tensor], numbers: range) -> tuple[float, Tensor]:
    """Seconds of the steps with these numbers, and the last loss."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number in numbers:
        loss = step(number)
    torch.cuda.synchronize()
    return time.perf_counter() - began, loss
