"""`find_runs` (runs.py) for a tensor on a GPU, in one launch that reads the tensor once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels.launch.launch import Launch, on
from flashspan.kernels.masks.build_triton import as_quads, load_quads, pack_quads

RUNS = {"ROWS": 8, "BLOCK": 1024}
"""Rows of a program, and keys that it reads at a time."""


@triton.jit
def count_ones(x):
    """The number of bits that are set in a uint32."""
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return ((((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["T", "found"])
def runs_kernel(
    visible, start, end, found, s_b, s_t, s_s, T, S,
    QUADS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write start (the first visible key) and end (start plus the number of visible keys) of some rows. found: a row
    has a gap."""
    i_all = tl.program_id(0)
    num_groups = tl.cdiv(T, ROWS)
    i_b, o_t = (i_all // num_groups).to(tl.int64), (i_all % num_groups) * ROWS + tl.arange(0, ROWS)
    p_row = visible + i_b * s_b + o_t.to(tl.int64) * s_t
    b_first = tl.full([ROWS, BLOCK // 32], S, tl.int32)
    b_past, b_count = tl.zeros([ROWS, BLOCK // 32], tl.int32), tl.zeros([ROWS, BLOCK // 32], tl.int32)
    if tl.load(found, volatile=True) == 0:  # one row with a gap is enough
        for first in range(0, S, BLOCK):
            b_quads = load_quads(p_row, first // 4 + tl.arange(0, BLOCK // 4), o_t < T, s_s, S, QUADS, EVEN)
            b_words = pack_quads(b_quads).to(tl.uint32, bitcast=True)
            o_key = (first + 32 * tl.arange(0, BLOCK // 32))[None, :]
            b_lowest = b_words & (0 - b_words)
            b_smeared = b_words | (b_words >> 1)  # from the highest bit down
            for i in tl.static_range(1, 5):
                b_smeared |= b_smeared >> (1 << i)
            b_first = tl.minimum(b_first, tl.where(b_words != 0, o_key + count_ones(b_lowest - 1), S))
            b_past = tl.maximum(b_past, tl.where(b_words != 0, o_key + count_ones(b_smeared), 0))
            b_count += count_ones(b_words)
        b_begin, b_length = tl.min(b_first, 1), tl.sum(b_count, 1)
        b_begin = tl.where(b_length > 0, b_begin, 0)
        tl.store(start + i_b * T + o_t, b_begin, mask=o_t < T)
        tl.store(end + i_b * T + o_t, b_begin + b_length, mask=o_t < T)
        if tl.sum((tl.max(b_past, 1) - b_begin != b_length).to(tl.int32)) != 0:
            tl.store(found, 1)


def find_runs(visible: Tensor) -> tuple[Tensor, Tensor] | None:
    """start, end (runs.py) of bool [B, T, S], no size 0, any strides; None if some row has a gap."""
    start, end = (visible.new_empty(visible.shape[:2], dtype=torch.int32) for _ in range(2))
    found = visible.new_zeros(1, dtype=torch.int32)
    with on(visible.device):
        runs_launch(visible, start, end, found)()
        return None if found.item() else (start, end)


def runs_launch(visible: Tensor, start: Tensor, end: Tensor, found: Tensor) -> Launch:
    (num_batch, num_queries, num_keys), (words, quads) = visible.shape, as_quads(visible)
    even = num_queries % RUNS["ROWS"] == 0 and num_keys % RUNS["BLOCK"] == 0
    arguments = (words, start, end, found, *words.stride(), num_queries, num_keys)
    constants = {"QUADS": quads, "EVEN": even, **RUNS}
    return Launch(runs_kernel, (num_batch * -(-num_queries // RUNS["ROWS"]),), arguments, constants)
