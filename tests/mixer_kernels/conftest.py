"""Where there is no GPU, Triton kernels run in Triton's interpreter: on CPU tensors, one program after the other."""

from __future__ import annotations

import importlib.util
import os

import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, so before any kernel is imported

    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor, scope):
        """Triton 3.6 takes int() of an array of one element, which numpy 2.4 no longer allows."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_for_numpy
