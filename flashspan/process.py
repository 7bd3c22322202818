"""Processes: end this one together with its parent, and wait for the end of another."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

LONGEST = 1e6
"""The longest wait in seconds. Timers count milliseconds in 32 bits, whose limit is about twice as long."""


def wait_for_end(process: int, seconds: float = 10.0) -> None:
    """Wait until a killed process has ended and has released its locks. multiprocessing cannot do this if the fork
    server has died too."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or it has ended
        ended, handle = select.poll(), os.pidfd_open(process)
        ended.register(handle, select.POLLIN)
        ended.poll(1000 * seconds)
        os.close(handle)


def die_with(parent: int) -> None:
    """End this process when the fork server ends (by Linux) or when its parent ends (by a thread)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, here the fork server
    import threading

    server = os.getppid()

    def watch() -> None:
        try:
            ended = select.poll()
            ended.register(os.pidfd_open(parent), select.POLLIN)
            ended.poll()  # returns for a zombie too, which still has its process id
        except ProcessLookupError:
            pass
        except (AttributeError, OSError):  # not Linux, or an old kernel
            while os.getppid() == server != 1 and _exists(parent):
                time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True
