"""Softmax attention over packed documents and over a cache."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from mixer_kernels.segments import Segments

# cuDNN's kernels take two thirds of the time of torch's own flash attention on an H200, but are not deterministic:
# torch passes over them where that is asked for
FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
LARGEST_FLASH_HEAD = 256
GROUPS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def attend_causally(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, segments: Segments, window: int | None) -> Tensor:
    """Attention within each document of packed rows, [B, T, H, K], without a cache of earlier tokens.

    q [B, T, H, K]; k, v [B, T, HKV, K] with H a multiple of HKV (grouped queries); a token sees itself and the tokens
    of its document before it, with `window` the last so many only. Whole rows go to the fastest kernel that torch has,
    packed ones on a GPU to its attention over rows of any length. The rest (a CPU, fp32) masks.
    """
    if segments.whole and window is None:
        return _whole_rows(q_BTHK, k_BTHK, v_BTHK)
    if segments.cu_seqlens is not None and _fits_flash(q_BTHK):
        return _laid_end_to_end(q_BTHK, k_BTHK, v_BTHK, segments.cu_seqlens, window)
    return attend(q_BTHK, k_BTHK, v_BTHK, segments.visible(window))


def attend(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, visible_BTS: Tensor) -> Tensor:
    """Scaled dot-product attention, [B, T, H, K].

    q [B, T, H, K]; k, v [B, S, HKV, K] with H a multiple of HKV (grouped queries); visible bool [B, T, S], at least one
    key for every query.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSHK, v_BSHK))  # [B, H, T, K]
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_BTS[:, None], enable_gqa=grouped)
    return o.transpose(1, 2)


def _whole_rows(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))  # [B, H, T, K]
    grouped = q.shape[1] != k.shape[1]
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def _fits_flash(q: Tensor) -> bool:
    """Whether torch's flash attention takes such inputs."""
    halves = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and halves and q.shape[-1] % 8 == 0 and q.shape[-1] <= LARGEST_FLASH_HEAD


def _laid_end_to_end(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None) -> Tensor:
    """Documents as rows of different lengths. The length of a row bounds theirs, so that none is known on the host."""
    tokens, groups = q.shape[1], q.shape[2] // k.shape[2]
    if groups > 1 and not GROUPS:
        k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    q_NHK, k_NHK, v_NHK = (x.flatten(0, 1) for x in (q, k, v))  # [B, T, ...] -> [B * T, ...]
    back = -1 if window is None else window - 1
    o = varlen_attn(q_NHK, k_NHK, v_NHK, cu_seqlens, cu_seqlens, tokens, tokens, window_size=(back, 0), **GROUPS)
    return o.unflatten(0, q.shape[:2])
