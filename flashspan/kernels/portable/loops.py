"""The arguments of a kernel that depend on its mask: intervals for bands and rows, lists for block maps."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor

from flashspan.kernels.masks import Blocks, Mask
from flashspan.kernels.masks.block_map import Lists
from flashspan.kernels.portable.arguments import mask_arguments
from flashspan.kernels.portable.sparse import maps
from flashspan.kernels.portable.tiles import Tile


class Loop(NamedTuple):
    """The arguments by which the programs of a pass loop over the tiles of a mask."""

    size: Tile
    num_blocks: int  # programs for each batch and head
    tables: tuple[Tensor, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]


def key_loop(mask: Mask, q: Tensor, k: Tensor, size: Tile) -> Loop:
    """The loop of forward and of dq: a program for each block of queries loops over keys."""
    T, S = q.shape[2], k.shape[2]
    if isinstance(mask, Blocks):
        mask, size = mask.to(q.device), size.within(mask.block)
        return _list_loop(mask, mask.rows, mask.bits, q, size, size.block_q, mask.block)
    table, start, end, _, _, s_rows, _, lo, hi, _ = mask_arguments(mask, T, S, q)
    return Loop(size, triton.cdiv(T, size.block_q), (start, end), (s_rows, lo, hi), {"TABLE": table})


def query_loop(mask: Mask, q: Tensor, k: Tensor, size: Tile) -> Loop:
    """The loop of dk and dv: a program for each block of keys loops over queries."""
    T, S = q.shape[2], k.shape[2]
    if isinstance(mask, Blocks):
        mask, size = mask.to(q.device), size.within(mask.block)
        return _list_loop(mask, mask.columns, mask.bits_t, q, size, size.block_k, mask.block[::-1])
    table, *tables, s_rows, s_columns, lo, hi, convex = mask_arguments(mask, T, S, q)
    constants = {"TABLE": table, "CONVEX": convex}
    return Loop(size, triton.cdiv(S, size.block_k), tuple(tables), (s_rows, s_columns, lo, hi), constants)


def _list_loop(
    mask: Blocks, lists: Lists, bits: Tensor, q: Tensor, size: Tile, width: int, block: tuple[int, int]
) -> Loop:
    num_blocks = lists.spans.shape[2] * block[0] // width
    constants = {"LINE": block[0], "OTHER": block[1]}
    return Loop(size, num_blocks, (*lists.tensors, bits), (*maps(mask, lists), q.shape[0]), constants)
