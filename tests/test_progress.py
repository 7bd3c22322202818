"""The progress that a long command shows."""

import contextlib
import io
import os
import pty
import subprocess
import sys
import time

import pytest

from flashspan import progress as module
from flashspan.progress import progress

SLOW = """
import time
from flashspan.progress import progress
with progress("work", total=3) as line:
    for _ in range(3):
        time.sleep(0.3)
        line.advance()
"""


def test_a_terminal_shows_a_line_that_moves() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", SLOW], stderr=theirs, env={**os.environ, "TERM": "xterm"}):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal is closed at the end
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    assert {b"0/3", b"1/3", b"2/3"} <= {shown[i : i + 3] for i in range(len(shown))}


def test_a_file_gets_few_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.02)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("work", total=2) as line:
        time.sleep(0.1)
        line.advance()
        time.sleep(0.3)
    lines = stream.getvalue().splitlines()
    counts = [text.split(",")[0] for text in lines]
    assert set(counts) == {"work 0/2", "work 1/2"}
    assert counts == sorted(counts)
    assert len(lines) <= 8
    monkeypatch.setattr(module, "EVERY_S", 10.0)
    with progress("work"):
        pass
    assert stream.getvalue().splitlines() == lines
