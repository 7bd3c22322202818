"""The end of waits that outlast their timeout, on streams that nothing else could release."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flashspan.context.shared_memory import LANES
from flashspan.context.transport import ExchangeError

POLL, DRAIN = 0.1, 1e-4
"""Seconds between two looks: while all is well, and while waits are released, one after another."""
WORD = 2**32


class Wait(NamedTuple):
    """A lane that waits for a flag to have a value; `label` is the error if it never does."""

    lane: str
    flag: int
    tag: int
    label: str


class Watchdog:
    """Ends waits that outlast the timeout: a device that waits would block the host forever, without a message.

    Each lane writes a number when a wait begins, and the next when it ends; so a wait's time does not run while the
    device is busy with what comes before. When one takes too long, the watchdog sets a word in every rank's memory.
    Each rank's watchdog sends an ExchangeError to its caller's thread, which raises it before it can use a result. Then
    waits are released, so that the host returns from the call that blocks it. Every later use raises too. The watchdog
    calls no CUDA function: one could wait for what it is to release.

    `words` are every rank's shared memory, uint32: flags, a mark for each lane, and a word that says who gave up.
    """

    def __init__(
        self, words: Sequence[Any], rank: int, num_flags: int, timeout: float, caller: Callable[[], int]
    ) -> None:
        mine = words[rank]
        self._flags, self._reached = mine[:num_flags], mine[num_flags : num_flags + len(LANES)]
        self._reached[:] = 1  # by lane: even while it waits, odd while it does not
        self._gave_up = [one[num_flags + len(LANES) :] for one in words]  # by rank: 1 + the rank that gave up first
        self._rank, self._timeout = rank, timeout
        self._next = dict.fromkeys(LANES, 2)
        self._waits: dict[str, deque[tuple[int, Wait]]] = {lane: deque() for lane in LANES}
        self._caller = caller
        self._thread: threading.Thread | None = None
        self._problem, self._closed = "", False

    @staticmethod
    def num_words(num_flags: int) -> int:
        """How many words of shared memory each rank needs."""
        return num_flags + len(LANES) + 1

    def add(self, wait: Wait) -> int:
        """The number that the wait's lane is to write when it begins; it writes the next one when it ends."""
        begun = self._next[wait.lane]
        self._next[wait.lane] = (begun + 2) % WORD
        self._waits[wait.lane].append((begun, wait))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flashspan watchdog", daemon=True)
            self._thread.start()
        return begun

    def check(self) -> None:
        if self._problem:
            # The error may still be on its way to the caller's thread: there it must not be raised a second time.
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
                if not self._problem and time.monotonic() - since[lane][1] > self._timeout:
                    self._give_up(wait.label)
                if self._problem:
                    self._flags[wait.flag] = wait.tag
            if not self._problem and (first := int(self._gave_up[self._rank][0])):
                self._give_up(f"rank {first - 1} of those on this host waited too long for another, and gave up")

    def _give_up(self, problem: str) -> None:
        """Notify the caller and all ranks, and give them time to read it: what is sent from now on is not a result."""
        self._problem = problem
        for word in self._gave_up:
            if not word[0]:
                word[0] = 1 + self._rank
        raise_in(self._caller(), lambda: ExchangeError(problem))
        time.sleep(3 * POLL)

    def _mark(self, lane: str) -> int:
        return int(self._reached[LANES.index(lane)])

    def _current(self, lane: str) -> Wait | None:
        """What a lane waits for now, forgetting what it waited for before."""
        reached, waits = self._mark(lane), self._waits[lane]
        while waits and waits[0][0] != reached and (reached - waits[0][0]) % WORD < WORD // 2:
            waits.popleft()
        return waits[0][1] if waits and waits[0][0] == reached else None


def raise_in(thread: int, make: Callable[[], Exception]) -> None:
    """Make a thread raise this exception as soon as it runs Python again."""

    class Late(ExchangeError):
        def __init__(self) -> None:  # Python makes the exception, from its class alone
            super().__init__(*make().args)

    Late.__name__ = Late.__qualname__ = ExchangeError.__name__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Late))
