"""Q-Delta: the residual is taken at k + lambda q."""

from __future__ import annotations

import torch


def test_equals_the_published_recurrence(observe, unit, outer, read, standard_decay):
    seen = observe("qdelta")
    mixer, q, k, v = seen.mixer, unit(seen.q), unit(seen.k), seen.v
    g = standard_decay(mixer.a_proj(seen.x), mixer.A_log, mixer.dt_bias)
    beta, share = torch.sigmoid(mixer.b_proj(seen.x)), torch.sigmoid(mixer.lambda_proj(seen.x) - 0.9)
    S = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    for t in range(70):
        S = S * g[t].exp()[:, None, None]
        residual = v[t] - read(S, k[t] + share[t, :, None] * q[t])
        S = S + outer(k[t], beta[t, :, None] * residual)
        torch.testing.assert_close(seen.o[t], read(S, q[t]) * 16**-0.5)
