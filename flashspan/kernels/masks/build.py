"""Block maps from what people have: a bool tensor, a rule, coarse squares, an interval of keys for each query.

Each function checks what it is given; `Blocks` (blocks.py) has methods of the same names.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from flashspan.kernels.masks import bits as packed
from flashspan.kernels.masks.block_map import BlockMap, Lists, block_positions, check_block, classify
from flashspan.kernels.masks.mask import EMPTY, FULL, PARTIAL, check_whole
from flashspan.kernels.torch_private import is_in_torch_dispatch_mode

Rule: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Who sees whom: (b, h, i, j) int32, which broadcast to [rows, columns], to bool."""


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


def from_dense(visible: Tensor, block: tuple[int, int]) -> BlockMap:
    """From bool [B, H, T, S]."""
    num_batch, num_heads, num_queries, num_keys = visible.shape

    def chunk(b: int, h: int, rows: slice, columns: slice) -> Tensor:
        return visible[b, h, rows, columns]

    return scan(num_batch, num_heads, num_queries, num_keys, block, chunk, visible.device)


def from_dense_on_gpu(visible: Tensor, block: tuple[int, int]) -> tuple[Lists, Lists, Tensor, Tensor] | None:
    """The same by kernels: rows, columns, bits and transposed bits (blocks.py). None where kernels cannot do it."""
    if not read_by_kernels(visible):
        return None
    from flashspan.kernels.masks.build_triton import build_dense

    return build_dense(visible, block)


def from_rule(
    rule: Rule,
    num_queries: int,
    num_keys: int,
    num_batch: int,
    num_heads: int,
    block: int | tuple[int, int],
    device: torch.device | str,
) -> BlockMap:
    """From a function of index tensors (b, h, i, j) to bool."""
    num_queries, num_keys = check_whole(num_queries=num_queries, num_keys=num_keys)
    num_batch, num_heads = check_whole(1, num_batch=num_batch, num_heads=num_heads)
    device = torch.device(device)

    def chunk(b: int, h: int, rows: slice, columns: slice) -> Tensor:
        i, j = (torch.arange(x.start, x.stop, dtype=torch.int32, device=device) for x in (rows, columns))
        return ask(rule, i.new_full((1, 1), b), i.new_full((1, 1), h), i[:, None], j[None, :])

    return scan(num_batch, num_heads, num_queries, num_keys, check_block(block), chunk, device)


def from_coarse(coarse: Tensor, num_queries: int, num_keys: int, size: int | tuple[int, int], block: int) -> BlockMap:
    """From bool [n, m], [H, n, m] or [B, H, n, m], one for each square of pairs."""
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

    return BlockMap.examined(num_queries, num_keys, (block_q, block_k), kinds, look)


def from_intervals(start: Tensor, end: Tensor, num_keys: int, block: int | tuple[int, int]) -> BlockMap:
    """From the keys start..end of each query, [T] or [B, T]."""
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

    return BlockMap.examined(num_queries, num_keys, (block_q, block_k), kinds, look)


def ask(rule: Rule, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """What a user's rule says of these pairs, bool [rows, columns]; its mistakes as one ValueError."""
    where = f"a mask's rule is called with int32 tensors (b, h, i, j) that broadcast to [{len(i)}, {j.shape[1]}]"
    if not callable(rule):
        raise ValueError(f"{where}: got {type(rule).__name__}; a tensor is a mask by Blocks.from_dense(tensor)")
    try:
        seen = rule(b, h, i, j)
    except Exception as error:
        message = f"{where}: it raised {type(error).__name__}: {error}; write it with operations of tensors alone"
        raise ValueError(message) from error
    if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
        kind = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
        raise ValueError(f"{where} and returns a bool tensor: got {kind}; compare, or use .bool()")
    if seen.layout != torch.strided:
        raise ValueError(
            f"{where} and returns a tensor that holds its values one by one: got {seen.layout}; use .to_dense()"
        )
    if seen.device != i.device:
        raise ValueError(f"{where} on {i.device}: got an answer on {seen.device}; make what it looks up live there")
    shape = (len(i), j.shape[1])
    vague = seen.dim() == 1 and seen.numel() > 1  # the queries' or the keys'?
    if seen.dim() > 2 or vague or any(a not in (1, b) for a, b in zip(seen.shape, shape, strict=False)):
        raise ValueError(
            f"{where} and returns a tensor that does too: got {tuple(seen.shape)}; leave i [queries, 1] and "
            f"j [1, keys] as they are"
        )
    return seen.expand(shape)


def scan(
    num_batch: int,
    num_heads: int,
    num_queries: int,
    num_keys: int,
    block: tuple[int, int],
    chunk: Callable[[int, int, slice, slice], Tensor],
    device: torch.device,
) -> BlockMap:
    """The map of a mask of which any rectangle can be had, bool; each pair is looked at once."""
    block_q, block_k = block
    num_q, num_k = -(-num_queries // block_q), -(-num_keys // block_k)
    across = max(1, min(num_k, packed.CHUNK // (block_q * block_k)))
    down = max(1, min(num_q, packed.CHUNK // (block_q * block_k * across)))
    kinds = torch.zeros(num_batch, num_heads, num_q, num_k, dtype=torch.uint8, device=device)
    words, places = [], []
    for b in range(num_batch):
        for h in range(num_heads):
            for top in range(0, num_q, down):
                for left in range(0, num_k, across):
                    rows = slice(top * block_q, min((top + down) * block_q, num_queries))
                    columns = slice(left * block_k, min((left + across) * block_k, num_keys))
                    seen = chunk(b, h, rows, columns)
                    bottom, right = min(top + down, num_q), min(left + across, num_k)
                    short = ((right - left) * block_k - seen.shape[1], (bottom - top) * block_q - seen.shape[0])
                    if any(short):
                        seen = torch.nn.functional.pad(seen, (0, short[0], 0, short[1]))
                    if not seen.is_contiguous() or seen.storage_offset() % 8:  # it is read eight pairs at a time
                        seen = seen.clone(memory_format=torch.contiguous_format)
                    seen = seen.view(bottom - top, block_q, right - left, block_k).transpose(1, 2)
                    found, kept = classify(seen)
                    kinds[b, h, top:bottom, left:right] = found
                    at = (found == PARTIAL).nonzero()
                    places.append(((b * num_heads + h) * num_q + top + at[:, 0]) * num_k + left + at[:, 1])
                    words.append(kept)
    return BlockMap.numbered(num_queries, num_keys, block, kinds, words, places)


def read_by_kernels(visible: Tensor) -> bool:
    """Whether kernels (build_triton.py, runs_triton.py) read a bool tensor."""
    traced = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    return visible.is_cuda and bool(visible.numel()) and not traced and importlib.util.find_spec("triton") is not None


def find_runs(visible: Tensor) -> tuple[Tensor, Tensor] | None:
    """Of bool [B, T, S], from which key to before which each row sees, int32 [B, T]; None if some row has a gap."""
    if read_by_kernels(visible):
        from flashspan.kernels.masks import runs_triton

        return runs_triton.find_runs(visible)
    begins = visible[..., 1:] > visible[..., :-1]  # a run, after the first key
    if bool((_count(begins) + _count(visible[..., :1]) > 1).any()):
        return None
    length = _count(visible)
    start = visible.view(torch.uint8).argmax(-1).int() if visible.shape[-1] else length
    return start, start + length


def _count(seen: Tensor) -> Tensor:
    """How many are True along the last axis, int32: in bytes as far as they reach, many times as fast on a CPU."""
    parts = [part.sum(-1, dtype=torch.uint8) for part in seen.view(torch.uint8).split(255, -1)]
    return torch.stack(parts).sum(0, dtype=torch.int32)


def interval_kinds(start: Tensor, end: Tensor, num_keys: int, block_q: int, block_k: int) -> Tensor:
    """What intervals [B, T] of keys tell of tiles at a glance, uint8 [B, query blocks, key blocks].

    EMPTY and FULL are certain; PARTIAL is what lies between the least start and the greatest end of a block's rows.
    """
    empty, short = start >= end, -start.shape[1] % block_q

    def blocks(bound: Tensor, past: int) -> Tensor:
        return torch.nn.functional.pad(bound, (0, short), value=past).unflatten(1, (-1, block_q))

    left = torch.arange(0, num_keys, block_k, device=start.device)
    first = blocks(start.masked_fill(empty, num_keys), num_keys).amin(-1)[..., None]
    last = blocks(end.masked_fill(empty, 0), 0).amax(-1)[..., None]
    latest = blocks(start.masked_fill(empty, num_keys), 0).amax(-1)[..., None]
    soonest = blocks(end.masked_fill(empty, 0), num_keys).amin(-1)[..., None]
    full = (latest <= left) & (soonest >= (left + block_k).clamp(max=num_keys))
    seen = (first < left + block_k) & (last > left)
    return torch.where(full, FULL, torch.where(seen, PARTIAL, EMPTY)).to(torch.uint8)
