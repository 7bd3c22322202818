"""Attention of few tiles: each pass is one launch or, where programs share a block of backward, two.

A short call takes as long as its launches, on the GPU and on the host. Forward uses the kernel of forward.py with tiles
for few queries. Backward is one kernel with two kinds of programs: some compute dk and dv of a block of keys, the
others dq of a block of queries. Both compute delta themselves, from out and dout. No two programs write one tile, so
gradients are bitwise reproducible.

If many query heads share few keys, a program for keys would have tens of tiles while most multiprocessors are idle. So
the queries of a block of keys, and the keys of a block of queries, are divided into parts of two tiles. Their gradients
are float32, and a second launch adds them in a fixed order. For few queries of large heads, few_rows.py has a kernel
that reads each key once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels.contract import Carry, Problem, Repeat, RepeatBackward
from flashspan.kernels.failure import KernelFailed, give_up
from flashspan.kernels.launch.launch import Launch, on
from flashspan.kernels.launch.replay import Room, recall, repeated_backward, repeated_forward, replay
from flashspan.kernels.masks import Band, Mask, Rows, count, unpack
from flashspan.kernels.portable.arguments import LOG2E, empty_outputs, mask_arguments, strides, with_near_rows
from flashspan.kernels.portable.common import finite, interval, key_block, load_tile, query_block, store_tile, visible
from flashspan.kernels.portable.few_rows import few_rows_kernel
from flashspan.kernels.portable.forward import forward_launch
from flashspan.kernels.portable.gradient_parts import add_gradients_launch, empty_parts
from flashspan.kernels.portable.steps import load_lse
from flashspan.kernels.portable.tiles import Tile, block_dim, fill, multiprocessors


@triton.jit
def probabilities(b_q, b_k, b_lse, b_start, b_end, o_k, scale):
    """Return P of a tile of queries and keys, and which pairs are visible."""
    m_s = visible(o_k, b_start, b_end, False)
    b_s = tl.dot(b_q, tl.trans(b_k))
    return tl.where(m_s, tl.exp2(b_s * scale - b_lse[:, None]), 0.0), m_s


@triton.jit
def score_gradients(b_p, m_s, b_do, b_out, b_v):
    """dS of a tile, without the factor `scale`. delta is the sum of dout * out over a row."""
    b_delta = tl.sum(b_do.to(tl.float32) * b_out.to(tl.float32), 1)
    return tl.where(m_s, b_p * (tl.dot(b_do, tl.trans(b_v)) - b_delta[:, None]), 0.0)


@triton.jit(do_not_specialize=["H", "K", "T", "S", "lo", "hi", "num_key_programs", "query_parts", "key_parts"])
def gradients_kernel(
    dout, q, k, v, out, lse, dq, dk, dv, start, end,
    s_db, s_dh, s_dt, s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
    s_dqb, s_dqh, s_dqt, s_dkb, s_dkh, s_dks, s_dvb, s_dvh, s_dvs,
    s_rows, lo, hi, H, K, T, S, scale, sm_scale, num_key_programs, query_parts, key_parts,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """The first `num_key_programs` programs compute dk and dv of a block of keys, the others dq of a block of
    queries.

    query_parts, key_parts: the programs of a block, each of which has a part of the tiles of queries, or of the keys.
    Then dk and dv [B, K * query_parts, S, D] and dq [B, H * key_parts, T, D] are those of the parts.
    """
    group = H // K
    o_r, o_n = tl.arange(0, BM), tl.arange(0, BN)
    if tl.program_id(0) < num_key_programs:
        i_part = tl.program_id(0) % query_parts
        i_b, i_k, n0 = key_block(tl.program_id(0) // query_parts, K, S, BN)
        i_k = i_k.to(tl.int64)
        o_k = n0 + o_n
        # [BN, BD]
        b_k = load_tile(k + i_b * s_kb + i_k * s_kh, n0, o_n, s_ks, S, D, BD, True)
        b_v = load_tile(v + i_b * s_vb + i_k * s_vh, n0, o_n, s_vs, S, D, BD, True)
        b_dk = tl.zeros([BN, BD], tl.float32)
        b_dv = tl.zeros([BN, BD], tl.float32)
        begin, stop = 0, T
        if not TABLE:  # only queries that see a key of this block: i + lo <= j <= i + hi
            begin = tl.maximum(n0 - hi, 0) // BM * BM
            stop = tl.minimum(tl.minimum(n0 + BN, S) - lo, T)
        num_tiles = tl.cdiv(tl.maximum(stop - begin, 0), BM)
        share = tl.cdiv(group * num_tiles, query_parts)
        for i in range(i_part * share, tl.minimum((i_part + 1) * share, group * num_tiles)):
            i_h = i_k * group + i // num_tiles
            m0 = begin + i % num_tiles * BM
            o_m = m0 + o_r
            b_start, b_end = interval(o_m, T, S, lo, hi, start + i_b * s_rows, end + i_b * s_rows, TABLE)
            # [BM, BD]
            b_q = load_tile(q + i_b * s_qb + i_h * s_qh, m0, o_r, s_qt, T, D, BD, True)
            b_do = load_tile(dout + i_b * s_db + i_h * s_dh, m0, o_r, s_dt, T, D, BD, True)
            b_out = load_tile(out + i_b * s_ob + i_h * s_oh, m0, o_r, s_ot, T, D, BD, True)
            b_lse = load_lse(lse + (i_b * H + i_h) * T, o_m, T, True)
            b_p, m_s = probabilities(b_q, b_k, b_lse, b_start, b_end, o_k, scale)
            b_dv = tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, b_dv)
            b_ds = score_gradients(b_p, m_s, b_do, b_out, b_v)
            b_dk = tl.dot(tl.trans(b_ds.to(b_q.dtype)), b_q, b_dk)
        i_k = i_k * query_parts + i_part
        store_tile(dk + i_b * s_dkb + i_k * s_dkh, n0, o_n, s_dks, S, b_dk * sm_scale, D, BD, False)
        store_tile(dv + i_b * s_dvb + i_k * s_dvh, n0, o_n, s_dvs, S, b_dv, D, BD, False)
    else:
        i = tl.program_id(0) - num_key_programs
        i_part = i % key_parts
        i_b, i_h, m0 = query_block(i // key_parts, H, T, BM)
        i_k = i_h // group
        o_m = m0 + o_r
        b_start, b_end = interval(o_m, T, S, lo, hi, start + i_b * s_rows, end + i_b * s_rows, TABLE)
        # [BM, BD]
        b_q = load_tile(q + i_b * s_qb + i_h * s_qh, m0, o_r, s_qt, T, D, BD, True)
        b_do = load_tile(dout + i_b * s_db + i_h * s_dh, m0, o_r, s_dt, T, D, BD, True)
        b_out = load_tile(out + i_b * s_ob + i_h * s_oh, m0, o_r, s_ot, T, D, BD, True)
        b_lse = load_lse(lse + (i_b * H + i_h) * T, o_m, T, True)
        b_dq = tl.zeros([BM, BD], tl.float32)
        first, last = tl.min(b_start, 0) // BN * BN, tl.max(b_end, 0)
        share = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), key_parts), BN) * BN
        first += i_part * share
        for n0 in range(first, tl.minimum(first + share, last), BN):
            # [BN, BD]
            b_k = load_tile(k + i_b * s_kb + i_k * s_kh, n0, o_n, s_ks, S, D, BD, True)
            b_v = load_tile(v + i_b * s_vb + i_k * s_vh, n0, o_n, s_vs, S, D, BD, True)
            b_p, m_s = probabilities(b_q, b_k, b_lse, b_start, b_end, n0 + o_n, scale)
            b_ds = score_gradients(b_p, m_s, b_do, b_out, b_v)
            b_dq = tl.dot(b_ds.to(b_k.dtype), finite(b_k).to(b_k.dtype), b_dq)
        i_h = i_h * key_parts + i_part
        store_tile(dq + i_b * s_dqb + i_h * s_dqh, m0, o_r, s_dqt, T, b_dq * sm_scale, D, BD, False)


@dataclass(frozen=True)
class Limits:
    """The largest calls that use these kernels, in tiles of 64 queries and 64 keys (docs/log/few-tiles.md)."""

    total: int
    per_program: int


FORWARD = {64: Limits(4400, 40), 128: Limits(1900, 32)}
"""By padded head size: the limits of forward if all programs run at once, two on a multiprocessor."""
FORWARD_ANY = {64: 1100, 128: 600}
"""The limit of forward for any number of programs: tiles in total."""
BACKWARD = {64: Limits(1300, 20), 128: Limits(256, 8)}
"""The limits of backward. A program for keys has the tiles of all query heads that share the keys; if only that limit
is exceeded, they are divided."""

MOST_ROWS = 64
"""The most rows (pairs of a query and a head of the group) for which few_rows.py computes gradients."""

FAILED: list[str] = []
"""The reasons why a kernel for backward failed to compile on this machine. If it is not empty, none is tried again."""


def forward_tile(q: Tensor, k: Tensor, mask: Mask) -> Tile | None:
    """The tile sizes if forward of such a call is faster here than with the kernels for many tiles, else None."""
    if not _serves(q, k, mask):
        return None
    return _forward_tile(*q.shape, k.shape[2], mean_keys(q, k, mask), multiprocessors(q.device))


def backward_tile(q: Tensor, k: Tensor, mask: Mask) -> Tile | None:
    """The tile sizes if backward of such a call is faster here than with the kernels for many tiles, else None."""
    if FAILED or not _serves(q, k, mask):
        return None
    return _backward_tile(*q.shape, k.shape[1], k.shape[2], mean_keys(q, k, mask), multiprocessors(q.device))


def _serves(q: Tensor, k: Tensor, mask: Mask) -> bool:
    return isinstance(mask, (Band, Rows)) and q.numel() > 0 and k.numel() > 0 and q.dtype.itemsize == 2


def mean_keys(q: Tensor, k: Tensor, mask: Mask) -> int:
    """About how many keys a query sees on average."""
    T, S = q.shape[2], k.shape[2]
    return min(mask.reach or S, S) if isinstance(mask, Rows) else -(-count(mask, T, S) // T)


@lru_cache(4096)
def _forward_tile(B: int, H: int, T: int, D: int, S: int, seen: int, chip: int) -> Tile | None:
    wide = max(64, block_dim(D))
    if wide > 128:
        return Tile(32, 32, 32, 4, 3) if T <= 32 and S <= 64 else None
    programs, most = B * H * triton.cdiv(T, 64), FORWARD[wide]
    tiles = programs * triton.cdiv(seen, 64)
    at_once = programs <= 2 * chip and tiles <= most.total and triton.cdiv(S, 64) <= most.per_program
    if not at_once and tiles > FORWARD_ANY[wide]:
        return None
    if T <= 32:
        return Tile(32, 32, 32, 4, 3) if S <= 32 else Tile(32, 64, 64, 4, 3)
    if wide > 64 or S > 128:  # at 64, edge tiles are pipelined: in a short causal call nearly all tiles are edge tiles
        return Tile(64, 64, 64, 4, 3, edge_stages=2 if wide == 64 else 1)
    # If not all programs run at once, fewer and larger programs are faster.
    return Tile(128 if 64 < T <= 128 and programs > 2 * chip else 64, 32, 32, 4, 3)


@lru_cache(4096)
def _backward_tile(B: int, H: int, T: int, D: int, K: int, S: int, seen: int, chip: int) -> Tile | None:
    wide, group = max(64, block_dim(D)), H // K
    if wide not in BACKWARD:
        # At a head size of 136, the kernel of few_rows.py spills 4,844 bytes.
        if T * group > MOST_ROWS or S < 8 * T or wide > 256 or D % 32:
            return None
        return Tile(MOST_ROWS, 32, 32, 8, 2, key_parts=fill(B * K, triton.cdiv(S, 32), chip))
    blocks, most = triton.cdiv(T, 64), BACKWARD[wide]
    if triton.cdiv(S, 64) > most.per_program or B * H * blocks * triton.cdiv(seen, 64) > most.total:
        return None
    block_k = 64 if wide == 64 or T <= 32 else 32
    if T <= 32:
        tile = Tile(32, block_k, block_k, 4, 2 if wide == 64 else 1)
    else:
        tile = Tile(64, block_k, block_k, 4, 1)
    if group * blocks <= most.per_program:
        return tile
    key_blocks = triton.cdiv(S, block_k)
    query_parts = _count_parts(group * blocks, B * K * key_blocks, chip)
    return replace(tile, query_parts=query_parts, key_parts=_count_parts(key_blocks, B * H * blocks, chip))


def _count_parts(num_tiles: int, num_programs: int, chip: int) -> int:
    """The number of parts of two tiles or more for which up to two programs run on each multiprocessor."""
    return max(1, min(num_tiles // 2, 2 * chip // num_programs))


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, size: Tile, out_dtype: torch.dtype) -> Carry:
    """Forward without a carry and without dropout."""
    outputs, tables = empty_outputs(q, out_dtype), problem.mask.to(q.device).packed
    inputs = with_near_rows(q), with_near_rows(k), with_near_rows(v)
    with on(q.device):
        replay(_forward_launches, inputs, tables, outputs, problem.scale, out_dtype, size)
    return Carry(*outputs)


def repeat_forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, size: Tile, out_dtype: torch.dtype
) -> Repeat | None:
    """See contract.py."""
    launches = recall(_forward_launches, (q, k, v), problem.mask.packed, 2, problem.scale, out_dtype, size)
    return repeated_forward(launches, q.device, empty_outputs(q.to("meta"), out_dtype), Room.of(()))


def _forward_launches(
    tensors: Sequence[Tensor], kind: str, numbers: tuple[int, ...], scale: float, out_dtype: torch.dtype, size: Tile
) -> list[Launch]:
    q, k, v, *tables, out, lse = tensors
    return [forward_launch(q, k, v, out, lse, unpack(kind, numbers, tables), scale, False, None, size=size)]


def backward(inputs: Sequence[Tensor], grads: Sequence[Tensor], problem: Problem, size: Tile) -> bool:
    """Write the gradients of q, k and v, given dout, q, k, v, lse and out. False if a kernel fails to compile; none is
    tried again."""
    dout, q, k, v, lse, out = inputs
    near, written = [[with_near_rows(x) for x in group] for group in ((dout, q, k, v, out), grads)]
    given = (*near[:4], lse.contiguous(), near[4], *written)
    try:
        with on(q.device):
            tables, parts = problem.mask.to(q.device).packed, _parts(written, size)
            replay(_backward_launches, given, tables, parts, problem.scale, size)
    except KernelFailed as failure:
        give_up(FAILED, failure, "the kernel for gradients of few tiles {}; from now on other kernels compute them")
        return False
    for grad, x in zip(grads, written, strict=True):
        if x is not grad:
            grad.copy_(x)
    return True


def repeat_backward(inputs: Sequence[Tensor], problem: Problem, size: Tile) -> RepeatBackward | None:
    """See contract.py."""
    grads = [torch.empty_like(x, device="meta") for x in inputs[1:4]]
    parts = _parts(grads, size)
    launches = recall(_backward_launches, (*inputs, *grads), problem.mask.packed, len(parts), problem.scale, size)
    return repeated_backward(launches, inputs[1].device, grads, Room.of(parts, grads))


def _parts(grads: Sequence[Tensor], size: Tile) -> tuple[Tensor, ...]:
    """Uninitialised parts of dq, dk and dv, where a gradient with one part is its own part; () if no gradient has
    several."""
    counts = size.key_parts, size.query_parts, size.query_parts
    if max(counts) == 1:
        return ()
    return tuple(x if n == 1 else empty_parts(x, n) for x, n in zip(grads, counts, strict=True))


def _backward_launches(
    tensors: Sequence[Tensor], kind: str, numbers: tuple[int, ...], scale: float, size: Tile
) -> list[Launch]:
    """The launch that computes the gradients and, if they have parts, the one that adds the parts."""
    num_parts = 3 if max(size.key_parts, size.query_parts) > 1 else 0
    tables, parts = tensors[9 : len(tensors) - num_parts], tensors[len(tensors) - num_parts :]
    inputs, grads, mask = tensors[:6], tensors[6:9], unpack(kind, numbers, tables)
    launches = [gradients_launch(inputs, parts or grads, mask, scale, size)]
    return [*launches, add_gradients_launch(parts, grads)] if parts else launches


def gradients_launch(inputs: Sequence[Tensor], grads: Sequence[Tensor], mask: Mask, scale: float, size: Tile) -> Launch:
    """The launch that computes the gradients of q, k and v, or their parts, from dout, q, k, v, lse and out."""
    dout, q, k, v, lse, out = inputs
    (B, H, T, D), (K, S), wide = q.shape, k.shape[1:3], block_dim(q.shape[-1])
    table, start, end, _, _, s_rows, _, lo, hi, _ = mask_arguments(mask, T, S, q)
    tensors = (dout, q, k, v, out, lse, *grads, start, end, *strides(dout, q, k, v, out, *grads))
    numbers = (s_rows, lo, hi, H, K, T, S, scale * LOG2E, scale)
    tile = {"D": D, "BD": wide, "BM": size.block_q, "BN": size.block_k, "TABLE": table}
    constants = {**tile, "num_warps": size.num_warps, "num_stages": size.num_stages}
    if wide > 128:
        assert size.block_q >= T * (H // K), "a program has all rows of a key head"
        arguments = (*tensors, *numbers, size.key_parts)
        return Launch(few_rows_kernel, (B * K * size.key_parts,), arguments, constants)
    num_key_programs = triton.cdiv(S, size.block_k) * B * K * size.query_parts
    num_query_programs = triton.cdiv(T, size.block_q) * B * H * size.key_parts
    arguments = (*tensors, *numbers, num_key_programs, size.query_parts, size.key_parts)
    return Launch(gradients_kernel, (num_key_programs + num_query_programs,), arguments, constants)
