"""Block maps from a bool tensor, from a rule, from coarse squares, or from an interval of keys for each query.

Each function checks its arguments; `Blocks` (blocks.py) has methods of the same names.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from flashspan.kernels.masks import bits as packed
from flashspan.kernels.masks.block_map import BlockMap, block_positions, check_block, classify
from flashspan.kernels.masks.mask import EMPTY, FULL, PARTIAL, check_whole
from flashspan.kernels.torch_private import is_in_torch_dispatch_mode

Rule: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of int32 tensors (b, h, i, j), which broadcast to [rows, columns]. It returns bool: whether i sees j."""

Shape: TypeAlias = tuple[int, ...]
"""The numbers of maps along the batch and along the heads, of queries and of keys."""

Chunk: TypeAlias = Callable[[int, int, slice, slice], Tensor]
"""A function of a rectangle: sequence, head, rows and columns. It returns bool: whether each row sees each column."""


def check_dense(visible: Tensor) -> Tensor:
    """bool [T, S], [H, T, S] or [B, H, T, S] as [B or 1, H or 1, T, S]; ValueError for anything else."""
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        kind, remedy = type(visible).__name__, "use torch.as_tensor(mask)"
        if isinstance(visible, Tensor):
            kind, remedy = str(visible.dtype), "use mask.bool(), or mask.isfinite() if it is an additive one"
        raise ValueError(f"a mask tensor must be bool, True where visible: got {kind}; {remedy}")
    if visible.layout != torch.strided or visible.is_meta:
        remedy = "give one with values, on the CPU" if visible.is_meta else "use mask.to_dense()"
        raise ValueError(
            f"a mask tensor must be dense, on a device that holds data: got {visible.layout} on {visible.device}; "
            f"{remedy}"
        )
    if visible.dim() not in (2, 3, 4):
        raise ValueError(f"a mask tensor must be [T, S], [H, T, S] or [B, H, T, S]: got {tuple(visible.shape)}")
    visible = visible[(None,) * (4 - visible.dim())]
    # Expanded sequences or heads share one map.
    return visible[: 1 if visible.stride(0) == 0 else None, : 1 if visible.stride(1) == 0 else None]


def from_dense(visible: Tensor, block: tuple[int, int]) -> BlockMap:
    """From bool [B, H, T, S]."""
    return scan(visible.shape, block, lambda *where: visible[where], visible.device)


def from_rule(rule: Rule, shape: Shape, block: int | tuple[int, int], device: torch.device | str) -> BlockMap:
    """From a function of index tensors (b, h, i, j) to bool."""
    num_queries, num_keys = check_whole(num_queries=shape[2], num_keys=shape[3])
    num_batch, num_heads = check_whole(1, num_batch=shape[0], num_heads=shape[1])
    device = torch.device(device)

    def chunk(b: int, h: int, rows: slice, columns: slice) -> Tensor:
        i, j = (torch.arange(x.start, x.stop, dtype=torch.int32, device=device) for x in (rows, columns))
        return call_rule(rule, i.new_full((1, 1), b), i.new_full((1, 1), h), i[:, None], j[None, :])

    return scan((num_batch, num_heads, num_queries, num_keys), check_block(block), chunk, device)


def from_coarse(coarse: Tensor, num_queries: int, num_keys: int, size: int | tuple[int, int], block: int) -> BlockMap:
    """From bool [n, m], [H, n, m] or [B, H, n, m]: whether each square of pairs is visible."""
    pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2:
        raise ValueError(f"a square's size is a number, or a pair (queries, keys): got size={size!r}")
    size_q, size_k = (check_whole(1, size=edge)[0] for edge in pair)
    num_queries, num_keys = check_whole(num_queries=num_queries, num_keys=num_keys)
    expected = (-(-num_queries // size_q), -(-num_keys // size_k))
    bad = not isinstance(coarse, Tensor) or coarse.dtype != torch.bool or coarse.dim() not in (2, 3, 4)
    if bad or tuple(coarse.shape[-2:]) != expected:
        got = f"{coarse.dtype} {tuple(coarse.shape)}" if isinstance(coarse, Tensor) else type(coarse).__name__
        raise ValueError(
            f"a coarse mask of {num_queries} queries and {num_keys} keys in squares of {size_q} x {size_k} is bool "
            f"[{expected[0]}, {expected[1]}], or [H, ...] if heads differ, or [B, H, ...]: got {got}"
        )
    coarse = check_dense(coarse)
    block_q, block_k = check_block(block)
    if size_q % block_q or size_k % block_k:  # a tile may overlap several squares

        def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return coarse[b, h, i // size_q, j // size_k]

        return from_rule(rule, (*coarse.shape[:2], num_queries, num_keys), block, coarse.device)
    grid = coarse.repeat_interleave(size_q // block_q, 2).repeat_interleave(size_k // block_k, 3)
    grid = grid[:, :, : -(-num_queries // block_q), : -(-num_keys // block_k)]
    kinds = torch.where(grid, FULL, EMPTY).to(torch.uint8)

    def read(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return grid[b, h, i, j][:, None, None]

    return BlockMap.from_kinds(num_queries, num_keys, (block_q, block_k), kinds, read)


def from_intervals(start: Tensor, end: Tensor, num_keys: int, block: int | tuple[int, int]) -> BlockMap:
    """From the interval start..end of keys of each query, [T] or [B, T]."""
    block_q, block_k = check_block(block)
    start, end = (x if x.dim() == 2 else x[None] for x in (start, end))
    num_queries = start.shape[1]
    kinds = interval_kinds(start, end, num_keys, block_q, block_k)[:, None]
    q_rows, k_rows = (block_positions(n, b, start.device) for n, b in ((num_queries, block_q), (num_keys, block_k)))

    def read(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row, keys = q_rows[i].clamp(max=num_queries - 1), k_rows[j][:, None, :]
        low, high = (bound[b[:, None], row][..., None] for bound in (start, end))
        return (low <= keys) & (keys < high)

    return BlockMap.from_kinds(num_queries, num_keys, (block_q, block_k), kinds, read)


def call_rule(rule: Rule, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A user's rule for these pairs, bool [rows, columns]; ValueError if it raises or returns anything else."""
    where = f"a mask's rule is called with int32 tensors (b, h, i, j) that broadcast to [{len(i)}, {j.shape[1]}]"
    if not callable(rule):
        raise ValueError(f"{where}: got {type(rule).__name__}; for a tensor use Blocks.from_dense(tensor)")
    try:
        seen = rule(b, h, i, j)
    except Exception as error:
        remedy = "give it these four arguments" if "positional argument" in str(error) else "use tensor operations only"
        message = f"{where}: it raised {type(error).__name__}: {error}; {remedy}"
        raise ValueError(message) from error
    if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
        kind = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
        raise ValueError(f"{where} and returns a bool tensor: got {kind}; compare, or use .bool()")
    if seen.layout != torch.strided:
        raise ValueError(f"{where} and returns a dense tensor: got {seen.layout}; use .to_dense()")
    if seen.device != i.device:
        raise ValueError(
            f"{where} on {i.device}: got a result on {seen.device}; move the tensors that the rule uses to {i.device}"
        )
    shape = (len(i), j.shape[1])
    ambiguous = seen.dim() == 1 and seen.numel() > 1  # queries or keys
    if seen.dim() > 2 or ambiguous or any(a not in (1, b) for a, b in zip(seen.shape, shape, strict=False)):
        raise ValueError(
            f"{where} and returns a tensor that broadcasts too: got {tuple(seen.shape)}; do not reshape i [queries, 1] "
            f"and j [1, keys]"
        )
    return seen.expand(shape)


def scan(shape: Shape, block: tuple[int, int], chunk: Chunk, device: torch.device) -> BlockMap:
    """The map of a mask whose bools `chunk` computes, a rectangle at a time, each pair once."""
    (num_batch, num_heads, num_queries, num_keys), (block_q, block_k) = shape, block
    num_q, num_k = -(-num_queries // block_q), -(-num_keys // block_k)
    across = max(1, min(num_k, packed.CHUNK // (block_q * block_k)))
    down = max(1, min(num_q, packed.CHUNK // (block_q * block_k * across)))
    kinds = torch.zeros(num_batch, num_heads, num_q, num_k, dtype=torch.uint8, device=device)
    words, places = [], []
    firsts = (range(num_batch), range(num_heads), range(0, num_q, down), range(0, num_k, across))
    for b, h, top, left in itertools.product(*firsts):
        bottom, right = min(top + down, num_q), min(left + across, num_k)
        rows = slice(top * block_q, min(bottom * block_q, num_queries))
        columns = slice(left * block_k, min(right * block_k, num_keys))
        seen = chunk(b, h, rows, columns)
        short = ((right - left) * block_k - seen.shape[1], (bottom - top) * block_q - seen.shape[0])
        if any(short):
            seen = torch.nn.functional.pad(seen, (0, short[0], 0, short[1]))
        if not seen.is_contiguous() or seen.storage_offset() % 8:  # classify reads eight pairs at a time
            seen = seen.clone(memory_format=torch.contiguous_format)
        seen = seen.view(bottom - top, block_q, right - left, block_k).transpose(1, 2)
        found, partial_words = classify(seen)
        kinds[b, h, top:bottom, left:right] = found
        at = (found == PARTIAL).nonzero()
        places.append(((b * num_heads + h) * num_q + top + at[:, 0]) * num_k + left + at[:, 1])
        words.append(partial_words)
    return BlockMap.from_words(num_queries, num_keys, block, kinds, words, places)


def has_kernels(visible: Tensor) -> bool:
    """Whether kernels (build_triton.py, masks/runs_triton.py) can read a bool tensor."""
    traced = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    return visible.is_cuda and bool(visible.numel()) and not traced and importlib.util.find_spec("triton") is not None


def interval_kinds(start: Tensor, end: Tensor, num_keys: int, block_q: int, block_k: int) -> Tensor:
    """The kinds of tiles from intervals [B, T] of keys, without reading pairs: uint8 [B, query blocks, key blocks].

    EMPTY and FULL are exact. PARTIAL tiles lie between the least start and the greatest end of a block's rows, and may
    be empty.
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
