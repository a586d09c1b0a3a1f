"""Softmax attention with a bias for each key."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from mixer_kernels.segments import Segments

# eager flex attention computes all logits at once; compiled it is one kernel, within a compiled model too
_flex_attention = torch.compile(flex_attention, dynamic=False)


def attend_biased_rows(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, bias_BTH: Tensor, segments: Segments, window: int | None
) -> Tensor:
    """`attend_biased` within the documents of packed rows, [B, T, H, K]; on a GPU by flex attention."""
    if not q_BTHK.is_cuda:
        return attend_biased(q_BTHK, k_BTHK, v_BTHK, bias_BTH, segments.visible(window))
    bias_BHT, row_start = bias_BTH.mT.contiguous(), segments.row_start.clamp(min=0)

    def visible(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        seen = (s <= t) & (s >= row_start[b, t])
        return seen if window is None else seen & (s > t - window)

    def biased(logit: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return logit + (bias_BHT[b, h, s] - bias_BHT[b, h, t])  # the difference is small where both are large

    batch, tokens, heads, _ = q_BTHK.shape
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))  # [B, H, T, K]
    blocks = create_block_mask(visible, batch, None, tokens, tokens, device=q.device)
    o = _flex_attention(q, k, v, score_mod=biased, block_mask=blocks, enable_gqa=heads != k.shape[1])
    return o.transpose(1, 2)


def attend_biased(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, bias_BSH: Tensor, visible_BTS: Tensor) -> Tensor:
    """Scaled dot-product attention with `bias` added to the logits of key s in each head, [B, T, H, K].

    q [B, T, H, K]; k, v [B, S, HKV, K] with H a multiple of HKV; bias [B, S, H]; visible bool [B, T, S], at least one
    key for every query. Computed in the bias's dtype, which 16 bits would spoil.
    """
    q, k, v = (x.to(bias_BSH.dtype).transpose(1, 2) for x in (q_BTHK, k_BSHK, v_BSHK))  # [B, H, T, K]
    mask = torch.where(visible_BTS[:, None], bias_BSH.mT[:, :, None], -torch.inf)  # [B, H, T, S]
    with torch.autocast(q.device.type, enabled=False):
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return o.transpose(1, 2).to(v_BSHK.dtype)
