"""Gluon kernels for Hopper GPUs (sm_90), on the contract of kernels/contract.py."""

from flashspan.kernels.hopper.launch import backward, backward_of_output, forward, repeat_backward, repeat_forward

COMPILES = True
"""See portable."""

__all__ = ["COMPILES", "backward", "backward_of_output", "forward", "repeat_backward", "repeat_forward"]
