"""Softmax attention over packed documents and over a cache."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def attend(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, visible_BTS: Tensor) -> Tensor:
    """Scaled dot-product attention, [B, T, H, K].

    q [B, T, H, K]; k, v [B, S, HKV, K] with H a multiple of HKV (grouped queries); visible bool [B, T, S], at least one
    key for every query.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSHK, v_BSHK))  # [B, H, T, K]
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_BTS[:, None], enable_gqa=grouped)
    return o.transpose(1, 2)
