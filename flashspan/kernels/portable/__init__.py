"""Triton kernels for any GPU: forward and backward as in kernels/contract.py, both deterministic."""

from flashspan.kernels.portable.backward import backward
from flashspan.kernels.portable.forward import forward

__all__ = ["backward", "forward"]
