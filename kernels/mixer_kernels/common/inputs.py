"""Random inputs of the operators, ordinary and extreme, from which their `spec.py` draw."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from mixer_kernels.segments import Segments
from mixer_kernels.spec import Case

CUT_AT = 64  # "many" documents have one boundary here: on the edge of every chunk length in use


class Draw:
    """Seeded standard normal numbers, the same on every device: drawn on the CPU in fp32, then moved."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = torch.device(device)

    def __call__(self, *shape: int) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(*shape, device="meta")
        return torch.randn(*shape, generator=self.generator).to(self.device)


def make_segments(case: Case, draw: Draw) -> Segments:
    """The documents of a case. With `continued` each row begins inside a document."""
    start = torch.zeros(case.batch, case.tokens, dtype=torch.bool)
    if case.documents == "single":
        start[:] = True
    elif case.documents != "one":
        count = case.documents if isinstance(case.documents, int) else max(2, case.tokens // 24)
        order = torch.rand(case.batch, case.tokens, generator=draw.generator).argsort(dim=1)
        start.scatter_(1, order[:, :count], True)
        start[:, CUT_AT : CUT_AT + 1] = True
    start[:, 0] = not case.continued
    return Segments.from_starts(start.to(draw.device))


def make_keys(case: Case, draw: Draw, *shape: int) -> Tensor:
    """Unit keys [B, T, H, K]: independent, or "keys correlated" (cosine about .9) or "keys identical"."""
    keys = draw(*shape)
    common = draw(shape[0], 1, *shape[2:])
    if case.stress == "keys correlated":
        keys = 3 * common + keys
    elif case.stress == "keys identical":
        keys = common.expand(shape)
    return normalize(keys, dim=-1)


def make_decay(case: Case, draw: Draw, *shape: int) -> Tensor:
    """Log-decays [B, T, HV, J]: gates of GLA's size, or under a "decay 0", "decay -20" or "decay mixed" stress.

    Mixed has runs of 24 tokens without decay, with a decay of -20 a step and with an ordinary one, shifted by channel.
    """
    x = draw(*shape)
    ordinary = logsigmoid(x) / 16
    if case.stress == "decay 0":
        return torch.zeros_like(x)
    if case.stress == "decay -20":
        return torch.full_like(x, -20.0)
    if case.stress == "decay mixed":
        token, channel = (torch.arange(n, device=x.device) for n in (shape[1], shape[-1]))
        run = (token[:, None, None] // 24 + channel) % 3
        return torch.where(run == 0, 0.0, torch.where(run == 1, -20.0, ordinary))
    return ordinary
