"""Run a command line in a forked child, and return its output, exit code, time and memory, whatever it does."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from flashspan.cli import main

ADDRESS_SPACE = 3 * 2**30
"""Bytes of address space that a child may have beyond its parent's. It is more than it may use, for thread stacks."""


@dataclass(frozen=True)
class Outcome:
    code: int  # negative: the signal that ended the child
    out: str
    err: str
    seconds: float
    mib: float  # peak resident memory, minus that at the start


def run(words: list[str], folder: Path, *, limit_s: float) -> Outcome:
    """Run `flashspan` with these words in this folder. After `limit_s` seconds it is killed with all its processes.

    The child is a fork of this process, which has imported everything, because to start PyTorch would take seconds.
    """
    *files, resident = (folder.parent / f"{folder.name}.{name}" for name in ("out", "err", "resident"))
    begin = time.monotonic()
    child = os.fork()
    if not child:
        _become(words, folder, files, resident)
    ended = select.poll()
    handle = os.pidfd_open(child)
    ended.register(handle, select.POLLIN)
    in_time = ended.poll(1000 * limit_s)
    seconds = time.monotonic() - begin
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.close(handle)
    _, status, used = os.wait4(child, 0)
    out, err = (file.read_text(errors="replace") for file in files)
    code = os.waitstatus_to_exitcode(status) if in_time else -signal.SIGKILL
    return Outcome(code, out, err, seconds, (used.ru_maxrss - float(resident.read_text())) / 1024)


def _become(words: list[str], folder: Path, files: list[Path], resident: Path) -> None:
    """Run the command as the child. Its output goes to the files, its memory at the start, in KiB, to `resident`."""
    code = 70
    try:
        # Do not collect garbage: a gloo group that is destroyed in a fork waits for threads that do not exist there.
        gc.freeze()
        os.setsid()
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False, errors="replace") for number in (1, 2))  # noqa: SIM115
        resident.write_text(str(_status_kib("VmRSS")))
        os.chdir(folder)
        limit = int(1024 * _status_kib("VmSize")) + ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _status_kib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}:")).split()[1])
