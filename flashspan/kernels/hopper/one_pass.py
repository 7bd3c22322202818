"""The launch of the backward for Hopper in one pass, for heads up to 128: see backward.py."""

from __future__ import annotations

import triton
from torch import Tensor

from flashspan.kernels.hopper.backward import backward_kernel
from flashspan.kernels.hopper.lists import lists_backward_launch
from flashspan.kernels.hopper.parts import is_unit
from flashspan.kernels.hopper.tensors import (
    BackwardInputs,
    block_dim,
    describe,
    describe_sums,
    key_heads_for_keys,
    multiprocessors,
)
from flashspan.kernels.hopper.tiles import BACKWARD, Backward, backward_tile, dq_turns, warps
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.masks import Band, Blocks, Mask
from flashspan.kernels.portable.arguments import LOG2E, mask_arguments
from flashspan.kernels.portable.head_parts import count_parts

CUT_BLOCKS = 16
"""About how many blocks of queries a part of a tile has, where tiles are split by queries."""


def count_head_parts(q: Tensor, k: Tensor, mask: Mask, accumulate: bool, with_dq: bool) -> int:
    """How many parts the query heads of a key head are divided into, by the shapes and the GPU (head_parts.py)."""
    (B, H, T, D), (_, K, S, _) = q.shape, k.shape
    if H == K:
        return 1
    wide = block_dim(D)
    tile = Backward(1, 64, 64)  # two_pass_dkv.py
    if wide in BACKWARD:
        tile = backward_tile(wide, with_dq and isinstance(mask, Band), S)
    if accumulate and with_dq and isinstance(mask, Band) and 2 * CUT_BLOCKS * tile.block_q <= T:
        lo, hi = mask.bounds(T, S)
        if lo <= 1 - T and hi >= S - 1:
            return 1  # these tiles are split by queries instead
    num_tiles = triton.cdiv(S, tile.warpgroups * tile.block_k) * B * K
    return count_parts(H // K, num_tiles, triton.cdiv(T, tile.block_q), multiprocessors(q.device))


def backward_launch(given: BackwardInputs) -> Launch:
    """The launch of the one-pass kernel: dk, dv and, unless it is None, dq, which is added into."""
    if isinstance(given.mask, Blocks):
        return lists_backward_launch(given)
    dout, q, k, v, minus_lse, minus_delta, mask, scale, sums, dk, dv, accumulate, states, counter = given
    B, H, T, D = q.shape
    K, S = dk.shape[1], k.shape[2]
    table, _, _, first, last, _, s_columns, lo, hi, _ = mask_arguments(mask, T, S, minus_lse)
    wide = block_dim(D)
    tile = backward_tile(wide, sums is not None and not table, S)
    keys = tile.warpgroups * tile.block_k
    tiles_per_head, chip = triton.cdiv(S, keys), multiprocessors(q.device)
    num_tiles = tiles_per_head * B * K
    section = key_heads_for_keys(q, dk, tiles_per_head)
    masked = table or lo > 1 - T or hi < S - 1
    # If tiles are equally long and dK and dV are accumulated, the tiles after the last full round are split by queries.
    cut = accumulate and sums is not None and not masked and k.shape[1] == K
    parts = max(1, min(8, T // (CUT_BLOCKS * tile.block_q))) if cut else 1
    whole = num_tiles // chip * chip if parts > 1 else num_tiles
    num_tiles = whole + (num_tiles - whole) * parts
    # Where no query sees more than 4096 keys, claiming sums of dQ block by block costs less than clearing them before.
    # `Rows` are assumed to be such masks: their lengths are not read.
    claim = sums is not None and not accumulate and (table or min(hi - lo + 1, S) <= 4096)
    far = not table and lo <= 1 - T  # all keys behind are seen
    return Launch(
        backward_kernel,
        (min(num_tiles, chip),),
        (
            describe(q, 1, 1, tile.block_q, wide), describe(dout, 1, 1, tile.block_q, wide),
            describe(k, 1, 1, tile.block_k, wide), describe(v, 1, 1, tile.block_k, wide),
            describe_sums(q if sums is None else sums, sums is None or accumulate, tile.block_q, wide),
            *(describe(x, 1, 1, tile.block_k, wide * 2 // x.itemsize) for x in (dk, dv)),
            *(describe(x, tile.block_q, *x.shape[1:]) for x in (minus_lse, minus_delta)), states, first, last, counter,
            s_columns, H, K, H // K, T, S, len(minus_lse) // (B * H), lo, hi, scale * LOG2E, scale, section,
            num_tiles, whole, parts,
        ),
        {
            "STAGES": 2, "TABLE": table, "ACCUMULATE": accumulate,
            "HAS_EDGES": masked or tile.warpgroups == 3 or S % keys > 0, "WITH_DQ": sums is not None,
            "FIRST_STORES": claim, "SPLIT_TILES": cut, "SPLIT_HEADS": k.shape[1] < K,
            "WHOLE_DQ_STAGES": 0 if sums is None else dq_turns(tile.warpgroups, wide, claim, far and H > K),
            "UNIT_SCALE": is_unit(q, scale), **warps(tile.warpgroups),
        },
    )  # fmt: skip
