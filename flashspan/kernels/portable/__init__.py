"""Triton kernels for any GPU: forward and backward, deterministic, on the contract of kernels/contract.py."""

from flashspan.kernels.portable.backward import backward
from flashspan.kernels.portable.forward import forward

__all__ = ["backward", "forward"]
