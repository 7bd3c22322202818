"""How a run is asked to stop: SIGTERM and Ctrl-C, from the command to its ranks, and the time there is to save."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT)
REPEAT = 1.0
"""Seconds in which a second signal is the first again: `timeout` sends it to its child, and to the child's group."""


@contextlib.contextmanager
def catch_signals(on_signal: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """SIGTERM and SIGINT to a rank, kept until the step has ended, and those that came while they were blocked.

    However many come: a signal to the whole group of processes reaches a rank twice, by itself and passed on. The
    process that started the ranks counts, and ends them. `on_signal` is called inside the handler.
    """
    asked: list[int] = []

    def keep(kind: int, frame: Any) -> None:
        asked.append(kind)
        on_signal()

    before = {kind: signal.signal(kind, keep) for kind in STOPS}
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    try:
        yield asked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextlib.contextmanager
def deadline(seconds: float, late: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """A function that starts the time: `late` is called on a thread this many seconds after it, unless the block has
    ended. 0 seconds are no deadline. A signal handler may call the function: it takes no lock that code here holds."""
    if not seconds:
        yield lambda: None
        return
    started, ended = threading.Event(), threading.Event()

    def watch() -> None:
        started.wait()
        if not ended.wait(seconds):
            late()

    threading.Thread(target=watch, daemon=True, name="flashspan-deadline").start()
    try:
        yield started.set
    finally:
        ended.set()
        started.set()


class Stop:
    """Whether the command was asked to stop, and the ranks that the signal is passed on to."""

    def __init__(self) -> None:
        self.asked = self.late = False
        self.signal = signal.SIGTERM
        """The first signal, once the command was asked to stop."""
        self._pids: tuple[int, ...] = ()

    def pass_to(self, pids: Sequence[int]) -> None:
        """Ranks have started, in place of those before."""
        self._pids = tuple(pids)
        if self.asked:
            self.send(signal.SIGKILL if self.late else signal.SIGTERM)

    def send(self, kind: signal.Signals) -> None:
        """A signal to all ranks."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kind)

    def end(self) -> None:
        """The time to save is over."""
        self.late = True
        self.send(signal.SIGKILL)


@contextlib.contextmanager
def pass_signals_on(grace: float) -> Iterator[Stop]:
    """The first SIGTERM or SIGINT goes to the ranks, once there are any, and they save; after `grace` seconds they are
    killed. A second signal, and not at once after the first, is a KeyboardInterrupt here, which ends them."""
    stop, first = Stop(), list[float]()
    with deadline(grace, stop.end) as start_clock:

        def pass_on(kind: int, frame: Any) -> None:
            if first and time.monotonic() - first[0] > REPEAT:
                raise KeyboardInterrupt
            if not first:
                first.append(time.monotonic())
                stop.asked, stop.signal = True, signal.Signals(kind)
                start_clock()
                stop.send(signal.SIGTERM)

        before = {kind: signal.signal(kind, pass_on) for kind in STOPS}
        try:
            yield stop
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
