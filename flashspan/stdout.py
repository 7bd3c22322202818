"""Writing to stdout: a closed one, such as after `| head`, and long waits."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


def discard_stdout() -> None:
    """Redirect stdout to the null device, with its buffered text: otherwise Python's last flush prints an error."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def say(text: str) -> None:
    """Print a line on stdout. If that fails (`| head` has ended, the disk is full), discard all further output instead
    of ending the run."""
    try:
        print(text, flush=True)
    except OSError:
        discard_stdout()


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show what the command is doing until the block ends: on a terminal, a line with a count of seconds that is
    removed at the end; elsewhere, a plain line."""
    if not sys.stdout.isatty():
        say(text)
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), transient=True) as line:
        line.add_task(text, total=None)
        yield
