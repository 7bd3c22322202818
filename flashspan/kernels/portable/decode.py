"""Few queries over many keys (flash-decoding): the keys of a head are split over programs.

A program computes one part of the keys for all query heads that share them: its rows are pairs (query, head of the
group), so each tile of keys is loaded once for all of them. It writes a partial output and lse in float32; a second
kernel combines the parts. Only the keys that the rows see are split. So keys outside a window are never loaded. Even if
only the device knows the number of keys, as inside a CUDA graph, the work is divided over all programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashspan.kernels.contract import Carry, Problem, Repeat
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.failure import KernelFailed, give_up
from flashspan.kernels.launch.launch import Launch, on
from flashspan.kernels.launch.replay import Room, recall, repeated_forward, replay
from flashspan.kernels.masks import Band, Mask, Rows, count, unpack
from flashspan.kernels.portable.arguments import LOG2E, empty_outputs, mask_arguments, with_near_rows
from flashspan.kernels.portable.common import edge_tile, interval, prefetch_rows, tile_ranges
from flashspan.kernels.portable.steps import finished, forward_step
from flashspan.kernels.portable.tiles import (
    Tile,
    block_dim,
    early_launch,
    fill,
    is_small,
    multiprocessors,
    precision,
    starts_early,
)
from flashspan.kernels.portable.two_tiles import store_columns, two_tile_loop

FEW, MAX_ROWS, MAX_QUERIES = 16, 64, 128
"""These kernels are used for calls of up to FEW rows (pairs of a query and a head of the group); of up to MAX_ROWS rows
if there are many keys; of up to MAX_QUERIES queries if there are many keys and forward.py would launch few programs."""

TWO_TILES = 192
"""The largest head above 128 that is computed as two tiles of columns, of 128 and 64, with more than MAX_ROWS rows."""

RESIDENT = 2
"""Number of programs of up to MAX_ROWS rows, or of two tiles, that a multiprocessor runs at once; with heads above 128
and FEW to MAX_ROWS rows, only one fits."""

MANY_KEYS = 768
"""They are also used for calls whose queries see this many keys on average."""

SHORT = 32
"""If all programs of a call with one query run at once, and each has up to SHORT tiles of keys and FEW rows, they have
a fourth stage: then two fit on a multiprocessor, not three, and an early start cannot put a third one there."""

LEAST_PARTS = 3
"""With more than FEW rows, they are used if so many programs a block of rows run at once: one on a multiprocessor, or
two of two tiles. With fewer parts, the kernels for many queries are faster; but not if few queries of several heads
share keys, which those kernels would load for each head."""

FAILED: list[str] = []
"""The reasons why these kernels failed to compile on this machine. If it is not empty, they are not tried again."""

UNIT = 8
"""Strides are passed in units of this many elements if it divides them all. Triton then knows that 16-byte loads are
aligned, and one compiled kernel serves all such strides."""

SPLIT_FREE = [
    *("s_qb", "s_qh", "s_qt", "s_kb", "s_kh", "s_ks", "s_vb", "s_vh", "s_vs", "s_ps", "s_pb", "s_ph", "s_pt"),
    *("s_rows", "B", "H", "K", "T", "S", "num_blocks", "num_splits", "lo", "hi"),
]
COMBINE_FREE = ["s_ob", "s_oh", "s_ot", "H", "T", "num_rows", "num_splits"]


@triton.jit
def part_of_keys(
    o_t, T, S, lo, hi, start, end, i_s, num_splits, BN: tl.constexpr, TABLE: tl.constexpr, ONE: tl.constexpr
):
    """Return which keys of part i_s each row sees, and the first and last key of the part. With ONE, the parts are
    equal; otherwise they are whole tiles."""
    b_start, b_end = interval(o_t, T, S, lo, hi, start, end, TABLE)
    first = tl.min(tl.where(b_start < b_end, b_start, S), 0)
    if not ONE:
        first = first // BN * BN
    last = tl.max(tl.where(b_start < b_end, b_end, 0), 0)
    share = tl.cdiv(tl.maximum(last - first, 0), num_splits)
    if not ONE:
        share = tl.cdiv(share, BN) * BN
    begin = first + i_s.to(tl.int32) * share
    stop = tl.minimum(begin + share, last)
    return tl.maximum(b_start, begin), tl.minimum(b_end, stop), begin, stop


@triton.jit(do_not_specialize=SPLIT_FREE)
def split_kernel(
    q, k, v, part, part_lse, start, end,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ps, s_pb, s_ph, s_pt, s_rows,
    B, H, K, T, S, num_blocks, num_splits, lo, hi, scale,
    D: tl.constexpr, BD: tl.constexpr, BX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TABLE: tl.constexpr,
    ONE: tl.constexpr, NEGATIVE: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attention of BM rows of a key head over one part of their keys. BX: the columns of a head beyond BD, if it is
    computed as two tiles (two_tiles.py). ONE: there is one query, so all rows see the same keys. EARLY: this kernel may
    start before the previous kernel has ended, and the next kernel before this one has ended (programmatic dependent
    launch). Each waits for the previous kernel before it uses what it reads. Before it waits, this kernel prefetches
    its first tile of keys and values into the L2 cache. `start` and `end` may yet change: they are read again."""
    i = tl.program_id(0)
    i_m, i = i % num_blocks, i // num_blocks  # blocks of rows that share keys run side by side
    i_s, i = (i % num_splits).to(tl.int64), i // num_splits
    i_b, i_k = (i // K).to(tl.int64), (i % K).to(tl.int64)
    group = H // K
    o_r = i_m * BM + tl.arange(0, BM)
    o_t, o_h = o_r // group, i_k * group + o_r % group
    o_d = tl.arange(0, BD)
    m_row = o_t < T
    m_tile = m_row[:, None] & (o_d < D)[None, :]

    k += (i_b * s_kb + i_k * s_kh) * UNIT
    v += (i_b * s_vb + i_k * s_vh) * UNIT
    s_ks, s_vs = s_ks * UNIT, s_vs * UNIT
    start += i_b * s_rows
    end += i_b * s_rows
    if EARLY:
        gdc_launch_dependents()
        _, _, begin, stop = part_of_keys(o_t, T, S, lo, hi, start, end, i_s, num_splits, BN, TABLE, ONE)
        o_k = tl.maximum(tl.minimum(begin + tl.arange(0, BN), tl.minimum(stop, S) - 1), 0)
        prefetch_rows(k, o_k, s_ks, D)
        prefetch_rows(v, o_k, s_vs, D)
        gdc_wait()
    # [BM, BD]. It is loaded while the part of the keys is computed.
    p_q = q + (i_b * s_qb + o_h * s_qh + o_t.to(tl.int64) * s_qt)[:, None] * UNIT
    b_q = tl.load(p_q + o_d[None, :], mask=m_tile, other=0.0)
    b_start, b_end, begin, stop = part_of_keys(o_t, T, S, lo, hi, start, end, i_s, num_splits, BN, TABLE, ONE)
    b_acc = tl.zeros([BM, BD], tl.float32)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    o_n = tl.arange(0, BN)
    if BX:
        b_acc, b_more, b_m, b_l = two_tile_loop(
            b_acc, b_m, b_l, b_q, p_q, m_row, k, v, s_ks, s_vs, S, scale, b_start, b_end, D, BD, BX, BN, NEGATIVE
        )
    elif ONE:
        for n0 in range(begin, stop, BN):
            b_acc, b_m, b_l = forward_step(
                b_acc, b_m, b_l, b_q, q, 0, o_r, 0, T, k, v, n0, o_n, s_ks, s_vs, stop, scale, b_start, b_end, 0, 0, q,
                0, 1.0, D, BD, BD, True, False, False, False, NEGATIVE, PRECISION, True,
            )  # fmt: skip
    else:
        edge, num_before, full, full_end, num_after = tile_ranges(b_start, b_end, m_row, S, True, BN, BN)
        for n0 in range(full, full_end, BN):
            b_acc, b_m, b_l = forward_step(
                b_acc, b_m, b_l, b_q, q, 0, o_r, 0, T, k, v, n0, o_n, s_ks, s_vs, S, scale, b_start, b_end, 0, 0, q,
                0, 1.0, D, BD, BD, False, False, False, False, NEGATIVE, PRECISION,
            )  # fmt: skip
        for i_tile in tl.range(0, num_before + num_after, num_stages=1):
            n0 = edge_tile(i_tile, edge, num_before, full_end, BN)
            b_acc, b_m, b_l = forward_step(
                b_acc, b_m, b_l, b_q, q, 0, o_r, 0, T, k, v, n0, o_n, s_ks, s_vs, S, scale, b_start, b_end, 0, 0, q,
                0, 1.0, D, BD, BD, True, False, False, False, NEGATIVE, PRECISION,
            )  # fmt: skip

    b_out, b_lse = finished(b_acc, b_m, b_l)
    p_rows = part + (i_s * s_ps + i_b * s_pb + o_h * s_ph + o_t.to(tl.int64) * s_pt)[:, None] * UNIT
    tl.store(p_rows + o_d[None, :], b_out.to(part.dtype.element_ty), mask=m_tile)
    if BX:
        b_out, _ = finished(b_more, b_m, b_l)
        store_columns(p_rows, b_out, m_row, D, BD, BX)
    tl.store(part_lse + ((i_s * B + i_b) * H + o_h) * T + o_t, b_lse, mask=m_row)


@triton.jit(do_not_specialize=COMBINE_FREE)
def combine_kernel(
    part, part_lse, out, lse, s_ob, s_oh, s_ot, H, T, num_rows, num_splits,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, CARRY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute output and lse of one row from its parts, BS at a time, and from the carry."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    i_b, i_h, i_t = i // T // H, i // T % H, i % T
    o_s, o_d = tl.arange(0, BS), tl.arange(0, BD)
    out += i_b * s_ob + i_h * s_oh + i_t * s_ot
    if CARRY:
        m = tl.load(lse + i)
        total = tl.where(m == float("-inf"), 0.0, 1.0)
        b_acc = tl.load(out + o_d, mask=o_d < D, other=0.0)
    else:
        m = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        b_acc = tl.zeros([BD], tl.float32)
    for s0 in range(0, num_splits, BS):
        row = (s0 + o_s).to(tl.int64) * num_rows + i
        b_lse = tl.load(part_lse + row, mask=s0 + o_s < num_splits, other=float("-inf"))
        # [BS, BD]. A part without keys is 0: its load need not wait for its lse.
        m_part = (s0 + o_s < num_splits)[:, None] & (o_d < D)[None, :]
        b_part = tl.load(part + row[:, None] * D + o_d[None, :], mask=m_part, other=0.0)
        new = tl.maximum(m, tl.max(b_lse, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        b_weight = tl.exp(b_lse - shift)
        alpha = tl.exp(m - shift)
        b_acc = b_acc * alpha + tl.sum(b_part * b_weight[:, None], 0)
        total = total * alpha + tl.sum(b_weight, 0)
        m = new
    some = tl.where(total == 0.0, 1.0, total)
    tl.store(out + o_d, (b_acc / some).to(out.dtype.element_ty), mask=o_d < D)
    tl.store(lse + i, tl.where(total == 0.0, float("-inf"), m + tl.log(some)))


def takes(q: Tensor, k: Tensor, mask: Mask, dropout: Dropout | None = None) -> bool:
    """Whether these kernels are the fastest for a call: it has few queries, and too many keys for one program."""
    if not isinstance(mask, (Band, Rows)) or dropout is not None or FAILED:
        return False
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    if not q.numel() or not S:
        return False
    rows = T * (H // K)
    if T == 1 or rows <= FEW:
        return True
    if q.dtype == torch.float32 and D > 128:  # these kernels would need too many registers
        return False
    chip = multiprocessors(q.device)
    size = few_tile(rows, D, q.element_size(), q.device)
    slots = chip * RESIDENT if in_two_tiles(size) else chip
    many_parts = LEAST_PARTS * B * K * triton.cdiv(rows, size.block_q) <= slots
    few_programs = B * H * triton.cdiv(T, 128) < chip
    if S >= 8 * T and (rows <= MAX_ROWS or (T <= MAX_QUERIES and few_programs)):
        return many_parts or H > K
    return many_parts and isinstance(mask, Band) and count(mask, T, S) >= MANY_KEYS * T


def forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, carry: Carry | None, out_dtype: torch.dtype
) -> Carry | None:
    """See contract.py. The carry is updated in place. None if a kernel fails to compile; none is tried again."""
    mask, scale, (q, k, v) = problem.mask, problem.scale, (with_near_rows(q), with_near_rows(k), with_near_rows(v))
    num_splits = count_splits(q, k, mask)
    if carry is None:
        outputs, steps = _room(q, out_dtype, num_splits), None
    else:
        out = with_near_rows(carry.out if carry.out.stride(-1) == 1 else carry.out.contiguous())
        outputs, steps = [out, carry.lse.float().contiguous(), *_parts(q, num_splits)], out.stride()
    try:
        with on(q.device):
            values = (scale, steps, out_dtype, num_splits, precision(q.device))
            replay(_launches, (q, k, v), mask.to(q.device).packed, outputs, *values)
    except KernelFailed as failure:
        give_up(FAILED, failure, "the kernel for few queries {}; from now on another kernel computes such calls")
        return None
    return Carry(outputs[0], outputs[1])


def repeat_forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, out_dtype: torch.dtype) -> Repeat | None:
    """See contract.py."""
    num_splits, device = count_splits(q, k, problem.mask), q.device
    values = (problem.scale, None, out_dtype, num_splits, precision(device))
    launches = recall(_launches, (q, k, v), problem.mask.packed, 4, *values)
    out, lse, *parts = _room(q.to("meta"), out_dtype, num_splits)
    return repeated_forward(launches, device, (out, lse), Room.of(parts, (out, lse)))


def _room(q: Tensor, out_dtype: torch.dtype, num_splits: int) -> list[Tensor]:
    """Uninitialised out, lse and the parts of both. A single part is out and lse themselves."""
    out, lse = empty_outputs(q, out_dtype)
    return [out, lse, *((out, lse) if num_splits == 1 else _parts(q, num_splits))]


def _parts(q: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    return (
        q.new_empty((num_splits, *q.shape), dtype=torch.float32),
        q.new_empty((num_splits, *q.shape[:3]), dtype=torch.float32),
    )


def _launches(
    tensors: Sequence[Tensor],
    kind: str,
    numbers: tuple[int, ...],
    scale: float,
    carry_steps: tuple[int, ...] | None,
    out_dtype: torch.dtype,
    num_splits: int,
    matmuls: str,
) -> list[Launch]:
    """The launches of forward. matmuls: the `precision` of matmuls, on which a cached launch depends."""
    q, k, v, *tables, out, lse, part, part_lse = tensors
    mask, carry = unpack(kind, numbers, tables), carry_steps is not None
    launches = [split_launch(q, k, v, part, part_lse, mask, scale)]
    if num_splits > 1 or carry:
        launches.append(combine_launch(part, part_lse, out, lse, carry))
    return launches


def split_launch(q: Tensor, k: Tensor, v: Tensor, part: Tensor, part_lse: Tensor, mask: Mask, scale: float) -> Launch:
    """The launch that computes part [num_splits, B, H, T, D] and part_lse [num_splits, B, H, T], or, without the first
    dimension, the output itself."""
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    size = few_tile(T * (H // K), D, q.element_size(), q.device)
    num_splits = 1 if part.dim() == 4 else len(part)
    num_blocks = triton.cdiv(T * (H // K), size.block_q)
    num_programs = num_blocks * num_splits * B * K
    few = T == 1 and size.block_q == FEW and size.num_stages == 3
    if few and num_programs <= RESIDENT * multiprocessors(q.device) and SHORT * num_splits * size.block_k >= S:
        size = replace(size, num_stages=4)
    table, start, end, _, _, rows_stride, _, lo, hi, _ = mask_arguments(mask, T, S, q)
    # The stride of a dimension of size 1 is arbitrary.
    steps = [
        step if length > 1 else 0
        for x in (q, k, v, part if part.dim() == 5 else part[None])
        for length, step in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    early = starts_early(q.device)
    wide, more = (size.slice, TWO_TILES - size.slice) if in_two_tiles(size) else (block_dim(D), 0)
    unit = UNIT if all(step % UNIT == 0 for step in steps) else 1
    return Launch(
        split_kernel,
        (num_programs,),
        (
            q, k, v, part, part_lse, start, end, *(step // unit for step in steps), rows_stride,
            B, H, K, T, S, num_blocks, num_splits, lo, hi, scale * LOG2E,
        ),
        {
            "D": D, "BD": wide, "BX": more, "BM": size.block_q, "BN": size.block_k, "TABLE": table, "ONE": T == 1,
            "NEGATIVE": scale < 0, "UNIT": unit, "PRECISION": precision(q.device), "EARLY": early,
            "num_warps": size.num_warps, "num_stages": size.num_stages, **early_launch(early),
        },
    )  # fmt: skip


def combine_launch(part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, carry: bool) -> Launch:
    """The launch that combines the parts with one another and with the carry."""
    num_splits, (_, H, T, D) = len(part), out.shape
    few, early = num_splits <= 8, starts_early(out.device)
    options = {"num_warps": 1 if few else 4, **early_launch(early)}
    block = 8 if few else 64 if num_splits > 32 and block_dim(D) <= 128 else 32
    return Launch(
        combine_kernel,
        (lse.numel(),),
        (part, part_lse, out, lse, *out.stride()[:3], H, T, lse.numel(), num_splits),
        {"D": D, "BD": block_dim(D), "BS": block, "CARRY": carry, "EARLY": early, **options},
    )


@lru_cache(4096)
def few_tile(rows: int, head_dim: int, itemsize: int, device: torch.device) -> Tile:
    """The tile sizes for a number of rows of a key head."""
    wide = block_dim(head_dim)
    # K and V of a tile are 32 KiB together, so three programs with one tile each have 96 KiB in flight.
    block_k = max(32, min(128, 16384 // (wide * itemsize)))
    num_stages = 2 if is_small(device) or (itemsize == 4 and wide == 256) else 3
    if rows <= FEW:
        return Tile(FEW, block_k, block_k, 8 if itemsize == 4 and wide == 256 else 4, num_stages)
    if rows > MAX_ROWS and itemsize == 2 and 128 < head_dim <= TWO_TILES and not is_small(device):
        return Tile(64, 32, 32, 4, 2, slice=128)
    block_k = min(block_k, 128 // itemsize)  # a wider tile needs too many registers
    many = rows > 64 and itemsize == 2 and wide < 256 and not is_small(device)
    return Tile(128 if many else 64, block_k, block_k, 8 if many or wide >= 128 else 4, num_stages)


def in_two_tiles(size: Tile) -> bool:
    """Whether a head is computed as two tiles of columns. Two such programs fit on a multiprocessor."""
    return size.slice == 128


def count_splits(q: Tensor, k: Tensor, mask: Mask) -> int:
    """The number of parts into which the keys are split to fill the GPU. It depends only on shapes."""
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    rows = T * (H // K)
    size = few_tile(rows, D, q.element_size(), q.device)
    rounds, resident = 1, 1 if FEW < rows <= MAX_ROWS and block_dim(D) > 128 else RESIDENT
    if isinstance(mask, Band):
        lo, hi = mask.bounds(T, S)
        S = max(1, min(S, hi - lo + T))
    elif B > 1:
        # Lengths may differ if each sequence has its own rows in the mask. With more parts than run at once, short
        # sequences leave room for long ones.
        rounds = 4
        if T == 1 and rows <= FEW:  # three such programs fit on a multiprocessor
            may_differ = isinstance(mask, Rows) and mask.start.dim() == 2
            rounds, resident = 2 if may_differ else 1, 3
    streams = B * K * triton.cdiv(rows, size.block_q)
    tiles, chip = triton.cdiv(S, size.block_k), multiprocessors(q.device)
    if rows > MAX_ROWS and not in_two_tiles(size):
        return max(1, min(tiles // 2, chip // streams))  # one program runs on a multiprocessor, and in one round
    return fill(streams, tiles, rounds * resident * chip, 0.98 if T == 1 else 0.95)
