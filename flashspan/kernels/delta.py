"""delta = rowsum(dout * out), the only use of the output in backward, and the dtype in which the output is kept."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor


def kept_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which the output is kept for backward: at least float32 on a CPU, q's dtype elsewhere.

    Rounding the output to 16 bits also rounds delta. If the softmax is sharp, the error of the gradients is then up to
    4 times their own rounding. Our GPU kernels accept this, as PyTorch's do; the CPU does not (docs/numerics.md).
    """
    return torch.promote_types(q.dtype, torch.float32) if q.is_cpu else q.dtype


def row_delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(dout * out) - dlse in float32 [B, H, T] (float64 for float64).

    d lse / d score is the probability, so the gradient of lse is subtracted from delta.
    """
    if dlse is not None:
        return row_delta(dout, out) - dlse
    if out.is_cuda and out.dtype != torch.float64 and importlib.util.find_spec("triton") is not None:
        from flashspan.kernels.portable.delta import row_delta as fused

        return fused(dout, out)
    dtype = torch.promote_types(out.dtype, torch.float32)
    return (dout.to(dtype) * out).sum(-1, dtype=dtype)
