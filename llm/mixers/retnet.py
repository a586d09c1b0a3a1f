"""Retention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llm.mixers.recurrent import AdditiveMixer
from llm.mixers.walk import Walk
from llm.model.precision import widen
from llm.model.rotary import rotate


class Retention(AdditiveMixer):
    """``S_t = gamma_h S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t / sqrt(K)``, gamma_h = 1 - 2^(-5-h) (arXiv 2307.08621).

    The retention of RetNet (Sun et al. 2023): a fixed decay for each head h = 0, 1, ..., and q and k rotated by their
    position (`rope_theta`). Each head's output is normalised (RMS in place of the paper's group norm, as in its
    published code) and multiplied by SiLU of a gate.
    """

    counts_positions = True

    def __init__(
        self, d_model: int, layer_idx: int, n_layers: int, *, rope_theta: float = 10000.0, **common: Any
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, **common)
        self.rope_theta = rope_theta

    def mix(self, x: Tensor, walk: Walk) -> Tensor:
        q, k, v = self.project(x, walk)
        positions = walk.positions()
        q, k = rotate(q, positions, self.rope_theta), rotate(k, positions, self.rope_theta)
        head = torch.arange(self.num_heads, device=x.device, dtype=widen(x).dtype)
        g = torch.log1p(-(2.0 ** (-5.0 - head))).expand(v.shape[:-1])  # [.., H]
        return self.readout(self.recur(walk, {"q": q, "k": k, "v": v, "g": g}), x)
