"""The (gated) delta rule: a linear recurrence that erases what it held under a key before it writes there."""

from mixer_kernels.delta_rule.api import delta_rule, delta_rule_step

__all__ = ["delta_rule", "delta_rule_step"]
