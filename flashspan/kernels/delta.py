"""delta, the one number a row's backward needs of its output, and the dtype the output is kept in for it."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor


def kept_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which the output is kept for backward: at least float32 on a CPU, q's own elsewhere.

    An output rounded to 16 bits makes delta wrong by as much, and gradients up to 4 times as wrong as their own
    rounding where the softmax is sharp. PyTorch's GPU kernels accept this and so do ours; its CPU path with dropout
    does not. See docs/numerics.md.
    """
    return torch.promote_types(q.dtype, torch.float32) if q.device.type == "cpu" else q.dtype


def row_delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(dout * out) in float32 [B, H, T] (float64 stays): the one number a row's backward needs of its output.

    d lse / d score is the probability, so a gradient of lse enters here too, with the other sign.
    """
    if dlse is not None:
        return row_delta(dout, out) - dlse
    if out.is_cuda and out.dtype != torch.float64 and importlib.util.find_spec("triton") is not None:
        from flashspan.kernels.portable.delta import row_delta as fused

        return fused(dout, out)
    dtype = torch.promote_types(out.dtype, torch.float32)
    return (dout.to(dtype) * out).sum(-1, dtype=dtype)
