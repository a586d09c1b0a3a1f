"""Operators for token mixers: chunkwise linear recurrences with document boundaries, in plain torch and in Triton."""

from mixer_kernels.delta_rule import delta_rule, delta_rule_step
from mixer_kernels.linear_attention import linear_attention, linear_attention_step
from mixer_kernels.segments import Segments
from mixer_kernels.short_convolution import short_convolution

__all__ = [
    "Segments",
    "delta_rule",
    "delta_rule_step",
    "linear_attention",
    "linear_attention_step",
    "short_convolution",
]
