"""Stop a run by SIGTERM or Ctrl-C: signals from the command to its ranks, and the time limit for saving."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flashspan.stdout import discard_terminal

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
REPEAT = 1.0
"""A second signal within this many seconds is ignored: `timeout` signals its child, and then the child's group."""


@contextlib.contextmanager
def _handle(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle the signals that stop a run. SIGHUP comes when the terminal is closed; under nohup it stays ignored.

    Python allows handlers in the main thread only: `flashspan.train` in another thread leaves signals to the program.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds = [kind for kind in STOPS if kind != signal.SIGHUP or signal.getsignal(kind) != signal.SIG_IGN]

    def handle(kind: int, frame: Any) -> None:
        if kind == signal.SIGHUP:
            discard_terminal()
        handler(kind, frame)

    before = {kind: signal.signal(kind, handle) for kind in kinds}
    try:
        yield
    finally:
        for kind, earlier in before.items():
            signal.signal(kind, earlier)


@contextlib.contextmanager
def catch_signals(on_signal: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """Collect the signals that a rank gets in a list, which is read when a step ends; pending ones are included.

    Repeated signals have no further effect: a signal to the whole process group reaches a rank twice, directly and from
    the parent. Only the parent counts signals, and ends the ranks after a second one. `on_signal` is called inside the
    handler.
    """
    asked: list[int] = []

    def keep(kind: int, frame: Any) -> None:
        asked.append(kind)
        on_signal()

    with _handle(keep):
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        try:
            yield asked
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextlib.contextmanager
def deadline(seconds: float, late: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Yield a function that starts a timer. `late` is called on a thread this many seconds later, unless the block has
    ended; 0 means no deadline. A signal handler may call the function: it takes no lock that this code holds."""
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
    """Whether the command was asked to stop, and the ranks to which signals are forwarded."""

    def __init__(self) -> None:
        self.asked = self.late = False
        self.signal = signal.SIGTERM
        """The first signal, once the command was asked to stop."""
        self._pids: tuple[int, ...] = ()

    def pass_to(self, pids: Sequence[int]) -> None:
        """Set the ranks that have started, instead of those of an earlier attempt. If the command was asked to stop
        before that, signal them."""
        self._pids = tuple(pids)
        if self.asked:
            self.send(signal.SIGKILL if self.late else signal.SIGTERM)

    def send(self, kind: signal.Signals) -> None:
        """Send a signal to all ranks."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kind)

    def end(self) -> None:
        """Kill the ranks: the time limit for saving is over."""
        self.late = True
        self.send(signal.SIGKILL)


@contextlib.contextmanager
def pass_signals_on(grace: float) -> Iterator[Stop]:
    """Forward the first signal to the ranks, as soon as they exist. They save their state, and are killed after `grace`
    seconds. A second signal, later than REPEAT seconds, is a KeyboardInterrupt here, which ends them."""
    stop, first = Stop(), list[float]()
    with deadline(grace, stop.end) as start_clock:

        def pass_on(kind: int, frame: Any) -> None:
            if first and time.monotonic() - first[0] > REPEAT:
                raise KeyboardInterrupt("stopped at once, without saving; the last checkpoint stays")
            if not first:
                first.append(time.monotonic())
                _say_stopping(signal.Signals(kind), grace)
                stop.asked, stop.signal = True, signal.Signals(kind)
                start_clock()
                stop.send(signal.SIGTERM)

        with _handle(pass_on):
            yield stop


def _say_stopping(kind: signal.Signals, grace: float) -> None:
    """Report the first signal on stderr; in a handler, print() could interrupt itself."""
    limit = f" within {grace:g} s" if grace else ""
    text = f"flashspan: {kind.name}: saving the state after this step{limit}; a second signal stops without saving\n"
    with contextlib.suppress(OSError):
        os.write(2, ("\n" + text if os.isatty(2) else text).encode())  # below a progress bar
