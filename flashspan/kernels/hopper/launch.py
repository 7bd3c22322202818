"""The contract's two functions on the Hopper kernels: tensors into descriptors, numbers into arguments.

Descriptors are made over the caller's own layout, so a transposed or a fused view costs no copy; rows and columns past
the end read as zero and are not written, so any length and any head size does. Tiles were chosen by measurement on an
H200 (docs/kernels.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashspan.kernels import portable
from flashspan.kernels.contract import Carry, Dropout
from flashspan.kernels.hopper.backward import backward_kernel
from flashspan.kernels.hopper.forward import forward_kernel
from flashspan.kernels.masks import Band, Mask, Rows
from flashspan.kernels.portable.arguments import LOG2E, Launch, mask_arguments, on
from flashspan.kernels.portable.forward import forward_launch as repair_launch

L2_BYTES = 8 * 2**20
"""How much K and V the heads in flight may hold together: more than this and they push one another out of the cache."""

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


@dataclass(frozen=True)
class Forward:
    """Keys per block, warpgroups of 64 queries, pairs of K and V and tiles of Q in flight, registers of a thread that
    multiplies and of one that feeds."""

    block_k: int
    warpgroups: int
    stages: int
    queries: int
    registers: int
    feed_registers: int


@dataclass(frozen=True)
class Backward:
    """Queries and keys per block; whether the products of an iteration are rotated, which takes registers."""

    block_q: int
    block_k: int
    rotate: bool


FORWARD = {64: Forward(128, 3, 4, 2, 160, 32), 128: Forward(128, 2, 2, 2, 240, 24), 256: Forward(64, 2, 2, 1, 240, 24)}
BACKWARD = {64: Backward(128, 128, False), 128: Backward(64, 128, True)}
"""By padded head size. Heads past 128 have no backward here: dK and dV of a block no longer fit the registers."""


def block_dim(head_dim: int) -> int:
    """The head size as the kernels hold it."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])


def describe(x: Tensor, *block: int) -> TensorDescriptor:
    """x as the copy engine sees it, moved in blocks of this shape."""
    # Not through its constructor: that checks again, at 4 us each, what `aligned` has made so.
    desc = object.__new__(TensorDescriptor)
    desc.base, desc.shape, desc.block_shape, desc.padding = x, list(x.shape), list(block), "zero"
    # Where there is one index there is no step; what stands there must still suit the copy engine.
    desc.strides = [step if size > 1 else 16 for step, size in zip(x.stride()[:-1], x.shape, strict=False)] + [1]
    desc.layout = _layout(block, x.dtype)
    return desc


def is_aligned(x: Tensor) -> bool:
    """Whether its beginning falls on 16 bytes and its steps on 8 elements, as the copy engine and wide stores need."""
    steps = zip(x.shape[:-1], x.stride(), strict=False)
    even = all(size == 1 or (step % 8 == 0 and step > 0) for size, step in steps) and x.stride(-1) == 1
    return even and x.stride(2) * 256 < 2**31 and (x.is_meta or x.data_ptr() % 16 == 0)


def aligned(x: Tensor) -> Tensor:
    """x, or a copy if it is not aligned."""
    return x if is_aligned(x) else x.contiguous().clone() if x.is_contiguous() else x.contiguous()


@cache
def _multiprocessors(device: torch.device) -> int:
    return 132 if device.type == "meta" else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _zeros(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(4, dtype=torch.int32, device=device)


def _counter(device: torch.device) -> Tensor:
    """Zeros for a launch to count with. It leaves zeros behind, and launches of one stream follow one another: each
    stream has its own."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)  # a graph's own: it may run beside anything
    return _zeros(device, torch.cuda.current_stream(device).cuda_stream)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    scale: float,
    carry: Carry | None = None,
    out_dtype: torch.dtype = torch.float32,
    dropout: Dropout | None = None,
) -> Carry:
    """See contract.py. The carry is updated in place."""
    if not q.numel() or not k.shape[2] or scale <= 0:
        return portable.forward(q, k, v, mask=mask, scale=scale, carry=carry, out_dtype=out_dtype, dropout=dropout)
    q, k, v = aligned(q), aligned(k), aligned(v)
    B, H, T, D = q.shape
    if carry is None:
        out = q.new_empty(B, T, H, D, dtype=out_dtype).transpose(1, 2)
        lse = q.new_empty(B, H, T, dtype=torch.float32)
    else:
        out, lse = aligned(carry.out), carry.lse.float().contiguous()
    bad = lse.new_empty(B, H, triton.cdiv(T, 64), dtype=torch.int32)
    with on(q.device):
        launch = forward_launch(q, k, v, out, lse, bad, mask, scale, carry is not None)
        launch()
        if launch.constants["EDGES"]:
            repair_launch(q, k, v, out, lse, mask, scale, carry is not None, None, only=bad)()
    return Carry(out, lse)


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bad: Tensor, mask: Mask, scale: float, carry: bool
) -> Launch:
    """What forward launches, as data."""
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    table, start, end, _, _, rows_stride, _, lo, hi, _ = mask_arguments(mask, T, S, bad)
    wide = block_dim(D)
    tile = FORWARD[wide]
    # Whose keys are hidden: nobody's, those behind each query, or on both sides.
    edges = 2 if table or lo > 1 - T else 1 if hi < S - 1 else 0
    group = H // K
    tiles_per_head = triton.cdiv(T, 64 * tile.warpgroups)
    num_tiles, chip = tiles_per_head * B * H, _multiprocessors(q.device)
    # Key heads in flight together: those whose K and V fit the cache, but enough to occupy the chip.
    section = min(B * K, max(1, L2_BYTES // (4 * S * wide), chip // (tiles_per_head * group)))
    return Launch(
        forward_kernel,
        (min(num_tiles, chip),),
        (
            describe(q, 1, 1, 64, wide), describe(k, 1, 1, tile.block_k, wide), describe(v, 1, 1, tile.block_k, wide),
            out, lse, bad, start, end, _counter(q.device), *(step // 8 for step in out.stride()[:3]), rows_stride, H,
            group, T, S, lo, hi, scale * LOG2E, B * H,
            section * group, num_tiles,
        ),
        {
            "D": D, "WGS": tile.warpgroups, "STAGES": tile.stages, "QS": tile.queries, "EDGES": edges, "TABLE": table,
            "CARRY": carry, "REGISTERS": tile.registers, "FEED_REGISTERS": tile.feed_registers, "num_warps": 4,
        },
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "Tp"])
def rows_kernel(lse, delta, minus_lse, minus_delta, T, Tp, scale, BLOCK: tl.constexpr):
    """-lse / scale and -delta of a head, its rows padded to Tp: what the accumulators of S and dP start from."""
    i_bh = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_lse = tl.load(lse + i_bh * T + o, mask=o < T, other=float("inf"))
    b_delta = tl.load(delta + i_bh * T + o, mask=o < T, other=0.0)
    # A row that saw nothing: its scores come out as -inf, its probabilities as 0.
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse)
    tl.store(minus_lse + i_bh * Tp + o, -b_lse / scale, mask=o < Tp)
    tl.store(minus_delta + i_bh * Tp + o, -b_delta, mask=o < Tp)


@triton.jit(do_not_specialize=["T", "s_b", "s_h", "s_t", "H"])
def cast_kernel(sums, dq, s_b, s_h, s_t, H, T, scale, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr):
    """dq = sums * scale in dq's dtype; strides of dq in units of 8 elements."""
    i_bh = tl.program_id(1)
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    m0 = tl.program_id(0) * BM
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    here = (m0 + o_m < T)[:, None] & (o_d < D)[None, :]
    b = tl.load(sums + (i_bh.to(tl.int64) * T + m0) * D + (o_m[:, None] * D + o_d[None, :]), mask=here, other=0.0)
    p = dq + i_b * (s_b * 8) + i_h * (s_h * 8) + m0.to(tl.int64) * (s_t * 8) + (o_m[:, None] * (s_t * 8) + o_d[None, :])
    tl.store(p, (b * scale).to(dq.dtype.element_ty), mask=here)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    mask: Mask,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    accumulate: bool,
    dropout: Dropout | None = None,
) -> None:
    """See contract.py. Heads past 128 and masks whose transpose is no interval go to the portable kernels."""
    B, H, T, D = q.shape
    whole = isinstance(mask, Band) or (isinstance(mask, Rows) and mask.convex)
    if not q.numel() or not k.numel() or scale <= 0 or block_dim(D) not in BACKWARD or not whole:
        portable.backward(
            dout, q, k, v, lse, delta, mask=mask, scale=scale, dq=dq, dk=dk, dv=dv, accumulate=accumulate,
            dropout=dropout,
        )  # fmt: skip
        return
    dout, q, k, v = aligned(dout), aligned(q), aligned(k), aligned(v)
    made = [x if is_aligned(x) else torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (dq, dk, dv)]
    padded = -(-T // 128) * 128
    with on(q.device):
        minus_lse, minus_delta = lse.new_empty(2, B * H * padded)
        Launch(
            rows_kernel,
            (triton.cdiv(padded, 1024), B * H),
            (lse.contiguous(), delta.contiguous(), minus_lse, minus_delta, T, padded, scale),
            {"BLOCK": 1024},
        )()
        sums = made[0] if accumulate else torch.zeros(B, H, T, D, dtype=torch.float32, device=q.device)
        backward_launch(dout, q, k, v, minus_lse, minus_delta, mask, scale, sums, made[1], made[2], accumulate)()
        if not accumulate:
            steps = [step // 8 for step in made[0].stride()[:3]]
            grid, wide = (triton.cdiv(T, 32), B * H), block_dim(D)
            Launch(cast_kernel, grid, (sums, made[0], *steps, H, T, scale), {"D": D, "BD": wide, "BM": 32})()
    for x, y in zip((dq, dk, dv), made, strict=True):
        if x is not y:
            x.add_(y) if accumulate else x.copy_(y)


def backward_launch(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    minus_lse: Tensor,
    minus_delta: Tensor,
    mask: Mask,
    scale: float,
    sums: Tensor,
    dk: Tensor,
    dv: Tensor,
    accumulate: bool,
) -> Launch:
    """What backward launches between preparing rows and casting dq, as data."""
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    table, _, _, first, last, _, s_columns, lo, hi, _ = mask_arguments(mask, T, S, minus_lse)
    wide = block_dim(D)
    tile = BACKWARD[wide]
    tiles_per_head = triton.cdiv(S, tile.block_k)
    # A block of keys that serves a group of heads takes that much longer: more of them must start early.
    section = min(B * K, max(1, _multiprocessors(q.device) * (H // K) // tiles_per_head))
    return Launch(
        backward_kernel,
        (tiles_per_head * B * K,),
        (
            describe(q, 1, 1, tile.block_q, wide), describe(dout, 1, 1, tile.block_q, wide),
            describe(k, 1, 1, tile.block_k, wide), describe(v, 1, 1, tile.block_k, wide),
            describe(sums, 1, 1, tile.block_q, wide), describe(minus_lse, tile.block_q),
            describe(minus_delta, tile.block_q), dk, dv, first, last,
            *(step // 8 for x in (dk, dv) for step in x.stride()[:3]), s_columns, H, K, H // K, T, S,
            minus_lse.numel() // (B * H), lo, hi, scale * LOG2E, scale, section,
        ),
        {
            "D": D, "STAGES": 2, "TABLE": table, "ADD": accumulate, "ROTATE": tile.rotate,
            "HIDDEN": table or lo > 1 - T or hi < S - 1, "FEED_REGISTERS": 24, "num_warps": 8,
        },
    )  # fmt: skip
