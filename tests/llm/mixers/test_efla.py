"""EFLA: the solution of its differential equation by matrix exponentials (Lei et al. 2025, arXiv 2512.12602)."""

from __future__ import annotations

import torch

from llm.mixers.efla import exact_step


def test_solves_the_differential_equation(observe, unit):
    """Over a time beta, dS/dt = k (v - S^T k)^T, as one exponential of [[-k k^T, k v^T], [0, 0]]."""
    seen = observe("efla")
    q, k, v, beta = unit(seen.q), seen.k, seen.v, torch.sigmoid(seen.mixer.b_proj(seen.x))
    (_, H, K), V = k.shape, v.shape[2]
    S = torch.zeros(H, K, V, dtype=torch.float64)
    for t in range(70):
        k_t, v_t = k[t][:, :, None], v[t][:, None, :]
        top = torch.cat([-k_t @ k_t.mT, k_t @ v_t], dim=2)
        system = torch.cat([top, torch.zeros(H, V, K + V, dtype=torch.float64)], dim=1) * beta[t, :, None, None]
        flow = torch.linalg.matrix_exp(system)
        S = flow[:, :K, :K] @ S + flow[:, :K, K:]
        torch.testing.assert_close(seen.o[t], (S.mT @ q[t][:, :, None])[..., 0] * K**-0.5, rtol=1e-7, atol=1e-9)


def test_the_step_and_its_gradient_are_exact_for_short_and_long_keys():
    beta, squared = torch.rand(200, dtype=torch.float64), torch.logspace(-12, 6, 200, dtype=torch.float64)
    wanted = -torch.expm1(-beta * squared) / squared
    torch.testing.assert_close(exact_step(beta, squared), wanted, rtol=1e-9, atol=0)
    narrow = exact_step(beta.float(), squared.float())
    torch.testing.assert_close(narrow.double(), wanted, rtol=1e-5, atol=0)
    zero = torch.zeros(1, requires_grad=True)
    exact_step(torch.ones(1), zero).backward()
    torch.testing.assert_close(zero.grad, torch.tensor([-0.5]))
