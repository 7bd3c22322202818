"""Triton kernels of a decode step, apart from attention, for any GPU."""
