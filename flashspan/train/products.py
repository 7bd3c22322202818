"""The matmuls of a layer as the fused operators of flashspan/ops, if the GPU has kernels for all of them.

Queries are multiplied by log2(e) / sqrt(D) before they are rounded. With a scale of ln 2, their dot products with keys
are then exponents of 2: the kernels of attention need not scale them.
"""

from __future__ import annotations

import logging
import math
from functools import cache

import torch
from torch import Tensor

from flashspan.kernels.backends import no_hopper
from flashspan.model import LlamaConfig
from flashspan.model.llama import Products
from flashspan.ops import choice, linear_add, qkv_rope, swiglu

SCALE = math.log(2)


def project(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, rotated, and v, [B, T, heads, D], from x [B, T, E]; q is for attention with a scale of ln 2."""
    return qkv_rope(x, wq, wk, wv, cos, sin, q_scale=(2 * cos.shape[-1]) ** -0.5 / SCALE)


def feed_forward(x: Tensor, normed: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x + (silu(n Wg^T) * (n Wu^T)) Wd^T, [B, T, E]."""
    return swiglu(normed, gate, up, down, residual=x)


PRODUCTS = Products(project, linear_add, feed_forward, SCALE)


def serves(shape: LlamaConfig, device: torch.device, precision: str) -> bool:
    """Whether the device has a kernel for each of these operators."""
    widths = (shape.width, shape.ffn_width, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim)
    return (
        precision != "float32"
        and shape.head_dim in (64, 128)
        and all(width % 8 == 0 for width in widths)
        and no_hopper(device) is None
        and _runs(device, getattr(torch, precision), shape.head_dim)
    )


@cache
def _runs(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether this release of Triton compiles the kernels: runs them on one token, with gradients."""
    x, angles = torch.zeros(1, 1, 64, device=device, dtype=dtype), torch.zeros(1, 1, head_dim // 2, device=device)
    square, wide = (
        torch.zeros(64, 64, device=device, dtype=dtype),
        torch.zeros(head_dim, 64, device=device, dtype=dtype),
    )
    x.requires_grad_()
    try:
        with torch.enable_grad():
            sum(each.sum() for each in project(x, wide, wide, wide, angles, angles)).backward()  # type: ignore[union-attr]
            feed_forward(linear_add(x, x, square), x, square, square, square).sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except Exception as problem:  # a compiler may raise anything
        text = f"{type(problem).__name__}: {problem}"[:500]
        logging.getLogger(__name__).warning("a layer's fused kernels do not run here, and PyTorch's are used: %s", text)
        return False
    return not choice.RETIRED
