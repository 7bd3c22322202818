"""The `flashspan` command from its first moment on: outside of the package, whose import takes seconds."""

from __future__ import annotations

import signal


def main() -> int:
    """Until the package is there Ctrl-C ends the process as it would any other: nothing needs to be cleared away, and
    Python's answer would be a page of modules that were being imported."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else whoever started this wants it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from flashspan.cli import main as run

    signal.signal(signal.SIGINT, before)
    return run()
