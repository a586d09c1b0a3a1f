"""Linear attention: an additive recurrence under no, per-head or per-channel decay."""

from mixer_kernels.linear_attention.api import linear_attention, linear_attention_step

__all__ = ["linear_attention", "linear_attention_step"]
