"""Where there is no GPU, Triton kernels run in Triton's interpreter: on CPU tensors, one program after the other."""

from __future__ import annotations

import importlib.util
import os

import torch


def mend_interpreter():
    """Two slips of Triton 3.6's interpreter that kernels in this package meet."""
    from triton import language
    from triton.runtime import interpreter

    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_tensor_for_numpy(tensor, scope):
        """It takes int() of an array of one element, which numpy 2.4 no longer allows."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def dot_of_bf16(self, a, b, *others):
        """It multiplies the bits of bf16 numbers as if they were integers."""
        a, b = (
            self.create_fp_ext(x, language.block_type(language.float32, list(x.data.shape)))
            if x.dtype.scalar == language.bfloat16
            else x
            for x in (a, b)
        )
        return dot(self, a, b, *others)

    interpreter._patch_lang_tensor = patch_tensor_for_numpy
    interpreter.InterpreterBuilder.create_dot = dot_of_bf16


if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: before any test imports it
    mend_interpreter()
