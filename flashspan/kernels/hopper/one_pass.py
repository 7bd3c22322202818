"""The launch of the backward for Hopper in one pass, for heads up to 128: see backward.py."""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashspan.kernels.hopper.backward import backward_kernel
from flashspan.kernels.hopper.lists import describe_bits
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
from flashspan.kernels.masks import EVERYTHING, Band, Blocks, Mask
from flashspan.kernels.portable.arguments import LOG2E, mask_arguments
from flashspan.kernels.portable.gradient_parts import count_equal_parts, count_parts
from flashspan.kernels.portable.loops import maps

CUT_BLOCKS = 16
"""About how many blocks of queries a part of a tile has, if gradients are accumulated and tiles are split."""

CLAIMED = 4096
"""If a query sees at most this many keys, claiming sums of dQ block by block costs less than clearing them first.
Without a mask, all tiles of a head visit a block of queries at the same time, and would wait for the one that stores,
so sums are then claimed only if the head has one tile."""

NO_LISTS = (None,) * 4
"""The tensors of a block map, or its numbers, in a call with another mask."""


def count_key_parts(q: Tensor, k: Tensor, mask: Mask, accumulate: bool, with_dq: bool) -> int:
    """The number of parts in which dK and dV of a key head are computed (gradient_parts.py)."""
    (B, H, T, D), (_, K, S, _) = q.shape, k.shape
    wide = block_dim(D)
    tile = Backward(1, 64, 64)  # two_pass_dkv.py
    if wide in BACKWARD:
        tile = backward_tile(wide, with_dq and isinstance(mask, Band), S)
    num_tiles = triton.cdiv(S, tile.warpgroups * tile.block_k) * B * K
    sizes = H // K, num_tiles, triton.cdiv(T, tile.block_q), multiprocessors(q.device)
    if not (with_dq and isinstance(mask, Band) and mask.simplify(T, S) is EVERYTHING):
        return count_parts(*sizes) if H > K else 1
    if accumulate and (H == K or 2 * CUT_BLOCKS * tile.block_q <= T):
        return 1  # these tiles are split by queries, and their parts are added in place
    return count_equal_parts(*sizes)


def backward_launch(given: BackwardInputs) -> Launch:
    """The launch of the one-pass kernel. It computes dk and dv and, unless given.dq is None, adds to dq."""
    if isinstance(given.mask, Blocks):
        return _lists_launch(given)
    _, q, k, _, minus_lse, _, mask, scale, sums, dk, _, accumulate, states, counter = given
    B, H, T, D = q.shape
    K, S = dk.shape[1], k.shape[2]
    table, _, _, first, last, _, s_columns, lo, hi, _ = mask_arguments(mask, T, S, minus_lse)
    wide = block_dim(D)
    tile = backward_tile(wide, sums is not None and not table, S)
    keys = tile.warpgroups * tile.block_k
    tiles_per_head, chip = triton.cdiv(S, keys), multiprocessors(q.device)
    parts = K // k.shape[1]
    by_queries = parts > 1 and k.shape[1] == H
    if by_queries:
        K = H
    num_tiles = tiles_per_head * B * K
    section = key_heads_for_keys(q, k if by_queries else dk, tiles_per_head)
    masked = table or lo > 1 - T or hi < S - 1
    # If tiles are equally long and dK and dV are accumulated, the tiles after the last full round are split by queries.
    cut = accumulate and sums is not None and not masked and parts == 1
    whole = 0 if by_queries else num_tiles
    if cut:
        parts = max(1, min(8, T // (CUT_BLOCKS * tile.block_q)))
        whole = num_tiles // chip * chip if parts > 1 else num_tiles
    num_tiles = whole + (num_tiles - whole) * parts
    # `Rows` are assumed to hide most keys: their lengths are not read.
    few_keys = table or (min(hi - lo + 1, S) <= CLAIMED and (masked or tiles_per_head == 1))
    claims = few_keys and sums is not None and not accumulate
    sees_past = not table and lo <= 1 - T  # a query sees all keys before it
    return Launch(
        backward_kernel,
        (min(num_tiles, chip),),
        (
            *_descriptors(given, tile), None, states, first, last, *NO_LISTS, counter, s_columns, *NO_LISTS, H, K,
            H // K, T, S, len(minus_lse) // (B * H), lo, hi, scale * LOG2E, scale, section, num_tiles, whole, parts,
        ),
        {
            "STAGES": 2, "TABLE": table, "BLOCK_MAP": False, "ACCUMULATE": accumulate,
            "HAS_EDGES": masked or tile.warpgroups == 3 or S % keys > 0, "WITH_DQ": sums is not None,
            "FIRST_STORES": claims, "SPLIT_TILES": cut or by_queries, "SPLIT_HEADS": k.shape[1] < K,
            "WHOLE_DQ_STAGES": 0 if sums is None else dq_turns(tile.warpgroups, wide, claims, sees_past and H > K),
            "UNIT_SCALE": is_unit(q, scale), **warps(tile.warpgroups),
        },
    )  # fmt: skip


def _lists_launch(given: BackwardInputs) -> Launch:
    """The launch of the one-pass backward kernel for a block map."""
    _, q, k, _, minus_lse, _, mask, scale, sums, dk, _, accumulate, states, counter = given
    assert isinstance(mask, Blocks)
    assert sums is not None
    B, H, T, D = q.shape
    K, S = dk.shape[1], k.shape[2]
    wide, lines, chip = block_dim(D), mask.columns.spans.shape[2], multiprocessors(q.device)
    tile = BACKWARD[wide]
    section = key_heads_for_keys(q, dk, lines)
    return Launch(
        backward_kernel,
        (min(lines * B * K, chip),),
        (
            *_descriptors(given, tile), describe_bits(mask.bits_t, mask), states, None, None, *mask.columns.tensors,
            counter, None, *maps(mask, mask.columns), H, K, H // K, T, S, len(minus_lse) // (B * H), None, None,
            scale * LOG2E, scale, section, lines * B * K, None, None,
        ),
        {
            "STAGES": 2, "TABLE": False, "BLOCK_MAP": True, "ACCUMULATE": accumulate, "HAS_EDGES": True,
            "WITH_DQ": True, "FIRST_STORES": not accumulate, "SPLIT_TILES": False, "SPLIT_HEADS": k.shape[1] < K,
            "WHOLE_DQ_STAGES": dq_turns(2, wide, True), "UNIT_SCALE": False, **warps(2),
        },
    )  # fmt: skip


def _descriptors(given: BackwardInputs, tile: Backward) -> list[TensorDescriptor]:
    """The descriptors of q, dout, k, v, the sums of dq, dk, dv, -lse and -delta."""
    wide, sums = block_dim(given.q.shape[-1]), given.dq
    return [
        *(describe(x, 1, 1, tile.block_q, wide) for x in (given.q, given.dout)),
        *(describe(x, 1, 1, tile.block_k, wide) for x in (given.k, given.v)),
        describe_sums(given.q if sums is None else sums, sums is None or given.accumulate, tile.block_q, wide),
        *(describe(x, 1, 1, tile.block_k, wide * 2 // x.itemsize) for x in (given.dk, given.dv)),
        *(describe(x, tile.block_q, *x.shape[1:]) for x in (given.minus_lse, given.minus_delta)),
    ]
