"""Backward with few tiles of keys: the queries that see a key head are divided into parts, computed in parallel.

A program computes dK and dV of a block of keys and loops over all queries, of all heads that share the keys. With few
key heads, or few keys, there are fewer such tiles than multiprocessors, or most multiprocessors wait for the last
tiles. A key head is then split into `parts` heads with the same K and V. Each of them has an equal part of the query
heads or, if each query head has its own keys, an equal part of the queries. Their dK and dV are float32,
[B, K * parts, S, D], and one kernel adds them in a fixed order, so deterministic gradients stay deterministic.

In calls with few queries, keys are divided too, and dq [B, H * parts, T, D] is added in the same way: see few_rows.py,
few_tiles.py and hopper/two_pass.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.portable.common import key_block, load_tile, store_tile
from flashspan.kernels.portable.tiles import block_dim

ROUNDS = 1.9
"""The least number of tiles per multiprocessor: about two. Under a causal mask the longest tile takes twice the mean
time, so with fewer than two rounds most multiprocessors would wait for it."""

MIN_BLOCKS = 4
"""The least number of blocks of queries in a part: fewer would take less time than writing and adding its dK and dV."""


MOST_PARTS = 8
"""The most parts of queries."""

TILE_STEPS, SUM_STEPS, PART_STEPS = 3.0, 2.0, 0.03
"""Costs, in steps of about 2 us (a block of queries): to begin and end a tile, to launch the kernel that adds parts,
and to write and read one part of a tile."""


@lru_cache(4096)
def count_parts(group: int, num_tiles: int, num_blocks: int, multiprocessors: int) -> int:
    """The number of parts for a group of query heads: the smallest divisor of the group that gives enough tiles, or the
    largest one allowed if none does. A head has `num_blocks` blocks of queries."""
    found = 1
    for parts in range(1, group + 1):
        if num_tiles * found >= ROUNDS * multiprocessors:
            break
        if group % parts == 0 and group // parts * num_blocks >= MIN_BLOCKS:
            found = parts
    return found


@lru_cache(4096)
def count_equal_parts(group: int, num_tiles: int, num_blocks: int, multiprocessors: int) -> int:
    """The number of parts that is expected to take the least time if all tiles take equally long, as without a mask.
    Multiprocessors without a tile in the last round are idle. With a group of one head, its queries are divided."""

    def steps(parts: int) -> float:
        rounds = -(-num_tiles * parts // multiprocessors)
        sums = SUM_STEPS + PART_STEPS * parts * num_tiles if parts > 1 else 0.0
        return rounds * (-(-group * num_blocks // parts) + TILE_STEPS) + sums

    if group > 1:
        allowed = [n for n in range(2, group + 1) if group % n == 0 and group // n * num_blocks >= MIN_BLOCKS]
    else:  # no part may be empty
        some = range(2, min(MOST_PARTS, num_blocks // MIN_BLOCKS) + 1)
        allowed = [n for n in some if (n - 1) * -(-num_blocks // n) < num_blocks]
    return min([1, *allowed], key=steps)


def empty_parts(x: Tensor, parts: int) -> Tensor:
    """An empty tensor for the gradient of x of all parts."""
    B, heads, length, D = x.shape
    return torch.empty(B, heads * parts, length, D, dtype=torch.float32, device=x.device)


@triton.jit
def add_block(
    parts, grad, i, s_b, s_h, s_row, heads, rows, num_parts, D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Add the parts of block i of the rows of a gradient, in a fixed order; with ADD, also what the gradient holds."""
    i_b, i_h, row = key_block(i, heads, rows, BLOCK)
    i_h = i_h.to(tl.int64)
    o_r = tl.arange(0, BLOCK)
    step = tl.cast(rows, tl.int64) * D
    parts += (i_b * heads + i_h) * num_parts * step
    b = tl.zeros([BLOCK, BD], tl.float32)
    for i_part in range(num_parts):
        b += load_tile(parts + i_part * step, row, o_r, D, rows, D, BD, True)
    store_tile(grad + i_b * s_b + i_h * s_h, row, o_r, s_row, rows, b, D, BD, ADD)


@triton.jit(do_not_specialize=["H", "K", "T", "S", "query_parts", "key_parts", "num_dq", "num_dk"])
def add_gradients_kernel(
    dq_parts, dk_parts, dv_parts, dq, dk, dv, s_dqb, s_dqh, s_dqt, s_dkb, s_dkh, s_dks, s_dvb, s_dvh, s_dvs,
    H, K, T, S, query_parts, key_parts, num_dq, num_dk, D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Add the parts of a block of rows: of dq in the first num_dq programs, of dk in the next num_dk, else of dv."""
    i = tl.program_id(0)
    if i < num_dq:
        add_block(dq_parts, dq, i, s_dqb, s_dqh, s_dqt, H, T, key_parts, D, BD, BLOCK, ADD)
    elif i < num_dq + num_dk:
        add_block(dk_parts, dk, i - num_dq, s_dkb, s_dkh, s_dks, K, S, query_parts, D, BD, BLOCK, ADD)
    else:
        add_block(dv_parts, dv, i - num_dq - num_dk, s_dvb, s_dvh, s_dvs, K, S, query_parts, D, BD, BLOCK, ADD)


def add_gradients_launch(parts: Sequence[Tensor], grads: Sequence[Tensor], accumulate: bool = False) -> Launch:
    """The launch that writes the sums of the parts of dq, dk and dv, or adds them. A gradient that is its own single
    part is left as it is."""
    (B, H, T, D), (K, S), wide = grads[0].shape, grads[1].shape[1:3], block_dim(grads[0].shape[-1])
    key_parts, query_parts = parts[0].shape[1] // H, parts[1].shape[1] // K
    block = max(8, 2048 // wide)
    num_dq = triton.cdiv(T, block) * B * H if key_parts > 1 else 0
    num_dk = triton.cdiv(S, block) * B * K if query_parts > 1 else 0
    steps = [step for x in grads for step in x.stride()[:3]]
    return Launch(
        add_gradients_kernel,
        (num_dq + 2 * num_dk,),
        (*parts, *grads, *steps, H, K, T, S, query_parts, key_parts, num_dq, num_dk),
        {"D": D, "BD": wide, "BLOCK": block, "ADD": accumulate, "num_warps": 4},
    )
