"""The sizes of a call of an operator, as its launches need them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

CHUNK = 64


class Sizes(NamedTuple):
    """The shape legend of a call, its N chunks, and its decay as kernels number it: 0 none, 1 scalar, 2 channel."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    decay: int

    @classmethod
    def of(cls, q: Tensor, v: Tensor, g: Tensor | None) -> Sizes:
        """From q [B, T, H, K], v [B, T, HV, V] and g [B, T, HV, K or 1]."""
        B, T, H, K = q.shape
        decay = 0 if g is None else 1 if g.shape[-1] == 1 else 2
        return cls(B, T, H, v.shape[2], K, v.shape[3], -(-T // CHUNK), decay)

    @property
    def state(self) -> tuple[int, int, int, int]:
        return self.B, self.HV, self.K, self.V

    @property
    def gates(self) -> str:
        """How configurations tell kernels apart: one gate a channel is other work than one a head or none."""
        return "channel" if self.decay == 2 else "scalar"

    @property
    def chunks(self) -> int:
        """Chunks of all heads of all rows."""
        return self.B * self.HV * self.N
