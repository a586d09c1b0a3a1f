"""Inputs of operators described as data, so that tests, verification and benchmarks all walk the same lists."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mixer_kernels.segments import Segments


@dataclass(frozen=True)
class Case:
    """One set of inputs of an operator, as plain data.

    `documents`: "one" (a document a row), "many" (random lengths, one cut on a chunk's edge), "single" (documents of
    one token) or a number of documents a row. `continued`: each row's first document continues from an initial state.
    `stress` names what is extreme about the values (an operator's `make_inputs` knows the names); "" is ordinary.
    """

    name: str
    batch: int = 2
    tokens: int = 128
    heads: int = 2
    value_heads: int | None = None
    key_dim: int = 32
    value_dim: int = 32
    decay: str = "none"
    documents: str | int = "one"
    continued: bool = False
    stress: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorSpec:
    """An operator with everything that a generic test or benchmark needs to know of it.

    `make_inputs(case, dtype, device, seed)` returns the tensors and settings that `function`, `chunked` and `reference`
    take, by name; tensors that require gradients already do. Every tensor but `initial_state` has the tokens on its
    second axis (or n rows a token), so that `span` and `token` can cut it. `step` advances the state by one token.
    `flops(case)` and `bytes_moved(case)` count forward and forward+backward under "forward" and "forward_backward".
    """

    name: str
    function: Callable[..., tuple[Tensor, Tensor]]
    chunked: Callable[..., tuple[Tensor, Tensor]]
    reference: Callable[..., tuple[Tensor, Tensor]]
    step: Callable[..., tuple[Tensor, Tensor]]
    make_inputs: Callable[[Case, torch.dtype, torch.device | str, int], dict[str, Any]]
    cases: tuple[Case, ...]
    bench_cases: tuple[Case, ...]
    flops: Callable[[Case], dict[str, float]]
    bytes_moved: Callable[[Case], dict[str, float]]


def span(inputs: Mapping[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The inputs of tokens [begin, end) of each row, without segments and initial state."""
    tokens = inputs["q"].shape[1]

    def cut(x: Tensor) -> Tensor:
        rate = x.shape[1] // tokens  # rows a token
        return x[:, begin * rate : end * rate]

    own = {name: x for name, x in inputs.items() if name not in ("segments", "initial_state")}
    return {name: cut(x) if isinstance(x, Tensor) else x for name, x in own.items()}


def token(inputs: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The inputs of one token as `step` takes them: no token axis, unless there are several rows a token."""
    one = span(inputs, index, index + 1)
    return {name: x.squeeze(1) if isinstance(x, Tensor) else x for name, x in one.items()}


def tiled(inputs: Mapping[str, Any], copies: int, axis: int) -> dict[str, Any]:
    """The same rows again and again: as more rows (axis 0), or one after the other as documents of a row (axis 1)."""
    row_start = inputs["segments"].row_start
    shift = row_start.shape[1] * torch.arange(copies, device=row_start.device, dtype=row_start.dtype) * axis
    starts = (row_start + shift[:, None, None]).movedim(0, axis).reshape(*_times(row_start, copies, axis))

    def again(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or (name == "initial_state" and axis == 1):
            return x
        repeats = [copies if i == axis else 1 for i in range(x.ndim)]
        return x.detach().repeat(repeats).requires_grad_(x.requires_grad)

    return {name: again(name, x) for name, x in inputs.items()} | {"segments": Segments(starts)}


def _times(x: Tensor, copies: int, axis: int) -> list[int]:
    return [n * copies if i == axis else n for i, n in enumerate(x.shape)]


def all_specs() -> dict[str, OperatorSpec]:
    """Every operator of the package, found by its folder's `spec.py`, which defines `SPEC`."""
    package = importlib.import_module("mixer_kernels")
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.ispkg)
    found = {}
    for name in names:
        module = f"mixer_kernels.{name}.spec"
        if importlib.util.find_spec(module) is not None:
            found[name] = importlib.import_module(module).SPEC
    return found
