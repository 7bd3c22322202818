"""Printing to stdout: also if its reader has ended, such as `| head`, and during long waits."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
from collections.abc import Iterator
from typing import IO, Any, cast


def open_stdout() -> None:
    """If the parent process has closed stdout (`>&-`), make the null device stdout, also of processes started later.
    Characters that the encoding of stdout does not have are escaped, as on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stdout is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.set_inheritable(1, True)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives


def discard_stdout() -> None:
    """Redirect stdout to the null device, with its buffered text: otherwise Python's last flush prints an error."""
    Stdout().discard()


def discard_terminal() -> None:
    """Redirect stdin, stdout and stderr to the null device where they are a terminal, which has been closed: every
    write to it would be an error."""
    null = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(handle).st_mode):  # a closed terminal no longer counts as one: os.isatty is False
                os.dup2(null, handle)
    os.close(null)


class Stdout:
    """Stdout for a run that must not end with it: where a write fails (`| head` has ended, the terminal is closed, the
    disk is full), all further output is discarded."""

    def __init__(self) -> None:
        self.stream = sys.stdout  # rich replaces sys.stdout while a bar is shown

    def write(self, text: str) -> int:
        with self._discarding():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._discarding():
            self.stream.flush()

    def discard(self) -> None:
        """Redirect to the null device, with the buffered text."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.discard()


def counted(number: int, noun: str) -> str:
    """A count with its noun: "1 rank", "4 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def say(text: str) -> None:
    """Print a line on stdout, if that is possible."""
    print(text, file=Stdout(), flush=True)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show what the command is doing until the block ends: on a terminal, a line with a count of seconds that is
    removed at the end; elsewhere, a plain line."""
    if not sys.stdout.isatty():
        say(text)
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=cast(IO[str], Stdout())), transient=True) as line:
        line.add_task(text, total=None)
        yield
