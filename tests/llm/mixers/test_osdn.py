"""Online scaled DeltaNet: the preconditioner follows the gradient of the residual that it leaves (arXiv 2605.13473)."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize(("eta", "retention"), [(0.5, 0.99), (0.9, 1.0)])
def test_equals_the_recurrence_with_its_hypergradient(observe, unit, outer, read, eta, retention):
    seen = observe(f"osdn eta={eta} retention={retention}")
    q, k, v, beta = unit(seen.q), unit(seen.k), seen.v, torch.sigmoid(seen.mixer.b_proj(seen.x))
    S, d = torch.zeros(*k.shape[1:], v.shape[2], dtype=torch.float64), torch.ones(k.shape[1:], dtype=torch.float64)
    for t in range(70):
        S = S + outer(d * k[t], beta[t, :, None] * (v[t] - read(S, k[t])))
        torch.testing.assert_close(seen.o[t], read(S, q[t]) * 16**-0.5)
        with torch.enable_grad():  # half the squared share of the residual that is left, by autograd
            at = d.detach().requires_grad_()
            left = 1 - beta[t].detach() * (at * k[t] ** 2).sum(-1)
            (gradient,) = torch.autograd.grad(0.5 * left.square().sum(), at)
        d = 1 + retention * (d - 1) - eta * gradient
