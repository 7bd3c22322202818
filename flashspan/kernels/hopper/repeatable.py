"""The Hopper kernels with gradients that repeat bit for bit, on the contract of kernels/contract.py."""

from __future__ import annotations

from functools import partial

from flashspan.kernels.hopper import again, forward
from flashspan.kernels.hopper import backward as _backward
from flashspan.kernels.hopper import backward_of_output as _backward_of_output

__all__ = ["again", "backward", "backward_of_output", "forward"]

backward = partial(_backward, repeatable=True)
backward_of_output = partial(_backward_of_output, repeatable=True)
