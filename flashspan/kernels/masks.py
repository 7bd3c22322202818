"""Masks as values: who may look at whom, closed under slicing.

`Band(lo, hi)` lets query i see key j when lo <= j - i <= hi; `Rows(start, end)` when start[i] <= j < end[i]. Full,
causal, sliding-window, prefix and packed-document attention, and any slice of them under any layout, are one of the
two: a slice of a band by ranges of one step is a band, every other slice of ascending positions is rows. Both say, per
query, *one interval of keys*: that is all a kernel needs to know. Any other mask is `Blocks` (blocks.py): lists of
tiles. Masks compose with `&`, `|` and `~`; the last two give blocks, except `|` of bands that meet and `~` of one with
one bound.
"""

from __future__ import annotations

import hashlib
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from flashspan.kernels.intervals import Positions, clean, extremes, one_range, place, reach_of, settle, transpose

if TYPE_CHECKING:
    from flashspan.kernels.blocks import Blocks

EMPTY, FULL, PARTIAL = 0, 1, 2
"""What a tile of a mask is."""

UNBOUNDED = 2**62
"""A bound that no length reaches, and that a position can be added to in 64 bits."""

MADE_KEPT = 16
"""How many masks made from another it keeps: copies on devices, intersections."""
_KEEPING = threading.Lock()


def refuse_tensor(other: object) -> None:
    """Say how a tensor is joined with a mask, before `&` or `|` asks the tensor."""
    if isinstance(other, Tensor):
        raise TypeError(
            f"unsupported operand for & and |: masks compose with masks, got a tensor {tuple(other.shape)} of "
            f"{other.dtype}; use Blocks.from_dense(tensor)"
        )


def _refuse_left(mask: Mask, other: object) -> Any:
    """`other & mask` where the other is no mask."""
    refuse_tensor(other)
    return NotImplemented


@dataclass(frozen=True)
class Band:
    """Key j is visible to query i when lo <= j - i <= hi; None is no bound. Fits any number of queries and keys."""

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
        """(lo, hi) as plain integers that mean the same on this many queries and keys."""
        lo = -num_queries if self.lo is None else min(max(self.lo, -num_queries), num_keys)
        hi = num_keys if self.hi is None else min(max(self.hi, -num_queries), num_keys)
        return lo, hi

    def intervals(self, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """start, end int32 [T]: the keys each query sees, clipped to 0..num_keys; start >= end sees none."""
        lo, hi = self.bounds(num_queries, num_keys)
        i = torch.arange(num_queries, dtype=torch.int32, device="cpu")
        return (i + lo).clamp(0, num_keys), (i + hi + 1).clamp(0, num_keys)

    def slice(self, q: Positions, k: Positions) -> Mask:
        """The same visibility in a slice's coordinates: local query a is global q[a], local key b is global k[b]."""
        q, k = one_range(q), one_range(k)
        if (
            isinstance(q, range)
            and isinstance(k, range)
            and min(q.step, k.step) > 0
            and (q.step == k.step or len(q) <= 1 or len(k) <= 1)
        ):
            step = q.step if len(q) > 1 else k.step
            shift = k.start - q.start if len(q) and len(k) else 0
            # lo <= (k.start + b * step) - (q.start + a * step) <= hi, solved for b - a. With one row (or column) the
            # other's step is the right one: the single element sits at 0.
            lo = None if self.lo is None else -((shift - self.lo) // step)
            hi = None if self.hi is None else (self.hi - shift) // step
            return Band(lo, hi).simplify(len(q), len(k))
        starts, ends = place(q), place(k)
        lo, hi = self._numbers()
        start, end = torch.searchsorted(ends, starts + lo), torch.searchsorted(ends, starts + hi, right=True)
        return Rows(start.int(), end.int(), len(ends)).simplify()

    def simplify(self, num_queries: int, num_keys: int) -> Band:
        """NOTHING or EVERYTHING where this many queries and keys make it so, else itself."""
        lo, hi = self.bounds(num_queries, num_keys)
        if num_queries == 0 or num_keys == 0 or lo > hi or lo >= num_keys or hi <= -num_queries:
            return NOTHING
        if lo <= 1 - num_queries and hi >= num_keys - 1:
            return EVERYTHING
        return self

    def check(self, num_batch: int, num_queries: int, num_keys: int) -> None:
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
                f"bands that do not meet are blocks, and so cannot be joined before the lengths are known: "
                f"got {self} | {other}; write Blocks.of(first, num_queries, num_keys) | second"
            )
        lo = None if self.lo is None or other.lo is None else min(self.lo, other.lo)
        hi = None if self.hi is None or other.hi is None else max(self.hi, other.hi)
        return Band(lo, hi)

    __rand__ = __ror__ = _refuse_left

    def __invert__(self) -> Band:
        if self._sees_nothing():
            return EVERYTHING
        if self.lo is not None and self.hi is not None:
            raise ValueError(
                f"what lies around a band is blocks, and so cannot be made before the lengths are known: got ~{self}; "
                f"write ~Blocks.of(band, num_queries, num_keys)"
            )
        if self.hi is not None:
            return Band(self.hi + 1, None)
        return NOTHING if self.lo is None else Band(None, self.lo - 1)

    def to(self, device: torch.device | str) -> Band:
        return self

    def pack(self) -> tuple[str, list[int], list[Tensor]]:
        """Kind, numbers and tensors: an operator's schema can carry those, not objects. `unpack` is the inverse."""
        return "band", [*self._numbers()], []

    def _sees_nothing(self) -> bool:
        return self.lo is not None and self.hi is not None and self.lo > self.hi

    def _numbers(self) -> tuple[int, int]:
        """(lo, hi) as numbers within UNBOUNDED, which no bound at all is."""
        lo = -UNBOUNDED if self.lo is None else min(max(self.lo, -UNBOUNDED), UNBOUNDED)
        hi = UNBOUNDED if self.hi is None else min(max(self.hi, -UNBOUNDED), UNBOUNDED)
        return lo, hi


EVERYTHING = Band()
NOTHING = Band(0, -1)
CAUSAL = Band(None, 0)


class Rows:
    """Key j is visible to query i when start[i] <= j < end[i].

    start, end: [T], or [B, T] when each sequence of the batch has its own; `num_keys` is S. The transpose is kept
    beside them: query i in first[j] <= i < last[j] may see key j (`convex`: just those do; otherwise some do not).
    `reach` is the power of 2 at or below the mean number of keys a query sees, or 0 where nobody has looked: enough to
    choose a kernel by, and other documents of about that length are the same kind of call.
    A value: nothing changes it after it is made.
    """

    def __init__(
        self, start: Tensor, end: Tensor, num_keys: int, *, convex: bool | None = None, reach: int | None = None
    ) -> None:
        """`convex` is for intervals of this package's own making, clipped, settled and ascending (or not); so is
        `reach`, which is looked for where that waits for no device."""
        if convex is None:
            (num_keys,) = check_whole(num_keys=num_keys)
            start, end = clean(start, end, num_keys)
            convex = bool((start.diff() >= 0).all() and (end.diff() >= 0).all())
        self.start, self.end, self.num_keys, self.convex = start, end, num_keys, convex
        self.reach = reach_of(start, end) if reach is None else reach
        self.first, self.last = transpose(start, end, num_keys)
        self._made: dict[object, Rows] = {}

    def intervals(self, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """start, end int32 [T] or [B, T]."""
        return self.start, self.end

    def slice(self, q: Positions, k: Positions) -> Mask:
        """The same visibility in the coordinates of a slice of the queries and the keys."""
        sizes = (self.start.shape[-1], self.num_keys)
        rows, keys = (place(x, size).to(self.start.device) for x, size in zip((q, k), sizes, strict=True))
        start = torch.searchsorted(keys, self.start[..., rows].long())
        end = torch.searchsorted(keys, self.end[..., rows].long())
        return Rows(start.int(), end.int(), len(keys)).simplify()

    def simplify(self) -> Mask:
        """The band that says the same, if there is one: its tiles need no table."""
        if self.start.dim() > 1:
            return self
        num = len(self.start)
        if bool((self.start >= self.end).all()):
            return NOTHING
        i = torch.arange(num, device=self.start.device)
        # A band's ends clip to 0..num_keys, so only rows whose end lies inside tell what it is.
        lo = extremes(self.start - i, self.start > 0)
        hi = extremes(self.end - 1 - i, self.end < self.num_keys)
        if len(lo) > 1 or len(hi) > 1:
            return self
        band = Band(*lo or (None,), *hi or (None,)).simplify(num, self.num_keys)
        start, end = (x.to(i.device) for x in band.intervals(num, self.num_keys))
        same = torch.equal(start, self.start) and torch.equal(end, self.end)
        return band if same else self

    def check(self, num_batch: int, num_queries: int, num_keys: int) -> None:
        """Refuse queries, keys or a batch this mask was not made for."""
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
                    f"masks compose when they cover the same batch and lengths: got {self} and {other}; make both for "
                    f"the lengths of q and k, or slice the longer one"
                )
        return made_once(self._made, other, lambda: self._intersect(other))

    def __or__(self, other: Mask) -> Blocks:
        refuse_tensor(other)
        # Blocks decide the tile size: this mask has none of its own.
        return _blocks(self) | other if isinstance(other, (Band, Rows)) else other | self

    __rand__ = __ror__ = _refuse_left

    def __invert__(self) -> Blocks:
        return ~_blocks(self)

    def _intersect(self, other: Band | Rows) -> Rows:
        start, end = (x.to(self.start.device) for x in other.intervals(self.start.shape[-1], self.num_keys))
        start, end = settle(torch.maximum(self.start, start), torch.minimum(self.end, end))
        # Ascending bounds stay ascending under all three: no need to look at the data again.
        convex = self.convex and (isinstance(other, Band) or other.convex)
        return Rows(start, end, self.num_keys, convex=convex)

    def to(self, device: torch.device | str) -> Rows:
        """This mask with its tables on a device; copied once."""
        device = torch.device(device)
        eager = not torch.compiler.is_compiling()
        if eager and self.start.is_inference() and not torch.is_inference_mode_enabled():
            # Made in inference mode and now used to train: autograd cannot save such tensors.
            start, end = self.start.to(device).clone(), self.end.to(device).clone()
            return Rows(start, end, self.num_keys, convex=self.convex, reach=self.reach)
        if self.start.device == device:
            return self

        def copy() -> Rows:
            start, end = self.start.to(device), self.end.to(device)
            return Rows(start, end, self.num_keys, convex=self.convex, reach=self.reach)

        return made_once(self._made, device, copy)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_made": {}}

    def pack(self) -> tuple[str, list[int], list[Tensor]]:
        return "rows", [self.num_keys, int(self.convex), self.reach], [self.start, self.end, self.first, self.last]

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


Mask: TypeAlias = "Band | Rows | Blocks"
Made = TypeVar("Made", Rows, "Blocks")


def made_once(kept: dict[object, Made], key: object, make: Callable[[], Made]) -> Made:
    """What was made from a mask before, so that every layer and step shares it; of that the newest few are kept.

    Nothing is kept that is not a plain tensor: what the compiler traces, a fake, what autograd cannot save.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or is_in_torch_dispatch_mode():
        return make()
    made = kept.get(key)
    if made is None:
        made = make()
        with _KEEPING:  # other threads use this mask too
            while len(kept) >= MADE_KEPT:
                kept.pop(next(iter(kept)))
            kept[key] = made
    return made


def whole_number(value: Any) -> int | None:
    """It as a plain integer, from NumPy's or a tensor of one for instance; None if it is no whole number."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # a tensor of two has __index__ too
        return None


def check_whole(least: int | None = 0, **values: Any) -> list[int]:
    """These as plain integers; refuse what is no whole number, or less than the least."""
    found = []
    for name, value in values.items():
        number = whole_number(value)
        if number is None or (least is not None and number < least):
            limit = "" if least is None else f", {least} or more"
            raise ValueError(f"{name} is a whole number{limit}: got {value!r}")
        found.append(number)
    return found


def unpack(kind: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> Mask:
    """The mask that `pack` took apart."""
    if kind == "band":
        lo, hi = numbers
        return Band(None if lo == -UNBOUNDED else lo, None if hi == UNBOUNDED else hi)
    if kind == "blocks":
        from flashspan.kernels.blocks import Blocks

        return Blocks.unpack(numbers, tensors)
    rows = object.__new__(Rows)
    rows.start, rows.end, rows.first, rows.last = tensors
    rows.num_keys, convex, rows.reach = numbers
    rows.convex, rows._made = bool(convex), {}
    return rows


def dense(mask: Mask, num_queries: int, num_keys: int) -> Tensor:
    """The mask drawn out: bool [T, S], [B, T, S] or, of blocks, [B, H, T, S]. For tests, pictures and small tiles."""
    if not isinstance(mask, (Band, Rows)):
        return mask.dense()
    start, end = mask.intervals(num_queries, num_keys)
    j = torch.arange(num_keys, device=start.device)
    return (start[..., None] <= j) & (j < end[..., None])


def count(mask: Mask, num_queries: int, num_keys: int) -> int:
    """How many (query, key) pairs are visible: the work of a tile, without drawing it."""
    if isinstance(mask, Band):
        lo, hi = mask.bounds(num_queries, num_keys)
        return max(0, _behind(hi, num_queries, num_keys) - _behind(lo - 1, num_queries, num_keys))
    if not isinstance(mask, Rows):
        return mask.count()
    start, end = mask.intervals(num_queries, num_keys)
    return int((end.long() - start.long()).clamp(min=0).sum())


def _behind(hi: int, num_queries: int, num_keys: int) -> int:
    """How many pairs have j - i <= hi: query i sees hi + 1 + i keys, none if that is negative, all if it is more."""

    def total(last: int) -> int:  # over all queries that would see up to so many
        ramp = min(max(last, 0), num_keys)
        return ramp * (ramp + 1) // 2 + max(last - num_keys, 0) * num_keys

    return total(hi + num_queries) - total(hi)


def _blocks(rows: Rows) -> Blocks:
    from flashspan.kernels.blocks import Blocks

    return Blocks.of(rows, rows.start.shape[-1], rows.num_keys)
