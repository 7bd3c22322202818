"""A set of rows of a shard, as runs: the rows of a tile, a transfer or a buffer.

Usually it is one run. A sparse mask has gaps: rows that no later rank needs, which are not sent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import attrgetter

import numpy as np

_start = attrgetter("start")


@dataclass(frozen=True)
class Runs:
    """Rows as ascending runs of step 1, neither empty nor adjacent, so that equal sets are equal values."""

    parts: tuple[range, ...] = ()

    @staticmethod
    def of(*parts: range) -> Runs:
        """The union of these runs."""
        if len(parts) == 1:  # the usual case
            return Runs(parts if len(parts[0]) else ())
        joined: list[range] = []
        for part in sorted((part for part in parts if len(part)), key=_start):
            if joined and part.start <= joined[-1].stop:
                joined[-1] = range(joined[-1].start, max(joined[-1].stop, part.stop))
            else:
                joined.append(part)
        return Runs(tuple(joined))

    @staticmethod
    def where(chosen: np.ndarray) -> Runs:
        """The rows at which a bool array [n] is True."""
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).tolist()
        return Runs(tuple(range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)))

    @property
    def start(self) -> int:
        return self.parts[0].start if self.parts else 0

    @property
    def stop(self) -> int:
        return self.parts[-1].stop if self.parts else 0

    def __len__(self) -> int:
        """The number of rows."""
        return sum(map(len, self.parts))

    @cached_property
    def _before(self) -> list[int]:
        """The number of rows before each run."""
        return list(accumulate(map(len, self.parts[:-1]), initial=0))

    def below(self, row: int) -> int:
        """The number of rows of this set below `row`, which is the row's index if it belongs to the set."""
        number = bisect_right(self.parts, row, key=_start) - 1
        if number < 0:
            return 0
        part = self.parts[number]
        return self._before[number] + min(row - part.start, len(part))

    def within(self, span: range | Runs) -> Runs:
        """The rows of this set between the first and the last row of `span`, including those in its gaps."""
        cut = (range(max(part.start, span.start), min(part.stop, span.stop)) for part in self.parts)
        return Runs(tuple(part for part in cut if len(part)))

    def covers(self, other: Runs) -> bool:
        """Whether this set contains all rows of another set."""
        return all(self.below(part.stop) - self.below(part.start) == len(part) for part in other.parts)


def union(sets: Iterable[Runs]) -> Runs:
    """The union of these sets."""
    first, *others = [*sets] or [Runs()]
    if all(rows.parts == first.parts for rows in others):
        return first
    return Runs.of(*(part for rows in (first, *others) for part in rows.parts))
