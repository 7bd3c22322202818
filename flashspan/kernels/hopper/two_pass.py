"""Backward for Hopper in two passes: for heads above 128, up to 256, and for bitwise reproducible gradients.

At a head size of 256, dK and dV of 128 keys do not fit the registers. With 64 keys, a program in one pass would add a
tile of dQ to global memory for every tile of queries it reads: 128 KB through the L2 cache for five matmuls of
64 x 64 x 256, which is more than the cache's bandwidth. So there are two kernels, and seven matmuls instead of five.
Every sum has a fixed order, so gradients are bitwise reproducible, at any head size.

`keys_kernel`: a program has 64 keys. One warpgroup computes S^T and P and keeps dV; the other computes dP^T and dS and
keeps dK. P goes from the first to the second through shared memory, in float32. Scores are transposed, keys down and
queries across: P and dS are then already in the registers from which the matmuls of dV and dK read them. Up to a head
size of 128, the one-pass kernel without dQ is used instead.

`queries_kernel`: a program has 128 queries, 64 per warpgroup. Q and dO stay in shared memory, dQ in registers; it loops
over K and V. If the blocks of queries would occupy at most half the multiprocessors, several programs share a block and
each has a part of its keys. Their dQ is float32, and one kernel adds the parts in a fixed order (gradient_parts.py).

In both, one warp loads, and the two warpgroups use the tensor cores in turn: while one multiplies, the other computes.
"""

from __future__ import annotations

import triton
from torch import Tensor

from flashspan.kernels.hopper.one_pass import backward_launch
from flashspan.kernels.hopper.tensors import (
    BackwardInputs,
    block_dim,
    describe,
    key_heads_for_keys,
    key_heads_for_queries,
)
from flashspan.kernels.hopper.tiles import BACKWARD, WARPS
from flashspan.kernels.hopper.two_pass_dkv import keys_kernel
from flashspan.kernels.hopper.two_pass_dq import queries_kernel
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.masks import Band, Mask, Rows
from flashspan.kernels.portable.arguments import LOG2E, mask_arguments
from flashspan.kernels.portable.few_tiles import mean_keys
from flashspan.kernels.portable.tiles import multiprocessors


def count_dq_parts(q: Tensor, k: Tensor, mask: Mask, accumulate: bool) -> int:
    """The number of parts of the keys in which dq is computed. Only for heads above 128, whose programs are long, and
    not if dq is added to what it holds."""
    B, H, T, D = q.shape
    programs, chip = triton.cdiv(T, 128) * B * H, multiprocessors(q.device)
    if accumulate or block_dim(D) in BACKWARD or 2 * programs > chip or not isinstance(mask, (Band, Rows)):
        return 1
    return max(1, min(chip // programs, triton.cdiv(mean_keys(q, k, mask), 64) // 2))


def two_pass_launches(given: BackwardInputs) -> list[Launch]:
    """The launches of the two passes: for dk and dv, then for dq. dq needs no sums and no cast; with n times as many
    heads as q, it holds the parts that are due to n parts of the keys."""
    dout, q, k, v, minus_lse, minus_delta, mask, scale, dq, dk, dv, accumulate = given[:-2]
    assert dq is not None
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    table, start, end, first, last, s_rows, s_columns, lo, hi, _ = mask_arguments(mask, T, S, minus_lse)
    wide = block_dim(D)
    # Keys of a tile: as many as fit in shared memory with Q and dO.
    block = 64 if wide == 256 else 128
    by_query = [describe(x, 1, 1, 64, wide) for x in (q, dout)]
    by_key = [describe(x, 1, 1, block, wide) for x in (k, v)]
    to_dq, to_dk, to_dv = (describe(x, 1, 1, 64, wide // (x.element_size() // 2)) for x in (dq, dk, dv))
    rows = len(minus_lse) // (B * H)
    constants = {"TABLE": table, "ACCUMULATE": accumulate, "HAS_EDGES": table or lo > 1 - T or hi < S - 1, **WARPS}
    if wide in BACKWARD:
        by_keys = backward_launch(given._replace(dq=None))
    else:
        num_blocks, key_heads = triton.cdiv(S, block), dk.shape[1]
        section = key_heads_for_keys(q, dk, num_blocks)
        by_keys = Launch(
            keys_kernel,
            (num_blocks * B * key_heads,),
            (
                *by_query, *by_key, to_dk, to_dv, describe(minus_lse, 64), describe(minus_delta, 64), first, last,
                s_columns, H, key_heads, H // key_heads, T, S, rows, lo, hi, scale * LOG2E, scale, section,
            ),
            {**constants, "ACCUMULATE": accumulate and key_heads == K, "SPLIT_HEADS": key_heads > K},
        )  # fmt: skip
    num_blocks, num_parts = triton.cdiv(T, 128), dq.shape[1] // H
    section = key_heads_for_queries(q, k, num_blocks)
    by_queries = Launch(
        queries_kernel,
        (num_blocks * B * H * num_parts,),
        (
            *by_query, *by_key, to_dq, minus_lse, minus_delta, start, end, s_rows, H, H // K, T, S, rows, lo, hi,
            scale * LOG2E, scale, section * (H // K), num_parts,
        ),
        {**constants, "ACCUMULATE": accumulate and num_parts == 1},
    )  # fmt: skip
    return [by_keys, by_queries]
