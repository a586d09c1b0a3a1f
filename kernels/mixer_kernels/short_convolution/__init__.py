"""Short depthwise causal convolutions over packed documents."""

from mixer_kernels.short_convolution.api import short_convolution

__all__ = ["short_convolution"]
