"""The arguments of a kernel that depend on its mask: intervals for bands and rows, lists for block maps.

One kernel serves both. Its constant LINE is 0 for intervals, else the rows of a line. Arguments that it does not need
are None. A program for lists computes a block of a line: the full blocks of the line's list without a mask, then the
partial ones, whose bits are the mask, in narrower tiles. The passes over keys use the transposed lists and bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor

from flashspan.kernels.masks import Blocks, Mask
from flashspan.kernels.masks.block_map import Lists
from flashspan.kernels.portable.arguments import mask_arguments
from flashspan.kernels.portable.tiles import Tile

NO_LISTS = (None,) * 5
INTERVALS: dict[str, Any] = {"LINE": 0, "OTHER": 0}


class Loop(NamedTuple):
    """The arguments by which the programs of a pass loop over the tiles of a mask."""

    size: Tile
    num_blocks: int  # programs for each batch and head
    tables: tuple[Tensor | None, ...]
    numbers: tuple[int | None, ...]
    constants: dict[str, Any]


def key_loop(mask: Mask, q: Tensor, k: Tensor, size: Tile) -> Loop:
    """The loop of forward and of dq: a program for each block of queries loops over keys."""
    T, S = q.shape[2], k.shape[2]
    if isinstance(mask, Blocks):
        mask, size = mask.to(q.device), size.within(mask.block)
        return _list_loop(mask, mask.rows, mask.bits, q, size, size.block_q, mask.block, (2, 3))
    table, start, end, _, _, s_rows, _, lo, hi, _ = mask_arguments(mask, T, S, q)
    tables, numbers = (start, end, *NO_LISTS), (s_rows, lo, hi, *NO_LISTS)
    return Loop(size, triton.cdiv(T, size.block_q), tables, numbers, INTERVALS | {"TABLE": table})


def query_loop(mask: Mask, q: Tensor, k: Tensor, size: Tile) -> Loop:
    """The loop of dk and dv: a program for each block of keys loops over queries."""
    T, S = q.shape[2], k.shape[2]
    if isinstance(mask, Blocks):
        mask, size = mask.to(q.device), size.within(mask.block)
        block = mask.block[::-1]
        return _list_loop(mask, mask.columns, mask.bits_t, q, size, size.block_k, block, (4, 4), CONVEX=True)
    table, *tables, s_rows, s_columns, lo, hi, convex = mask_arguments(mask, T, S, q)
    numbers, constants = (s_rows, s_columns, lo, hi, *NO_LISTS), {"TABLE": table, "CONVEX": convex}
    return Loop(size, triton.cdiv(S, size.block_k), (*tables, *NO_LISTS), numbers, INTERVALS | constants)


def _list_loop(
    mask: Blocks, lists: Lists, bits: Tensor, q: Tensor, size: Tile, width: int, block: tuple[int, int],
    unused: tuple[int, int], **constants: Any,
) -> Loop:  # fmt: skip
    """A loop over lists. A program has `width` rows of a line; unused: the tables and numbers of intervals."""
    tables = (*(None,) * unused[0], *lists.tensors, bits)
    numbers = (*(None,) * unused[1], *maps(mask, lists), q.shape[0])
    num_blocks, edges = lists.spans.shape[2] * block[0] // width, {"LINE": block[0], "OTHER": block[1]}
    return Loop(size, num_blocks, tables, numbers, {**edges, "TABLE": False, **constants})


def maps(mask: Blocks, lists: Lists) -> tuple[int, int, int, int]:
    """Return (stride in maps of the batch, of the heads, number of lines, number of long lines)."""
    batch, head = mask.num_heads if mask.num_batch > 1 else 0, 1 if mask.num_heads > 1 else 0
    return batch, head, lists.spans.shape[2], lists.num_long
