"""What recurrence tests share: a look at what goes into a mixer's recurrence and at what comes out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mixer_kernels import Segments


@pytest.fixture
def observe(make_mixer):
    """observe("gdn ..."): a mixer after one document of 70 tokens in fp64, with all that a paper's loop needs.

    `mixer`, the input `x` [T, D], projected and convolved `q`, `k` [T, H, K] and `v` [T, H, V], and `o` [T, H, V] as it
    goes into the readout.
    """

    def run(described: str) -> SimpleNamespace:
        mixer = make_mixer(described)
        seen = SimpleNamespace(mixer=mixer, x=torch.randn(70, 64, dtype=torch.float64))
        project, readout = mixer.project, mixer.readout

        def keep_projected(*args):
            seen.q, seen.k, seen.v = (y[0] for y in project(*args))
            return project(*args)

        def keep_output(o, x):
            seen.o = o[0]
            return readout(o, x)

        mixer.project, mixer.readout = keep_projected, keep_output
        with torch.no_grad():
            mixer(seen.x[None], Segments.whole_rows(1, 70))
        return seen

    return run


@pytest.fixture
def unit():
    """x over its length, with the epsilon that all mixers here have."""
    return lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@pytest.fixture
def standard_decay():
    """The logarithm of Mamba's decay gate: -exp(A_log) softplus(x + dt_bias)."""
    return lambda x, A_log, dt_bias: -A_log.exp() * torch.nn.functional.softplus(x + dt_bias)


@pytest.fixture
def outer():
    """Outer products head by head: [H, K], [H, V] -> [H, K, V]."""
    return lambda a, b: a[:, :, None] * b[:, None, :]


@pytest.fixture
def read():
    """S^T q head by head: [H, K, V], [H, K] -> [H, V]."""
    return lambda S, q: (S * q[:, :, None]).sum(1)
