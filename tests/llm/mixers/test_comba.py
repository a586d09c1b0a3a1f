"""Comba: the correction is taken from the state before it decays (Hu et al. 2025, arXiv 2506.02475)."""

from __future__ import annotations

import torch

from mixer_kernels import Segments


def test_equals_the_published_recurrence(observe, unit, outer, read, standard_decay):
    seen = observe("comba")
    mixer, k, v = seen.mixer, unit(seen.k), seen.v
    d, D = torch.sigmoid(mixer.feedback)[:, None], mixer.D[:, None]
    q, p = unit(seen.q - D * d * seen.k), d * k
    alpha = standard_decay(mixer.a_proj(seen.x), mixer.A_log, mixer.dt_bias).exp()
    beta = torch.sigmoid(mixer.b_proj(seen.x))
    S = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    for t in range(70):
        correction = v[t] - read(S, p[t])
        S = alpha[t, :, None, None] * S + outer(k[t], beta[t, :, None] * correction)
        torch.testing.assert_close(seen.o[t], read(S, q[t]) * 16**-0.5)


def test_a_state_that_is_all_but_gone_does_not_overflow(make_mixer):
    mixer = make_mixer("comba", torch.float32)
    with torch.no_grad():
        mixer.A_log.fill_(8.0)
    x = torch.randn(1, 30, 64, requires_grad=True)
    y = mixer(x, Segments.whole_rows(1, 30)).y
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
