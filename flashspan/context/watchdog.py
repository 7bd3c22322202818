"""A watchdog that releases failed waits of device streams, which nothing else could release, and raises the error."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flashspan.context.shared_memory import LANES, died, timed_out
from flashspan.context.transport import ExchangeError

POLL, DRAIN = 0.1, 1e-4
"""Seconds between two polls: usually, and while failed waits are released one after another."""
WORD = 2**32


class Wait(NamedTuple):
    """A lane waits until `rank` sets a flag to the value `tag`; `label` begins the error message if it fails."""

    lane: str
    rank: int
    flag: int
    tag: int
    label: str


class Watchdog:
    """Releases waits that exceed the timeout, or whose peer's process has ended: otherwise the waiting device would
    block the host forever, without a message.

    Each lane writes a number when a wait begins, and the next number when it ends, so the time of a wait does not
    include earlier work of the device. When a wait fails, the watchdog sets a word in every rank's memory. The
    watchdog of each rank raises an ExchangeError in its caller's thread, before that thread can use a result. Then it
    releases the waits, so that a blocked call of the host returns. Every later use raises too. The watchdog calls no
    CUDA function, because one could block on the wait that it must release.

    words: every rank's shared memory, uint32: flags, a mark for each lane, and 1 + the first rank whose wait failed.
    has_ended: a function that returns whether a rank's process has ended.
    """

    def __init__(
        self,
        words: Sequence[Any],
        rank: int,
        num_flags: int,
        timeout: float,
        caller: Callable[[], int],
        has_ended: Callable[[int], bool],
    ) -> None:
        mine = words[rank]
        self._flags, self._reached = mine[:num_flags], mine[num_flags : num_flags + len(LANES)]
        self._reached[:] = 1  # by lane: even while the lane waits, odd otherwise
        self._failed = [one[num_flags + len(LANES) :] for one in words]  # by rank: 1 + the first rank whose wait failed
        self._rank, self._timeout = rank, timeout
        self._next = dict.fromkeys(LANES, 2)
        self._waits: dict[str, deque[tuple[int, Wait]]] = {lane: deque() for lane in LANES}
        self._caller, self._has_ended = caller, has_ended
        self._thread: threading.Thread | None = None
        self._problem, self._closed = "", False

    @staticmethod
    def num_words(num_flags: int) -> int:
        """The number of words of shared memory that each rank needs."""
        return num_flags + len(LANES) + 1

    def add(self, wait: Wait) -> int:
        """Return the number to write when the wait begins. The lane must write the next number when the wait ends."""
        begun = self._next[wait.lane]
        self._next[wait.lane] = (begun + 2) % WORD
        self._waits[wait.lane].append((begun, wait))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flashspan watchdog", daemon=True)
            self._thread.start()
        return begun

    def check(self) -> None:
        if self._problem:
            # The error may still be pending in the caller's thread: cancel it, so that it is not raised twice.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._caller()), None)
            raise ExchangeError(self._problem)

    def close(self) -> None:
        self._closed = True

    def _run(self) -> None:
        since: dict[str, tuple[int, float]] = {}
        while not self._closed:
            time.sleep(DRAIN if self._problem else POLL)
            for lane in LANES:
                wait, reached = self._current(lane), self._mark(lane)
                if since.get(lane, (-1, 0.0))[0] != reached:
                    since[lane] = reached, time.monotonic()
                if wait is None:
                    continue
                if not self._problem and (problem := self._fault(wait, time.monotonic() - since[lane][1])):
                    self._report(problem)
                if self._problem:
                    self._flags[wait.flag] = wait.tag
            if not self._problem and (first := int(self._failed[self._rank][0])):
                self._report(f"rank {first - 1} on this host reported that another rank died or timed out")

    def _fault(self, wait: Wait, seconds: float) -> str:
        """The error message of a wait that has taken `seconds`; empty if it may still end."""
        # Read the flag after the process state: the process may have set the flag just before its end.
        if self._has_ended(wait.rank) and self._flags[wait.flag] != wait.tag:
            return died(wait.label)
        return timed_out(wait.label, self._timeout) if seconds > self._timeout else ""

    def _report(self, problem: str) -> None:
        """Report the failure to the caller and all ranks, and give them time to read it before waits are released."""
        self._problem = problem
        for word in self._failed:
            if not word[0]:
                word[0] = 1 + self._rank
        raise_in(self._caller(), lambda: ExchangeError(problem))
        time.sleep(3 * POLL)

    def _mark(self, lane: str) -> int:
        return int(self._reached[LANES.index(lane)])

    def _current(self, lane: str) -> Wait | None:
        """The wait that a lane is in, or None; earlier waits are dropped."""
        reached, waits = self._mark(lane), self._waits[lane]
        while waits and waits[0][0] != reached and (reached - waits[0][0]) % WORD < WORD // 2:
            waits.popleft()
        return waits[0][1] if waits and waits[0][0] == reached else None


def raise_in(thread: int, make: Callable[[], Exception]) -> None:
    """Raise the exception that `make` returns in a thread, as soon as that thread runs Python code."""

    class Late(ExchangeError):
        def __init__(self) -> None:  # Python calls the class without arguments
            super().__init__(*make().args)

    Late.__name__ = Late.__qualname__ = ExchangeError.__name__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Late))
