"""The Hopper kernels with gradients that repeat bit for bit, on the contract of kernels/contract.py."""

from __future__ import annotations

from functools import partial

from flashspan.kernels.hopper import backward as _backward
from flashspan.kernels.hopper import forward

__all__ = ["backward", "forward"]

backward = partial(_backward, repeatable=True)
