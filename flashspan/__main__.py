"""The `flashspan` command from its first moment on, also as `python -m flashspan`."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command. Ctrl-C during the imports ends the process at once: there is nothing to clear away, and Python
    would print a traceback of imports."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # otherwise the parent process wants SIGINT ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from flashspan.cli import main as run

    signal.signal(signal.SIGINT, before)
    return run()


if __name__ == "__main__":
    sys.exit(main())
