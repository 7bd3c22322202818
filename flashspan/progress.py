"""Progress of a long command, on stderr: on a terminal a line that moves, elsewhere a plain line every 10 seconds.

with progress("check", total=18) as line:
    line.show("ring zigzag")
    line.advance()
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

EVERY_S = 10.0
"""Seconds between progress lines where there is no terminal. A shorter command prints none."""


class Line:
    """The current part of the work, the number of finished parts, and the time. Any thread may call the methods."""

    def __init__(self, title: str, total: int | None, completed: int) -> None:
        self.title, self.total, self.completed = title, total, completed
        self.begin = time.monotonic()

    def show(self, title: str) -> None:
        """Name the current part of the work."""
        self.title = title

    def advance(self, num: int = 1) -> None:
        """Count finished parts."""
        self.completed += num

    def print(self, text: str) -> None:
        """Print a line on stdout, above a line that moves."""
        print(text, flush=True)

    def __str__(self) -> str:
        count = "" if self.total is None else f" {self.completed}/{self.total}"
        return f"{self.title}{count}, {time.monotonic() - self.begin:.0f} s"


class _Moving(Line):
    def __init__(self, bar: Any, title: str, total: int | None, completed: int) -> None:
        super().__init__(title, total, completed)
        self.bar, self.task = bar, bar.add_task(title, total=total, completed=completed)

    def show(self, title: str) -> None:
        self.bar.update(self.task, description=title)

    def advance(self, num: int = 1) -> None:
        self.bar.advance(self.task, num)

    def print(self, text: str) -> None:
        if sys.stdout.isatty():
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            super().print(text)


@contextlib.contextmanager
def progress(title: str, total: int | None = None, completed: int = 0) -> Iterator[Line]:
    """Show progress until the block ends; with `total`, also the number of finished parts."""
    if sys.stderr is not None and sys.stderr.isatty():
        with _moving_bar(total) as bar:
            yield _Moving(bar, title, total, completed)
        return
    line, ended = Line(title, total, completed), threading.Event()
    writer = threading.Thread(target=_write, args=(line, ended), daemon=True)
    writer.start()
    try:
        yield line
    finally:
        ended.set()
        writer.join()


def _moving_bar(total: int | None) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    count = () if total is None else (BarColumn(), MofNCompleteColumn())
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *count, TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _write(line: Line, ended: threading.Event) -> None:
    """Write the line every EVERY_S seconds; only every sixth time while nothing but the time changes."""
    said, unchanged = "", 0
    while not ended.wait(EVERY_S):
        text = str(line)
        state = text.rpartition(",")[0]
        unchanged = unchanged + 1 if state == said else 0
        if unchanged % 6 == 0:
            with contextlib.suppress(OSError, ValueError):  # a closed stderr
                print(text, file=sys.stderr, flush=True)
        said = state
