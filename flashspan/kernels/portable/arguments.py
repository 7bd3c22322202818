"""Values of the contract as arguments of a kernel."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashspan.kernels.contract import Dropout
from flashspan.kernels.masks import Band, Mask, Rows

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Launch:
    """One kernel launch: calling it launches; compiling it needs no GPU."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def __call__(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.constants)


def mask_arguments(
    mask: Mask, num_queries: int, num_keys: int, q: Tensor
) -> tuple[bool, Tensor, Tensor, Tensor, Tensor, int, int, int, int, bool]:
    """(table?, start, end, first, last, their batch strides, lo, hi, convex): a band's tensors are never read."""
    if isinstance(mask, Band):
        lo, hi = mask.bounds(num_queries, num_keys)
        return False, q, q, q, q, 0, 0, lo, hi, True
    mask = mask.to(q.device)
    assert isinstance(mask, Rows), "lists of tiles have kernels of their own"
    batched = mask.start.dim() == 2 and mask.start.shape[0] > 1
    strides = (num_queries, num_keys) if batched else (0, 0)
    return True, mask.start, mask.end, mask.first, mask.last, *strides, 0, 0, mask.convex


def dropout_arguments(dropout: Dropout | None, q: Tensor) -> tuple[Tensor, Tensor, Tensor, int, float, int, int]:
    """(seed, query positions, key positions, threshold, gain, first stream, batch stride)."""
    if dropout is None:
        return q, q, q, 0, 1.0, 0, 0
    qpos, kpos = dropout.q_positions, dropout.k_positions
    assert (qpos is None) == (kpos is None), "dropout takes both position tables or neither"
    stride = q.shape[1] if dropout.batch_stride is None else dropout.batch_stride
    return (
        dropout.seed,
        q if qpos is None else qpos,
        q if kpos is None else kpos,
        dropout.threshold,
        dropout.gain,
        dropout.first,
        stride,
    )


def precision(q: Tensor) -> str:
    """How float32 products are formed: as three tf32 products whose sum is as exact as float32, or as one where PyTorch
    was told that it may (`torch.set_float32_matmul_precision`)."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def near(x: Tensor) -> Tensor:
    """x, or a copy where a tile's rows lie too far apart for the kernels' 32-bit offsets inside a tile."""
    return x if x.stride(2) * 256 < 2**31 else x.contiguous()


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device; make it the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
