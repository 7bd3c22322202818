"""Triton kernels for any GPU: forward and backward as in kernels/contract.py, both deterministic."""

from flashspan.kernels.portable.backward import backward
from flashspan.kernels.portable.forward import forward

COMPILES = True
"""A call on meta tensors records its launches (launch/compiling.py). Other backends need values."""

__all__ = ["COMPILES", "backward", "forward"]
