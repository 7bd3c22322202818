"""`Band`: query i sees key j when lo <= j - i <= hi.

Full, causal and sliding-window attention are bands, and so are their slices by ranges of one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashspan.kernels.masks.intervals import Positions, one_range
from flashspan.kernels.masks.mask import Mask, as_rows, refuse_tensor, whole_number

UNBOUNDED = 2**62
"""A bound larger than any length; adding a position to it fits 64 bits."""


@dataclass(frozen=True)
class Band(Mask):
    """Query i sees key j when lo <= j - i <= hi; None is no bound. Fits any number of queries and keys."""

    lo: int | None = None
    hi: int | None = None

    def __post_init__(self) -> None:
        for name, bound in (("lo", self.lo), ("hi", self.hi)):
            if bound is None or type(bound) is int:
                continue
            number = whole_number(bound)
            if number is None:
                raise ValueError(f"a band's bounds are whole numbers or None: got {name}={bound!r}")
            object.__setattr__(self, name, number)

    def bounds(self, num_queries: int, num_keys: int) -> tuple[int, int]:
        """(lo, hi) as integers, clipped to the range that matters for this many queries and keys."""
        lo = -num_queries if self.lo is None else min(max(self.lo, -num_queries), num_keys)
        hi = num_keys if self.hi is None else min(max(self.hi, -num_queries), num_keys)
        return lo, hi

    def intervals(self, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """start, end int32 [T]: the keys that each query sees, within 0..num_keys; no keys if start >= end."""
        lo, hi = self.bounds(num_queries, num_keys)
        i = torch.arange(num_queries, dtype=torch.int32, device="cpu")
        return (i + lo).clamp(0, num_keys), (i + hi + 1).clamp(0, num_keys)

    def slice(self, q: Positions, k: Positions) -> Mask:
        q, k = one_range(q), one_range(k)
        if (
            isinstance(q, range)
            and isinstance(k, range)
            and min(q.step, k.step) > 0
            and (q.step == k.step or len(q) <= 1 or len(k) <= 1)
        ):
            step = q.step if len(q) > 1 else k.step
            shift = k.start - q.start if len(q) and len(k) else 0
            # lo <= (k.start + b * step) - (q.start + a * step) <= hi, solved for b - a. A range of one element is at 0,
            # so the step is that of the other range.
            lo = None if self.lo is None else -((shift - self.lo) // step)
            hi = None if self.hi is None else (self.hi - shift) // step
            return Band(lo, hi).simplify(len(q), len(k))
        return as_rows(self, q, k)

    def simplify(self, num_queries: int, num_keys: int) -> Band:
        """NOTHING or EVERYTHING if the band equals it for this many queries and keys, else this band."""
        lo, hi = self.bounds(num_queries, num_keys)
        if num_queries == 0 or num_keys == 0 or lo > hi or lo >= num_keys or hi <= -num_queries:
            return NOTHING
        if lo <= 1 - num_queries and hi >= num_keys - 1:
            return EVERYTHING
        return self

    def check(self, num_batch: int, num_queries: int, num_keys: int, num_heads: int | None = None) -> None:
        """A band fits every shape."""

    def __and__(self, other: Mask) -> Mask:
        refuse_tensor(other)
        if isinstance(other, Band):
            lo = [bound for bound in (self.lo, other.lo) if bound is not None]
            hi = [bound for bound in (self.hi, other.hi) if bound is not None]
            return Band(max(lo) if lo else None, min(hi) if hi else None)
        return other & self

    def __or__(self, other: Mask) -> Mask:
        refuse_tensor(other)
        if not isinstance(other, Band):
            return other | self
        for one, rest in ((self, other), (other, self)):
            if one._sees_nothing():
                return rest
        both = self & other
        assert isinstance(both, Band)
        if both.lo is not None and both.hi is not None and both.lo > both.hi + 1:
            raise ValueError(
                f"a union of bands with a gap between them is a block map, which needs lengths: got {self} | {other}; "
                f"use Blocks.of(first, num_queries, num_keys) | second"
            )
        lo = None if self.lo is None or other.lo is None else min(self.lo, other.lo)
        hi = None if self.hi is None or other.hi is None else max(self.hi, other.hi)
        return Band(lo, hi)

    def __invert__(self) -> Band:
        if self._sees_nothing():
            return EVERYTHING
        if self.lo is not None and self.hi is not None:
            raise ValueError(
                f"the complement of a band with two bounds is a block map, which needs lengths: got ~{self}; "
                f"use ~Blocks.of(band, num_queries, num_keys)"
            )
        if self.hi is not None:
            return Band(self.hi + 1, None)
        return NOTHING if self.lo is None else Band(None, self.lo - 1)

    def to(self, device: torch.device | str) -> Band:
        return self

    def pack(self) -> tuple[str, list[int], list[Tensor]]:
        return "band", [*self.numbers()], []

    @classmethod
    def unpack(cls, numbers: Sequence[int], tensors: Sequence[Tensor] = ()) -> Band:
        lo, hi = numbers
        return Band(None if lo == -UNBOUNDED else lo, None if hi == UNBOUNDED else hi)

    def _sees_nothing(self) -> bool:
        return self.lo is not None and self.hi is not None and self.lo > self.hi

    def numbers(self) -> tuple[int, int]:
        """(lo, hi) as integers; -UNBOUNDED and UNBOUNDED for None."""
        lo = -UNBOUNDED if self.lo is None else min(max(self.lo, -UNBOUNDED), UNBOUNDED)
        hi = UNBOUNDED if self.hi is None else min(max(self.hi, -UNBOUNDED), UNBOUNDED)
        return lo, hi


EVERYTHING = Band()
NOTHING = Band(0, -1)
CAUSAL = Band(None, 0)
