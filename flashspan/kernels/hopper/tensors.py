"""Descriptors of tensors for the copy engine of a Hopper GPU, and the few facts of the GPU that launches depend on."""

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
"""The most bytes of K and V of the heads that are computed at the same time: with more, they evict one another."""

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
    dq: Tensor | None  # the gradient, or the sums it is made of; None: it is not computed
    dk: Tensor  # with more heads than k, dk and dv are parts to be added (portable/gradient_parts.py)
    dv: Tensor
    accumulate: bool
    states: Tensor
    counter: Tensor


def block_dim(head_dim: int) -> int:
    """The head size as the kernels hold it."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])


def describe(x: Tensor, *block: int) -> TensorDescriptor:
    """x as the copy engine sees it, moved in blocks of this shape."""
    # Without its constructor, which takes 4 us to check again what `aligned` ensures.
    desc = object.__new__(TensorDescriptor)
    desc.base, desc.shape, desc.block_shape, desc.padding = x, list(x.shape), list(block), "zero"
    # The stride of a dimension of size 1 is arbitrary, but the copy engine needs a valid one.
    desc.strides = [step if size > 1 else 16 for step, size in zip(x.stride()[:-1], x.shape, strict=False)] + [1]
    desc.layout = _layout(block, x.dtype)
    return desc


def describe_sums(sums: Tensor, rows: bool, block_q: int, wide: int) -> TensorDescriptor:
    """The sums to which dQ is added, a block of queries at a time. If `rows`, they are rows; otherwise blocks one after
    another, each in the order of a consumer's registers (`cast_kernel` restores rows)."""
    if rows:
        return describe(sums, 1, 1, block_q, wide)
    desc = describe(sums, block_q * wide // sums.shape[1], sums.shape[1])
    desc.layout = _PLAIN
    return desc


_PLAIN = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def is_aligned(x: Tensor) -> bool:
    """Whether its address is a multiple of 16 and its strides of 8, as the copy engine and wide stores need."""
    return _even(x.shape, x.stride()) and (x.data_ptr() & 15 == 0 or x.is_meta)


@lru_cache(4096)
def _even(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    steps = zip(shape[:-1], strides, strict=False)
    even = all(size == 1 or step % 8 == 0 for size, step in steps)
    # Not rows with a stride of 0 (backward of 16k tokens took 1.4 times as long), nor with one beyond 32-bit offsets.
    near = shape[2] == 1 or 0 < strides[2] * 256 < 2**31
    return even and near and strides[-1] == 1


def aligned(x: Tensor) -> Tensor:
    """x, or a copy if it is not aligned."""
    return x if is_aligned(x) else x.contiguous().clone() if x.is_contiguous() else x.contiguous()


def key_heads_for_queries(q: Tensor, k: Tensor, num_blocks: int) -> int:
    """Number of key heads that are computed together if tiles are blocks of queries: as many as have K and V that fit
    the cache, but enough to occupy all multiprocessors."""
    B, K, S, D = k.shape
    fit = L2_BYTES // (4 * S * block_dim(D))
    return min(B * K, max(1, fit, multiprocessors(q.device) // (num_blocks * (q.shape[1] // K))))


def key_heads_for_keys(q: Tensor, dk: Tensor, num_blocks: int) -> int:
    """The same if tiles are blocks of keys. A tile that serves a group of heads takes that many times as long, so more
    heads are computed together, and their long tiles start early."""
    B, K = dk.shape[:2]
    return min(B * K, max(1, multiprocessors(q.device) * (q.shape[1] // K) // num_blocks))


def new_counter(device: torch.device) -> Tensor:
    """Counters for a launch, all 0. A launch sets them back to 0 at its end. Launches of one stream run one after
    another, so a stream needs one set of counters."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)  # a graph may run at any time: it has its own
    return _zeros(device, stream_of(device.index))


@cache
def _zeros(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(4, dtype=torch.int32, device=device)
