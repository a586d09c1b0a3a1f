"""Rotations whose angles depend on the tokens."""

from __future__ import annotations

from torch import Tensor, nn

from llm.mixers.walk import Walk
from llm.model.norm import l2_normalize
from llm.model.precision import widen
from llm.model.rotary import frequencies
from llm.model.shortconv import ShortConvolution

THETA = 500_000.0
TAPS = 4


class SelectiveRotation(nn.Module):
    """Selective RoPE: ``theta_t = tau * sum_{s <= t} conv4(W_2 W_1 unit(x_s))``, the angles of queries and keys.

    Movahedi et al. 2025, arXiv 2511.17388. In place of the position it is the sum, over the document, of steps that the
    tokens choose, through `rank` channels and a convolution without activation; tau is RoPE's ladder of frequencies
    with base 500,000, fixed. After a rotation a linear mixer's transition is complex: its decay times exp(i tau phi).
    Left out: the sigmoid gate and the bias of the steps, which its code has as options.
    """

    def __init__(self, d_model: int, heads: int, head_dim: int, *, rank: int) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"a head's size of {head_dim} is odd: a rotation turns pairs; use an even size")
        self.heads, self.pairs = heads, head_dim // 2
        self.down = nn.Linear(d_model, rank, bias=False)
        self.up = nn.Linear(rank, heads * self.pairs, bias=False)
        self.conv1d = ShortConvolution(heads * self.pairs, TAPS, silu=False)

    def forward(self, x: Tensor, walk: Walk) -> Tensor:
        """Angles [.., H, K/2], at least fp32, of x [.., D]."""
        step = walk.convolve("phase_conv1d", self.conv1d, self.up(self.down(l2_normalize(x))))
        phase = walk.running_sum("phase", step.unflatten(-1, (self.heads, self.pairs)))
        return phase * frequencies(self.pairs, THETA, widen(x))

    def wide_state(self) -> dict[str, tuple[int, ...]]:
        """See `RecurrentMixer.wide_state`."""
        return {"phase": (self.heads, self.pairs)}

    def narrow_state(self) -> dict[str, tuple[int, ...]]:
        """See `RecurrentMixer.narrow_state`."""
        return {"phase_conv1d": (TAPS - 1, self.heads * self.pairs)}
