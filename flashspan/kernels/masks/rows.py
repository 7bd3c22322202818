"""`Rows`: query i sees key j when start[i] <= j < end[i].

Packed documents, prefixes and padded batches are rows, and so are slices of bands and rows under any layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from flashspan.kernels.masks.band import NOTHING, Band
from flashspan.kernels.masks.intervals import Positions, canonical, clean, extremes, place, reach_of, transpose
from flashspan.kernels.masks.mask import Mask, as_blocks, as_rows, check_whole, refuse_tensor


class Rows(Mask):
    """Query i sees key j when start[i] <= j < end[i].

    start, end: [T], or [B, T] if each sequence of the batch has its own; `num_keys` is S. first and last are the
    transpose: only queries first[j] <= i < last[j] may see key j; with `convex`, all of them do. `reach` is the mean
    number of visible keys, rounded down to a power of 2, or 0 if unknown. Kernels are chosen by it. It is rounded so
    that masks with similar documents use the same kernels. Immutable.
    """

    def __init__(
        self, start: Tensor, end: Tensor, num_keys: int, *, convex: bool | None = None, reach: int | None = None
    ) -> None:
        """Pass `convex` (and `reach`) only for clipped, canonical intervals. Otherwise they are computed here, `reach`
        only if that does not wait for a device."""
        if convex is None:
            (num_keys,) = check_whole(num_keys=num_keys)
            start, end = clean(start, end, num_keys)
            convex = bool((start.diff() >= 0).all() and (end.diff() >= 0).all())
        self.start, self.end, self.num_keys, self.convex = start, end, num_keys, convex
        self.reach = reach_of(start, end) if reach is None else reach
        self.first, self.last = transpose(start, end, num_keys)
        self._derived = {}

    def intervals(self, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
        return self.start, self.end

    def slice(self, q: Positions, k: Positions) -> Mask:
        sizes = (self.start.shape[-1], self.num_keys)
        rows, keys = (place(x, size).to(self.start.device) for x, size in zip((q, k), sizes, strict=True))
        start = torch.searchsorted(keys, self.start[..., rows].long())
        end = torch.searchsorted(keys, self.end[..., rows].long())
        return Rows(start.int(), end.int(), len(keys)).simplify()

    def simplify(self) -> Mask:
        """The equal band, if there is one, because a band needs no tables; else these rows."""
        if self.start.dim() > 1:
            return self
        num = len(self.start)
        if bool((self.start >= self.end).all()):
            return NOTHING
        i = torch.arange(num, device=self.start.device)
        # Bounds at 0 or num_keys may be clipped, so only the others determine the band.
        lo = extremes(self.start - i, self.start > 0)
        hi = extremes(self.end - 1 - i, self.end < self.num_keys)
        if len(lo) > 1 or len(hi) > 1:
            return self
        band = Band(*lo or (None,), *hi or (None,)).simplify(num, self.num_keys)
        start, end = (x.to(i.device) for x in band.intervals(num, self.num_keys))
        same = torch.equal(start, self.start) and torch.equal(end, self.end)
        return band if same else self

    def check(self, num_batch: int, num_queries: int, num_keys: int, num_heads: int | None = None) -> None:
        batch = self.start.shape[0] if self.start.dim() == 2 else num_batch
        if (self.start.shape[-1], self.num_keys) != (num_queries, num_keys) or batch not in (1, num_batch):
            raise ValueError(
                f"this mask covers {self.start.shape[-1]} queries and {self.num_keys} keys"
                f"{f' of a batch of {batch}' if self.start.dim() == 2 else ''}: "
                f"got q with {num_queries} and k with {num_keys} of a batch of {num_batch}; "
                f"make the mask for these lengths, or slice it"
            )

    def __and__(self, other: Mask) -> Mask:
        refuse_tensor(other)
        if not isinstance(other, (Band, Rows)):
            return other & self
        if isinstance(other, Rows):
            lengths = [(x.start.shape[-1], x.num_keys) for x in (self, other)]
            batches = {len(x.start) for x in (self, other) if x.start.dim() == 2}
            if lengths[0] != lengths[1] or len(batches - {1}) > 1:
                raise ValueError(
                    f"masks can be combined if they cover the same batch and lengths: got {self} and {other}; make "
                    f"both for the lengths of q and k, or slice the longer one"
                )
        return self.derived(other, lambda: self._intersect(other))

    def __or__(self, other: Mask) -> Mask:
        refuse_tensor(other)
        # If the other mask is blocks, its tile size is used.
        return as_blocks(self) | other if isinstance(other, (Band, Rows)) else other | self

    def __invert__(self) -> Mask:
        return ~as_blocks(self)

    def _intersect(self, other: Band | Rows) -> Rows:
        start, end = (x.to(self.start.device) for x in other.intervals(self.start.shape[-1], self.num_keys))
        start, end = canonical(torch.maximum(self.start, start), torch.minimum(self.end, end))
        # Ascending bounds stay ascending under maximum, minimum and `canonical`, so the result needs no check.
        convex = self.convex and (isinstance(other, Band) or other.convex)
        return Rows(start, end, self.num_keys, convex=convex)

    def _one_tensor(self) -> Tensor:
        return self.start

    def pack(self) -> tuple[str, list[int], list[Tensor]]:
        return "rows", [self.num_keys, int(self.convex), self.reach], [self.start, self.end, self.first, self.last]

    @classmethod
    def unpack(cls, numbers: Sequence[int], tensors: Sequence[Tensor]) -> Rows:
        rows = object.__new__(cls)
        rows.start, rows.end, rows.first, rows.last = tensors
        rows.num_keys, convex, rows.reach = numbers
        rows.convex, rows._derived = bool(convex), {}
        return rows

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Rows)
            and self.num_keys == other.num_keys
            and torch.equal(self.start.cpu(), other.start.cpu())
            and torch.equal(self.end.cpu(), other.end.cpu())
        )

    def __hash__(self) -> int:
        data = self.start.cpu().numpy().tobytes() + self.end.cpu().numpy().tobytes()
        return hash((hashlib.blake2b(data, digest_size=8).digest(), tuple(self.start.shape), self.num_keys))

    def __repr__(self) -> str:
        return f"Rows({'x'.join(map(str, self.start.shape))} queries, {self.num_keys} keys)"


@as_rows.register(Band)
def _(band: Band, q: Positions, k: Positions) -> Mask:
    rows, keys = place(q), place(k)
    lo, hi = band.numbers()
    start, end = torch.searchsorted(keys, rows + lo), torch.searchsorted(keys, rows + hi, right=True)
    return Rows(start.int(), end.int(), len(keys)).simplify()
