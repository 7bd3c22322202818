"""Handling of a closed stdout, such as after `| head`."""

from __future__ import annotations

import os
import sys


def discard_stdout() -> None:
    """Redirect stdout to the null device, with its buffered text: otherwise Python's last flush prints an error."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
