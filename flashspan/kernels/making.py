"""Block maps from what people have: a bool tensor, a rule, coarse squares, an interval of keys for each query.

Each checks what it is given and makes what `Blocks` (blocks.py) is made of; there they go by the same names.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashspan.kernels.masks import EMPTY, FULL, check_whole
from flashspan.kernels.tiling import (
    Lists,
    Look,
    Rule,
    ask,
    block_positions,
    check_block,
    examine,
    interval_kinds,
    read_by_kernels,
    scan,
)


class Made(NamedTuple):
    """Lengths, the edges of a tile, and the map (tiling.py)."""

    num_queries: int
    num_keys: int
    block: tuple[int, int]
    grid: Tensor
    bits: Tensor


def check_dense(visible: Tensor) -> Tensor:
    """bool [T, S], [H, T, S] or [B, H, T, S] as the last of these, B and H 1 where there is one map for all."""
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        kind, remedy = type(visible).__name__, "use torch.as_tensor(mask)"
        if isinstance(visible, Tensor):
            kind, remedy = str(visible.dtype), "use mask.bool(), or mask.isfinite() if it is an additive one"
        raise ValueError(f"a mask tensor must be bool, True where visible: got {kind}; {remedy}")
    if visible.layout != torch.strided or visible.is_meta:
        raise ValueError(
            f"a mask tensor must hold its values one by one: got {visible.layout} on {visible.device}; "
            f"use mask.to_dense() on a device that holds data"
        )
    if visible.dim() not in (2, 3, 4):
        raise ValueError(f"a mask tensor must be [T, S], [H, T, S] or [B, H, T, S]: got {tuple(visible.shape)}")
    visible = visible[(None,) * (4 - visible.dim())]
    # What was broadcast with expand is one map.
    return visible[: 1 if visible.stride(0) == 0 else None, : 1 if visible.stride(1) == 0 else None]


def from_dense(visible: Tensor, block: tuple[int, int]) -> Made:
    """Of bool [B, H, T, S]."""
    num_batch, num_heads, num_queries, num_keys = visible.shape

    def chunk(b: int, h: int, rows: slice, columns: slice) -> Tensor:
        return visible[b, h, rows, columns]

    made = scan(num_batch, num_heads, num_queries, num_keys, block, chunk, visible.device)
    return Made(num_queries, num_keys, block, *made)


def from_dense_on_gpu(visible: Tensor, block: tuple[int, int]) -> tuple[Lists, Lists, Tensor, Tensor] | None:
    """Of the same, by kernels: rows, columns, bits and transposed bits. None where they do not serve."""
    if not read_by_kernels(visible):
        return None
    from flashspan.kernels.portable.mapping import map_dense

    return map_dense(visible, block)


def from_rule(
    rule: Rule,
    num_queries: int,
    num_keys: int,
    num_batch: int,
    num_heads: int,
    block: int | tuple[int, int],
    device: torch.device | str,
) -> Made:
    """Of a function of index tensors (b, h, i, j) to bool."""
    num_queries, num_keys = check_whole(num_queries=num_queries, num_keys=num_keys)
    num_batch, num_heads = check_whole(1, num_batch=num_batch, num_heads=num_heads)
    device = torch.device(device)

    def chunk(b: int, h: int, rows: slice, columns: slice) -> Tensor:
        i, j = (torch.arange(x.start, x.stop, dtype=torch.int32, device=device) for x in (rows, columns))
        return ask(rule, i.new_full((1, 1), b), i.new_full((1, 1), h), i[:, None], j[None, :])

    edges = check_block(block)
    made = scan(num_batch, num_heads, num_queries, num_keys, edges, chunk, device)
    return Made(num_queries, num_keys, edges, *made)


def from_coarse(coarse: Tensor, num_queries: int, num_keys: int, size: int | tuple[int, int], block: int) -> Made:
    """Of bool [n, m], [H, n, m] or [B, H, n, m], one for each square of pairs."""
    pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2:
        raise ValueError(f"a square's size is a number, or one of queries and one of keys: got size={size!r}")
    size_q, size_k = (check_whole(1, size=edge)[0] for edge in pair)
    num_queries, num_keys = check_whole(num_queries=num_queries, num_keys=num_keys)
    expected = (-(-num_queries // size_q), -(-num_keys // size_k))
    bad = not isinstance(coarse, Tensor) or coarse.dtype != torch.bool or coarse.dim() not in (2, 3, 4)
    if bad or tuple(coarse.shape[-2:]) != expected:
        got = f"{coarse.dtype} {tuple(coarse.shape)}" if isinstance(coarse, Tensor) else type(coarse).__name__
        raise ValueError(
            f"a coarse mask of {num_queries} queries and {num_keys} keys in squares of {size_q} x {size_k} is bool "
            f"[{expected[0]}, {expected[1]}], or that with heads, or batch and heads, before it: got {got}"
        )
    coarse = check_dense(coarse)
    block_q, block_k = check_block(block)
    if size_q % block_q or size_k % block_k:  # a tile may lie in several squares
        return from_rule(
            lambda b, h, i, j: coarse[b, h, i // size_q, j // size_k],
            num_queries,
            num_keys,
            coarse.shape[0],
            coarse.shape[1],
            block,
            coarse.device,
        )
    grid = coarse.repeat_interleave(size_q // block_q, 2).repeat_interleave(size_k // block_k, 3)
    grid = grid[:, :, : -(-num_queries // block_q), : -(-num_keys // block_k)]
    kinds = torch.where(grid, FULL, EMPTY).to(torch.uint8)
    q_rows, k_rows = (block_positions(n, b, coarse.device) for n, b in ((num_queries, block_q), (num_keys, block_k)))

    def look(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        inside = (q_rows[i] < num_queries)[:, :, None] & (k_rows[j] < num_keys)[:, None, :]
        return inside & grid[b, h, i, j][:, None, None]

    return examined(num_queries, num_keys, (block_q, block_k), kinds, look)


def from_intervals(start: Tensor, end: Tensor, num_keys: int, block: int | tuple[int, int]) -> Made:
    """Of the keys start..end of each query, [T] or [B, T]."""
    block_q, block_k = check_block(block)
    start, end = (x if x.dim() == 2 else x[None] for x in (start, end))
    num_queries = start.shape[1]
    kinds = interval_kinds(start, end, num_keys, block_q, block_k)[:, None]
    q_rows, k_rows = (block_positions(n, b, start.device) for n, b in ((num_queries, block_q), (num_keys, block_k)))

    def look(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = q_rows[i]
        exists, row = row < num_queries, row.clamp(max=num_queries - 1)
        low = torch.where(exists, start[b[:, None], row], num_keys)
        high = torch.where(exists, end[b[:, None], row], 0)
        keys = k_rows[j][:, None, :]
        return (low[..., None] <= keys) & (keys < high[..., None])

    return examined(num_queries, num_keys, (block_q, block_k), kinds, look)


def examined(num_queries: int, num_keys: int, block: tuple[int, int], kinds: Tensor, look: Look) -> Made:
    """Of what is known of the tiles, and a way to look at those of which too little is."""
    return Made(num_queries, num_keys, block, *examine(num_queries, num_keys, block, kinds, look))
