"""Descriptors of tensors for the copy engine of a Hopper GPU, and the properties of the GPU that launches use."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashspan.kernels.launch.triton_abi import stream_of
from flashspan.kernels.masks import Mask
from flashspan.kernels.portable.tiles import multiprocessors

L2_BYTES = 8 * 2**20
"""The most bytes of K and V for heads that are computed at the same time: with more, they evict each other."""

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


class BackwardInputs(NamedTuple):
    """The tensors and numbers from which the launches of a backward pass are made."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    minus_lse: Tensor
    minus_delta: Tensor
    mask: Mask
    scale: float
    dq: Tensor | None  # the gradient, its parts (two_pass.py), or the sums from which it is computed; None: no dq
    dk: Tensor  # with more heads than k, dk and dv are parts to be added (portable/gradient_parts.py)
    dv: Tensor
    accumulate: bool
    states: Tensor
    counter: Tensor


def block_dim(head_dim: int) -> int:
    """The head size, padded to a size that the kernels support."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def forward_dim(head_dim: int) -> int:
    """`block_dim` for forward, which holds heads of 129 to 192 in slices of columns (slices.py)."""
    return 192 if 128 < head_dim <= 192 else block_dim(head_dim)


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])


def describe(x: Tensor, *block: int) -> TensorDescriptor:
    """A descriptor of x for the copy engine, which moves blocks of this shape."""
    # Skip the constructor, which takes 4 us to check again what `aligned` ensures.
    desc = object.__new__(TensorDescriptor)
    desc.base, desc.shape, desc.block_shape, desc.padding = x, list(x.shape), list(block), "zero"
    # The stride of a dimension of size 1 is arbitrary, but the copy engine needs a valid one.
    desc.strides = [step if size > 1 else 16 for step, size in zip(x.stride()[:-1], x.shape, strict=False)] + [1]
    desc.layout = _layout(block, x.dtype)
    return desc


def describe_sums(sums: Tensor, rows: bool, block_q: int, wide: int) -> TensorDescriptor:
    """A descriptor of the sums to which dQ is added, a block of queries at a time. If `rows`, the sums are rows.
    Otherwise they are consecutive blocks, each in the order of a consumer's registers (`cast_kernel` restores rows)."""
    if rows:
        return describe(sums, 1, 1, block_q, wide)
    desc = describe(sums, block_q * wide // sums.shape[1], sums.shape[1])
    desc.layout = _PLAIN
    return desc


_PLAIN = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def is_aligned(x: Tensor) -> bool:
    """Whether x's address is a multiple of 16 and its strides of 8, as the copy engine and wide stores need."""
    return _even(x.shape, x.stride()) and (x.data_ptr() & 15 == 0 or x.is_meta)


@lru_cache(4096)
def _even(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    steps = zip(shape[:-1], strides, strict=False)
    even = all(size == 1 or step % 8 == 0 for size, step in steps)
    # No row stride of 0 (backward of 16k tokens took 1.4 times as long), and none beyond 32-bit offsets.
    near = shape[2] == 1 or 0 < strides[2] * 256 < 2**31
    return even and near and strides[-1] == 1


def aligned(x: Tensor) -> Tensor:
    """x, or a copy if it is not aligned."""
    return x if is_aligned(x) else x.contiguous().clone() if x.is_contiguous() else x.contiguous()


def key_heads_for_queries(q: Tensor, k: Tensor, num_blocks: int) -> int:
    """Number of key heads that are computed together if tiles are blocks of queries: as many as fit the cache with
    their K and V, but enough to occupy all multiprocessors."""
    B, K, S, D = k.shape
    fit = L2_BYTES // (4 * S * block_dim(D))
    return min(B * K, max(1, fit, multiprocessors(q.device) // (num_blocks * (q.shape[1] // K))))


def key_heads_for_keys(q: Tensor, dk: Tensor, num_blocks: int) -> int:
    """Number of key heads that are computed together if tiles are blocks of keys. A tile of a group of query heads
    takes that many times as long, so more heads are computed together, and their long tiles start early."""
    B, K = dk.shape[:2]
    return min(B * K, max(1, multiprocessors(q.device) * (q.shape[1] // K) // num_blocks))


def new_counter(device: torch.device) -> Tensor:
    """Counters for a launch, all 0. A launch sets them back to 0 at its end. Launches of one stream run one after
    another, so a stream needs one set of counters."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)  # a CUDA graph may run at any time: its own counters
    return _zeros(device, stream_of(device.index))


@cache
def _zeros(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(4, dtype=torch.int32, device=device)
