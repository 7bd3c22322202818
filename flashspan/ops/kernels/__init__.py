"""Kernels of the operators: Gluon for Hopper (matmul, projection, gated, residual), Triton for any GPU (the others)."""
