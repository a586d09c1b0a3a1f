"""How kernels are launched: with committed configurations, never with ones tuned in a user's run."""

from __future__ import annotations

import functools
import hashlib
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from triton.runtime.jit import JITFunction

from mixer_kernels.common.stored import stored_configurations


@functools.cache
def configurations(op: str) -> dict[str, Any]:
    """The operator's `configs.json`: per kernel, element size and K the block sizes, warps and pipeline stages."""
    return stored_configurations(op)


def operator_name(name: str) -> str:
    """The name under which torch knows a custom operator.

    A process may hold copies of this package beside it, inside exported models: each has a namespace of its own.
    """
    home = (__package__ or "").removesuffix(".common")
    if home == "mixer_kernels":
        return f"mixer_kernels::{name}"
    return f"mixer_kernels_{hashlib.sha256(__name__.encode()).hexdigest()[:12]}::{name}"


def configuration(op: str, kernel: str, like: Tensor, key_dim: int, value_dim: int) -> dict[str, int]:
    """Launch settings of a kernel for inputs of `like`'s dtype and device; BV, if it has one, divides `value_dim`."""
    if like.is_cuda:
        warn_if_unverified(op, like.device.index)
    chosen = configurations(op)["kernels"][kernel][f"{like.element_size()} bytes"][f"K {key_dim}"]
    if "BV" in chosen:
        chosen = chosen | {"BV": min(chosen["BV"], value_dim & -value_dim)}
    return chosen


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants)``, which takes the host a third of the time from the second launch on.

    `arguments` are the kernel's parameters up to its constants, in their order: tensors, ints that it does not
    specialise, floats. `constants` are its constants and the compiler's options. Triton works out anew for each launch
    which compiled kernel it calls for; here that is found by dtypes and constants, and by addresses being multiples of
    16, as those of torch's own memory are.
    """
    if torch.version.hip or not isinstance(kernel, JITFunction):  # sizes of tensors count there; or the interpreter
        kernel[grid](*arguments, **constants)
        return
    passed, kinds, bits = [], [], 0
    for x in arguments:
        if isinstance(x, Tensor):
            address = x.data_ptr()
            passed.append(address)
            kinds.append(x.dtype)
            bits |= address
        else:
            passed.append(x)
            if isinstance(x, int):
                kinds.append(x.bit_length() > 31)
    key = (id(kernel), torch.cuda.current_device(), bits % 16 == 0, *kinds, *constants.values())
    found = _compiled.get(key)
    if found is None:
        found = _compile(kernel, grid, arguments, constants)
        if found is None:  # left out by a hook of Triton's
            return
        if bits % 16 == 0:  # else it depends on which are
            _compiled[key] = found
    compiled, rest = found
    compiled[grid if len(grid) == 3 else (*grid, 1, 1)](*passed, *rest)


_compiled: dict[tuple, tuple[Any, tuple]] = {}


def _compile(kernel: JITFunction, grid: tuple[int, ...], arguments: tuple, constants: dict) -> tuple[Any, tuple] | None:
    """The kernel compiled for such arguments, and its constants in the order of its parameters."""
    compiled = kernel.warmup(*arguments, grid=grid, **constants)
    rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    return None if compiled is None else (compiled, rest)


def plain(*tensors: Tensor | None) -> bool:
    """Whether an operator on these may run without torch's library between: nobody traces, records or transforms it.

    That library takes the host longer than all launches of an operator together.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        return False
    return all(x is None or (type(x) in _PLAIN_TYPES and not x.is_meta) for x in tensors)


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


@functools.cache
def warn_if_unverified(op: str, device: int) -> None:
    """Say, once, that an operator's kernels were not checked on such a card with this Triton."""
    import triton

    major, minor = torch.cuda.get_device_capability(device)
    here = f"sm{major}{minor} triton {'.'.join(triton.__version__.split('.')[:2])}"
    verified = configurations(op)["verified"]
    if here not in verified:
        checked = f"on {', '.join(verified)}" if verified else "in an interpreter"
        warnings.warn(
            f"{op}: its Triton kernels were checked {checked}, not on {here}. Run `make verify-kernels` "
            "and `make test-gpu` before you trust them here.",
            stacklevel=2,
        )


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU, 1 on a CPU: how many programs run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
