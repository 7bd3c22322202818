"""From what a mask says of pairs to lists of its tiles: kinds, bits and lines. `Blocks` (blocks.py) is made of these.

A map is a grid, int32 [B or 1, H or 1, query blocks, key blocks], in which a tile is HIDDEN, VISIBLE or the number of
its bits, and those bits (bits.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from flashspan.kernels import bits as packed
from flashspan.kernels.masks import EMPTY, FULL, PARTIAL

SIZES = (64, 128)
"""Edges a tile may have: what every kernel's own tiles divide, or are divided by."""

ALL_OF_EIGHT = 0x0101010101010101
"""Eight bools that are True, read as one number: the largest that eight bools can be."""

LONG = 2
"""A line this many times as long as the mean is visited before all others, of all heads."""

Rule: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Who sees whom: (b, h, i, j) int32, which broadcast to [rows, columns], to bool."""

Look: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""The contents of some tiles: numbers (b, h, i, j) of maps and blocks, each [n], to bool [n, block_q, block_k]."""

Map: TypeAlias = tuple[Tensor, Tensor]
"""A grid and its bits."""

HIDDEN, VISIBLE = -2, -1
"""An empty and a full tile in a grid, in which a partial one is the number of its bits."""


@dataclass(frozen=True)
class Lists:
    """The tiles to visit, line by line: a line is a block of queries (or, transposed, of keys) of one map.

    num_long  how many of each map's longest lines are best begun before any of the others.
    spans   int32 [B or 1, H or 1, lines, 3]: begin, middle, end. Full tiles are begin..middle of `index`, partial ones
            middle..end, each ascending.
    index   int32 [visited]: the block on the other axis.
    tile    int32 [visited]: the number of a partial tile's bits.
    order   int32 [B or 1, H or 1, lines]: lines, longest first.
    """

    num_long: int
    spans: Tensor
    index: Tensor
    tile: Tensor
    order: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.spans, self.index, self.tile, self.order]

    def visits(self) -> Tensor:
        """How many tiles each line visits, int32 [B or 1, H or 1, lines]."""
        return self.spans[..., 2] - self.spans[..., 0]


def check_block(block: int | tuple[int, int]) -> tuple[int, int]:
    """Tile edges (queries, keys); refuse those no kernel takes."""
    pair = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
    if len(pair) != 2 or any(not isinstance(edge, Integral) or edge not in SIZES for edge in pair):
        raise ValueError(
            f"a tile's edges are {' or '.join(map(str, SIZES))}, which is what the kernels take: got block={block!r}; "
            f"a mask in squares of another size is made by Blocks.from_coarse(mask, ..., size=...)"
        )
    return int(pair[0]), int(pair[1])


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
) -> Map:
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
    return _number(block, kinds, words, places)


def examine(num_queries: int, num_keys: int, block: tuple[int, int], kinds: Tensor, look: Look) -> Map:
    """The map of what is known of its tiles: those called PARTIAL, and full ones past an end, are looked at."""
    block_q, block_k = block
    kinds = kinds.clone()
    for dim, ragged in ((2, num_queries % block_q), (3, num_keys % block_k)):
        if ragged:  # a tile that reaches past the end has bits, so that kernels need not ask
            last = kinds.select(dim, -1)
            last[last == FULL] = PARTIAL
    num_k = kinds.shape[3]
    words, places = [], []
    for where in (kinds == PARTIAL).nonzero().split(max(1, packed.CHUNK // 8 // (block_q * block_k))):
        found, kept = classify(look(*where.T)[:, None])
        kinds[tuple(where.T)] = found[:, 0]
        b, h, i, j = where[found[:, 0] == PARTIAL].T
        places.append(((b * kinds.shape[1] + h) * kinds.shape[2] + i) * num_k + j)
        words.append(kept)
    return _number(block, kinds, words, places)


def read_by_kernels(visible: Tensor) -> bool:
    """Whether the kernels of portable/mapping.py and runs.py serve a bool tensor."""
    traced = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    return visible.is_cuda and bool(visible.numel()) and not traced and importlib.util.find_spec("triton") is not None


def find_runs(visible: Tensor) -> tuple[Tensor, Tensor] | None:
    """Of bool [B, T, S], from which key to before which each row sees, int32 [B, T]; None if some row has a gap."""
    if read_by_kernels(visible):
        from flashspan.kernels.portable import runs

        return runs.find_runs(visible)
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


def classify(seen: Tensor) -> tuple[Tensor, Tensor]:
    """The kind of each tile of bool [n, m, block_q, block_k], uint8 [n, m], and the words of the partial ones."""
    low, high = seen.view(torch.int64).aminmax(dim=-1)  # eight pairs at a time
    low, high = low.amin(-1), high.amax(-1)
    kinds = torch.where(low == ALL_OF_EIGHT, FULL, torch.where(high == 0, EMPTY, PARTIAL)).to(torch.uint8)
    return kinds, packed.pack(seen[kinds == PARTIAL])


def _number(block: tuple[int, int], kinds: Tensor, words: list[Tensor], places: list[Tensor]) -> Map:
    """The map of tiles of these kinds and the words of the partial ones, whose flat places in `kinds` are `places`."""
    none = torch.zeros((0, block[0], block[1] // packed.WORD), dtype=torch.int32, device=kinds.device)
    bits, number = packed.share(torch.cat([none, *words]))
    grid = torch.where(kinds == FULL, VISIBLE, HIDDEN).int()
    if places:
        grid.view(-1)[torch.cat(places)] = number
    return grid, bits


def list_lines(grid: Tensor) -> Lists:
    """The lists of a grid's lines."""
    full, partial = grid == VISIBLE, grid >= 0
    num_full, num_partial = full.sum(-1), partial.sum(-1)
    end = (num_full + num_partial).flatten().cumsum(0).view_as(num_full)
    spans = torch.stack([end - num_full - num_partial, end - num_partial, end], -1).int()
    b, h, line, index = (full | partial).nonzero().T
    tile = grid[b, h, line, index]
    # Within a line the full tiles come first; the sort is stable, so each kind stays ascending.
    key = ((b * grid.shape[1] + h) * grid.shape[2] + line) * 2 + (tile >= 0)
    position = key.argsort(stable=True)
    visits = num_full + num_partial
    order = visits.argsort(dim=-1, descending=True, stable=True).int()
    mean = visits.double().mean() if visits.numel() else visits.sum()
    num_long = int((visits > LONG * mean).sum(-1).max()) if visits.numel() else 0
    return Lists(num_long, spans, index[position].int(), tile[position].clamp(min=0).int(), order)


def block_positions(length: int, block: int, device: torch.device) -> Tensor:
    """The positions of each block, int64 [blocks, block]; the last may reach past the end."""
    return torch.arange(-(-length // block) * block, device=device).view(-1, block)


def touched(grid: Tensor, positions: Tensor, block: int, dim: int) -> Tensor:
    """For each block of a slice's positions, whether any source block it takes from is True: that axis anew."""
    num = -(-len(positions) // block)
    owner = torch.arange(len(positions), device=grid.device) // block
    touches = torch.zeros(num, grid.shape[dim], dtype=torch.float32, device=grid.device)
    touches[owner, positions // block] = 1.0
    return (torch.movedim(grid.float(), dim, -1) @ touches.mT > 0).movedim(-1, dim)
