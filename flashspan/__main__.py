"""The entry point of the `flashspan` command and of `python -m flashspan`."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command. Ctrl-C during the imports ends the process at once: there is nothing to clean up, and otherwise
    Python would print a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # otherwise the parent process has set SIGINT to be ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from flashspan.cli import main as run

    signal.signal(signal.SIGINT, before)
    return run()


if __name__ == "__main__":
    sys.exit(main())
