"""`Blocks`: any mask, as lists of the tiles to visit.

The [T, S] matrix is cut into tiles of block_q x block_k. A tile is empty (never visited), full (visited without a mask)
or partial (its bits are stored; identical tiles share them). A map lists the blocks of keys to visit for each block of
queries, which forward loops over, and the blocks of queries for each block of keys, for backward. Maps may differ along
the batch and the heads; where they do not, there is one. Nothing of size T x S is stored. While a map is built, at most
2**25 pairs are processed at a time, except for a tensor on a GPU, whose bits are computed at once.

    Blocks.from_rule(lambda b, h, i, j: (i - j) % 7 == 0, num_queries=65536, num_keys=65536, device="cuda")
    Blocks.from_dense(visible)      Blocks.from_coarse(tiles, T, S)      Blocks.of(documents(lengths), T, S)

Masks compose with `&`, `|` and `~`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashspan.kernels.masks import bits as packed
from flashspan.kernels.masks import build
from flashspan.kernels.masks.band import EVERYTHING, NOTHING, Band
from flashspan.kernels.masks.block_map import HIDDEN, VISIBLE, BlockMap, Lists, check_block, list_lines
from flashspan.kernels.masks.build import Rule
from flashspan.kernels.masks.intervals import Positions, place
from flashspan.kernels.masks.mask import EMPTY, FULL, Mask, as_blocks, check_whole, refuse_tensor
from flashspan.kernels.masks.rows import Rows


class Blocks(Mask):
    """A block map. `rows` lists the tiles of each block of queries, `columns` those of each block of keys.

    Immutable. bits [tiles, block_q, block_k / 32] are of the partial tiles (bits.py), bits_t of the transposed tiles.
    """

    def __init__(
        self, num_queries: int, num_keys: int, block: tuple[int, int], rows: Lists, columns: Lists, bits: Tensor,
        bits_t: Tensor,
    ) -> None:  # fmt: skip
        self.num_queries, self.num_keys, self.block = num_queries, num_keys, block
        self.rows, self.columns, self.bits, self.bits_t = rows, columns, bits, bits_t
        self._derived = {}
        self._digest: bytes | None = None

    # Constructors.

    @staticmethod
    def from_dense(visible: Tensor, *, block: int | tuple[int, int] = 128) -> Blocks:
        """From bool [T, S], [H, T, S] or [B, H, T, S]. Size 1 means one map for the whole batch or for all heads."""
        visible, edges = build.check_dense(visible), check_block(block)
        if build.has_kernels(visible):
            from flashspan.kernels.masks.build_triton import build_dense

            if (lists_and_bits := build_dense(visible, edges)) is not None:
                return Blocks(visible.shape[2], visible.shape[3], edges, *lists_and_bits)
        return Blocks.of_map(build.from_dense(visible, edges))

    @staticmethod
    def from_rule(
        rule: Rule,
        num_queries: int,
        num_keys: int,
        *,
        num_batch: int = 1,
        num_heads: int = 1,
        block: int | tuple[int, int] = 128,
        device: torch.device | str = "cpu",
    ) -> Blocks:
        """From a function of int32 index tensors (b, h, i, j) to bool, called for up to 2**25 pairs at a time.

        num_batch, num_heads: number of maps; 1 if the rule does not depend on b (or h).
        """
        return Blocks.of_map(build.from_rule(rule, (num_batch, num_heads, num_queries, num_keys), block, device))

    @staticmethod
    def from_coarse(
        coarse: Tensor, num_queries: int, num_keys: int, *, size: int | tuple[int, int] = 128, block: int = 128
    ) -> Blocks:
        """From bool [n, m], [H, n, m] or [B, H, n, m]: whether each size x size square of pairs is visible."""
        return Blocks.of_map(build.from_coarse(coarse, num_queries, num_keys, size, block))

    @staticmethod
    def of(
        mask: Mask,
        num_queries: int,
        num_keys: int,
        *,
        block: int | tuple[int, int] = 128,
        device: torch.device | str | None = None,
    ) -> Blocks:
        """Convert a band or rows to blocks. Blocks are returned unchanged, with their own tile size."""
        if isinstance(mask, Blocks):
            mask.check(mask.num_batch, num_queries, num_keys)
            return mask if device is None else mask.to(device)
        num_queries, num_keys = check_whole(num_queries=num_queries, num_keys=num_keys)
        if not isinstance(mask, (Band, Rows)):
            raise ValueError(
                f"Blocks.of takes a mask made by flashspan.masks: got {type(mask).__name__}; "
                f"use Blocks.from_dense for a bool tensor"
            )
        if isinstance(mask, Rows):
            mask.check(mask.start.shape[0] if mask.start.dim() == 2 else 1, num_queries, num_keys)
        start, end = (x if device is None else x.to(device) for x in mask.intervals(num_queries, num_keys))
        return Blocks.of_map(build.from_intervals(start, end, num_keys, block))

    @staticmethod
    def of_map(block_map: BlockMap, bits_t: Tensor | None = None) -> Blocks:
        """From a grid and its bits."""
        grid, bits = block_map.grid, block_map.bits
        rows, columns = list_lines(grid), list_lines(grid.transpose(2, 3))
        bits_t = packed.transpose(bits) if bits_t is None else bits_t
        return Blocks(block_map.num_queries, block_map.num_keys, block_map.block, rows, columns, bits, bits_t)

    # Properties.

    @property
    def num_batch(self) -> int:
        """Number of maps along the batch; 1 if all sequences share one."""
        return self.rows.spans.shape[0]

    @property
    def num_heads(self) -> int:
        """Number of maps along the heads; 1 if all heads share one."""
        return self.rows.spans.shape[1]

    @property
    def device(self) -> torch.device:
        return self.bits.device

    @property
    def num_tiles(self) -> int:
        """Number of tiles in all maps, empty ones included."""
        return self.num_batch * self.num_heads * self.rows.spans.shape[2] * self.columns.spans.shape[2]

    @property
    def sparsity(self) -> float:
        """The share of empty tiles, 0 to 1."""
        return 1.0 - len(self.rows.index) / self.num_tiles if self.num_tiles else 0.0

    @property
    def num_bytes(self) -> int:
        """Memory of the lists and bits."""
        tensors = [*self.rows.tensors, *self.columns.tensors, self.bits, self.bits_t]
        return sum(x.numel() * x.element_size() for x in tensors)

    def grid(self) -> Tensor:
        """The grid (block_map.py) of these lists."""
        num_k = self.columns.spans.shape[2]
        line, full = self.rows.entries()
        grid = self.bits.new_full((self.rows.spans.shape[:3].numel(), num_k), HIDDEN)
        grid[line, self.rows.index.long()] = torch.where(full, VISIBLE, self.rows.tile).int()
        return grid.view(*self.rows.spans.shape[:3], num_k)

    def block_map(self) -> BlockMap:
        """This mask as a grid and bits."""
        return BlockMap(self.num_queries, self.num_keys, self.block, self.grid(), self.bits)

    def kinds(self) -> Tensor:
        """EMPTY, FULL or PARTIAL for each tile, uint8 [B or 1, H or 1, query blocks, key blocks]."""
        return self.block_map().kinds()

    def dense(self) -> Tensor:
        """The mask as bool [T, S], or [B or 1, H or 1, T, S] if there are several maps. For small masks."""
        visible = self.block_map().dense()
        return visible[0, 0] if visible.shape[:2] == (1, 1) else visible

    def count(self) -> int:
        """Number of visible pairs in all maps."""
        block_q, block_k = self.block
        _, full = self.rows.entries()
        per_tile = torch.cat([packed.unpack(part).sum((1, 2)) for part in self.bits.split(1024)])
        return int(full.sum()) * block_q * block_k + int(per_tile[self.rows.tile[~full].long()].sum())

    def is_empty(self) -> bool:
        """Whether no query sees any key."""
        return not len(self.rows.index)

    def check(self, num_batch: int, num_queries: int, num_keys: int, num_heads: int | None = None) -> None:
        fits = (self.num_queries, self.num_keys) == (num_queries, num_keys) and self.num_batch in (1, num_batch)
        if not fits or (num_heads is not None and self.num_heads not in (1, num_heads)):
            maps = f" for a batch of {self.num_batch}" if self.num_batch > 1 else ""
            maps += f" for {self.num_heads} heads" if self.num_heads > 1 else ""
            heads = "" if num_heads is None else f", {num_heads} heads"
            raise ValueError(
                f"this mask covers {self.num_queries} queries and {self.num_keys} keys{maps}: got q with {num_queries} "
                f"and k with {num_keys} of a batch of {num_batch}{heads}; make the mask for these sizes, or slice it"
            )

    def draw(self, width: int = 64) -> str:
        """A text picture of the first map, a character for each tile, or for several tiles of a large mask.

        '#' all pairs visible, '+' some, '.' none.
        """
        (width,) = check_whole(1, width=width)
        if not self.num_batch * self.num_heads:
            return ""
        grid, kinds = self.grid()[0, 0], self.kinds()[0, 0]
        # A tile that reaches past the end has bits even if all of its pairs are visible.
        whole = Blocks.of(EVERYTHING, self.num_queries, self.num_keys, block=self.block, device=self.device)
        ends = whole.grid()[0, 0]
        i, j = ((grid >= 0) & (ends >= 0)).nonzero().T
        same = (self.bits[grid[i, j]] == whole.bits[ends[i, j]]).flatten(1).all(1)
        kinds[i[same], j[same]] = FULL
        kinds = kinds.cpu()
        step = max(1, -(-max(kinds.shape) // width))
        lines = []
        for top in range(0, kinds.shape[0], step):
            parts = [kinds[top : top + step, left : left + step] for left in range(0, kinds.shape[1], step)]
            lines.append("".join("#" if (p == FULL).all() else "." if (p == EMPTY).all() else "+" for p in parts))
        return "\n".join(lines)

    # Other masks from this one.

    def slice(self, q: Positions, k: Positions) -> Mask:
        return self.part(q, k).simplify()

    def part(self, q: Positions, k: Positions) -> Blocks:
        """`slice` without `simplify`: the result has the same number of maps."""
        rows, keys = (place(x, num).to(self.device) for x, num in ((q, self.num_queries), (k, self.num_keys)))
        return Blocks.of_map(self.block_map().slice(rows, keys))

    def simplify(self) -> Mask:
        """NOTHING or EVERYTHING if this mask equals it, else this mask."""
        if self.is_empty():
            return NOTHING
        ragged = any(n % b for n, b in zip((self.num_queries, self.num_keys), self.block, strict=True))
        if len(self.rows.index) == self.num_tiles and (ragged or not len(self.bits)):
            total = self.num_batch * self.num_heads * self.num_queries * self.num_keys
            if self.count() == total:
                return EVERYTHING
        return self

    def heads(self, chosen: range) -> Blocks:
        """The maps of some heads; this mask if all heads share one map."""
        if self.num_heads == 1 or chosen == range(self.num_heads):
            return self
        if not isinstance(chosen, range) or chosen.step != 1 or not 0 <= chosen.start <= chosen.stop <= self.num_heads:
            raise ValueError(f"heads are chosen by a range with step 1 within 0 to {self.num_heads}: got {chosen}")
        return self.derived(chosen, lambda: self._of_grid(self.grid()[:, chosen.start : chosen.stop]))

    def map(self, b: int, h: int) -> Blocks:
        """The map of one sequence and one head."""
        if self.num_batch == self.num_heads == 1:
            return self
        b, h = b % self.num_batch, h % self.num_heads
        return self.derived((b, h), lambda: self._of_grid(self.grid()[b : b + 1, h : h + 1]))

    def __and__(self, other: Mask) -> Blocks:
        return self._join(other, torch.logical_and, EMPTY, FULL)

    def __or__(self, other: Mask) -> Blocks:
        return self._join(other, torch.logical_or, FULL, EMPTY)

    def __invert__(self) -> Blocks:
        return Blocks.of_map(self.block_map().invert())

    def _join(self, other: Mask, join: Callable[[Tensor, Tensor], Tensor], decides: int, yields: int) -> Blocks:
        """`_combine`, cached if the other mask is a band, because `attention(mask=blocks, causal=True)` repeats it in
        each layer. Rows are not cached: they change with every batch."""
        refuse_tensor(other)
        if not isinstance(other, (Band, Rows, Blocks)):
            return NotImplemented
        if not isinstance(other, Band):
            return self._combine(other, join, decides, yields)
        return self.derived((decides, other), lambda: self._combine(other, join, decides, yields))

    def _combine(self, other: Mask, join: Callable[[Tensor, Tensor], Tensor], decides: int, yields: int) -> Blocks:
        """Combine both masks with BlockMap.join."""
        if isinstance(other, (Rows, Blocks)):
            sizes = (other.start.shape[-1] if isinstance(other, Rows) else other.num_queries, other.num_keys)
            same = not isinstance(other, Blocks) or other.block == self.block
            if sizes != (self.num_queries, self.num_keys) or not same:
                tile = f" in tiles of {other.block}" if isinstance(other, Blocks) else ""
                remedy = "make both for the same lengths"
                if not same:  # most patterns have no argument block=
                    remedy += " and with block=128, as patterns are, or rebuild one by Blocks.from_dense(mask.dense())"
                raise ValueError(
                    f"masks with the same lengths and the same tiles can be combined: got {self.num_queries} "
                    f"queries x {self.num_keys} keys in tiles of {self.block} and {sizes[0]} x {sizes[1]}{tile}; "
                    f"{remedy}"
                )
        second = Blocks.of(other, self.num_queries, self.num_keys, block=self.block, device=self.device)
        pairs = ((self.num_batch, second.num_batch), (self.num_heads, second.num_heads))
        if any(a != b and 1 not in (a, b) for a, b in pairs):
            raise ValueError(
                f"masks can be combined if their numbers of maps broadcast: got maps for [batch, heads] "
                f"[{self.num_batch}, {self.num_heads}] and [{second.num_batch}, {second.num_heads}]; give both "
                "the same number of maps, or one of them a single map"
            )
        return Blocks.of_map(self.block_map().join(second.block_map(), join, decides, yields))

    def _of_grid(self, grid: Tensor) -> Blocks:
        """Blocks from a part of this mask's grid, with the bits that it uses."""
        used = torch.unique(grid[grid >= 0])
        if len(used):
            renumbered = self.bits.new_zeros(len(self.bits))
            renumbered[used.long()] = torch.arange(len(used), dtype=torch.int32, device=self.device)
            grid = torch.where(grid >= 0, renumbered[grid.clamp(min=0).long()], grid)
        tiles = BlockMap(self.num_queries, self.num_keys, self.block, grid, self.bits[used])
        return Blocks.of_map(tiles, self.bits_t[used])

    def _one_tensor(self) -> Tensor:
        return self.bits

    def pack(self) -> tuple[str, list[int], list[Tensor]]:
        numbers = [self.num_queries, self.num_keys, *self.block, self.rows.num_long, self.columns.num_long]
        return "blocks", numbers, [*self.rows.tensors, *self.columns.tensors, self.bits, self.bits_t]

    @classmethod
    def unpack(cls, numbers: Sequence[int], tensors: Sequence[Tensor]) -> Blocks:
        num_queries, num_keys, block_q, block_k, long_rows, long_columns = numbers
        rows, columns = Lists(long_rows, *tensors[:4]), Lists(long_columns, *tensors[4:8])
        return Blocks(num_queries, num_keys, (block_q, block_k), rows, columns, *tensors[8:])

    def digest(self) -> bytes:
        """A hash of the contents, the same in every process."""
        if self._digest is None:
            found = hashlib.blake2b(repr((tuple(self.rows.spans.shape), self.block)).encode(), digest_size=16)
            for x in (self.rows.spans, self.rows.index, self.rows.tile, self.bits):
                found.update(x.cpu().numpy().tobytes())
            self._digest = found.digest()
        return self._digest

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Blocks)
            and (self.num_queries, self.num_keys) == (other.num_queries, other.num_keys)
            and (self is other or self.digest() == other.digest())
        )

    def __hash__(self) -> int:
        return hash((self.num_queries, self.num_keys, self.digest()))

    def __repr__(self) -> str:
        spans = self.rows.spans
        full = int((spans[..., 1] - spans[..., 0]).sum())
        maps = f"{self.num_batch}x{self.num_heads} maps, " if self.num_batch * self.num_heads > 1 else ""
        return (
            f"Blocks({maps}{self.num_queries} queries, {self.num_keys} keys, tiles of {self.block[0]}x{self.block[1]}: "
            f"{full} full, {len(self.rows.index) - full} partial, sparsity {self.sparsity:.1%})"
        )


@as_blocks.register(Rows)
def _(rows: Rows) -> Blocks:
    return Blocks.of(rows, rows.start.shape[-1], rows.num_keys)
