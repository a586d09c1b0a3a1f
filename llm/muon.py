"""Muon for the matrices of the blocks, AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from llm.sharding import shard_like, whole

STACK_ELEMENTS = (
    2**27
)  # of the matrices that are orthogonalised together: 256 MiB in bf16, and three times that at work


class Muon(torch.optim.Muon):
    """torch's Muon (Jordan et al. 2024), with the matrices of one shape orthogonalised as a batch.

    A batch costs few launches where single matrices would keep the GPU waiting for the host. Sharded matrices are made
    whole for it: every rank orthogonalises all of them and keeps its own shard.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for params in _stacks(p for p in group["params"] if p.grad is not None):
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape."""
        gradients = [p.grad for p in params]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        steps = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
        whole_NAB = torch.stack([whole(step).bfloat16() for step in steps])
        directions_NAB = orthogonalise(whole_NAB, group["ns_coefficients"], group["ns_steps"], group["eps"])
        directions = [shard_like(p, x) for p, x in zip(params, directions_NAB.to(params[0].dtype), strict=True)]
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, directions, alpha=-group["lr"] * _rate(params[0].shape, group["adjust_lr_fn"]))


class MuonWithAdamW(Optimizer):
    """`Muon` for the parameter groups whose role is "matrix", fused AdamW for the others.

    Both take the same `lr` and decay: `adjust_lr_fn="match_rms_adamw"` scales a matrix's update by ``0.2 sqrt(max(rows,
    columns))``, the size that AdamW's usually has, so that learning rates found for AdamW hold (Liu et al. 2025, arXiv
    2502.16982); "original" scales by ``sqrt(max(1, rows / columns))``, for learning rates about 20 times as large.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool = True,
    ) -> None:
        groups = list(params)
        matrices, rest = [g for g in groups if _is_matrix(g)], [g for g in groups if not _is_matrix(g)]
        muon = Muon(matrices, lr=lr, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn)
        adamw = AdamW(rest, lr=lr, betas=tuple(betas), eps=eps, fused=fused)
        self.parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back `state_dict`."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Groups and state are one, whether seen here or in the parts."""
        muon, adamw = self.parts
        muon.state = adamw.state = self.state
        muon.param_groups = [g for g in self.param_groups if _is_matrix(g)]
        adamw.param_groups = [g for g in self.param_groups if not _is_matrix(g)]


def orthogonalise(matrices_NAB: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """U V^T of each matrix U S V^T, roughly: singular values end up between about 0.7 and 1.2. [N, A, B] -> [N, A, B].

    Newton-Schulz iterations of a polynomial of fifth degree (Jordan et al. 2024), in the dtype of the input.
    """
    a, b, c = coefficients
    tall = matrices_NAB.shape[1] > matrices_NAB.shape[2]
    x = matrices_NAB.mT if tall else matrices_NAB
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)  # no singular value above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _stacks(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one shape together, as many as `STACK_ELEMENTS` allows."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for p in params:
        by_shape.setdefault(p.shape, []).append(p)
    for shape, alike in by_shape.items():
        most = max(1, STACK_ELEMENTS // shape.numel())
        yield from (alike[i : i + most] for i in range(0, len(alike), most))


def _is_matrix(group: dict[str, Any]) -> bool:
    return group["role"] == "matrix"


def _rate(shape: torch.Size, adjust_lr_fn: str | None) -> float:
    """What the learning rate of a matrix of this shape is multiplied by; the names are torch's."""
    rows, columns = shape
    return 0.2 * max(rows, columns) ** 0.5 if adjust_lr_fn == "match_rms_adamw" else max(1, rows / columns) ** 0.5
