"""A scratch folder for the processes of one command: sockets, and the rendezvous file of ranks.

The process that made it removes it at its end. If that process is killed, the fork server removes it: the fork server
imports this module and ends with its clients. If both are killed, the next command removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing.process
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import BinaryIO

PREFIX, LOCK = "flashspan-run-", "lock"
VARIABLE = "FLASHSPAN_SCRATCH"
"""The environment variable with the folder that a fork server removes at its end. It is set only while one starts."""
LONGEST_PLACE = 107 - len(f"/{PREFIX}12345678/listener-12345678")
FRESH = 60.0
"""Seconds during which a folder without a lock may still be under construction."""

# By process id: a forked child must not use its parent's folder as its own.
_held: dict[int, tuple[Path, BinaryIO]] = {}


def folder() -> Path:
    """This process's scratch folder, made at the first call. multiprocessing creates its sockets there too."""
    if os.getpid() not in _held:
        clear_stale()
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_places()[-1]))
        lock = (path / "new").open("wb")
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        (path / "new").rename(path / LOCK)  # a lock with this name is held, or its process has ended
        _held[os.getpid()] = path, lock
        # Otherwise multiprocessing makes a folder pymp-*, which remains when this process is killed.
        multiprocessing.process.current_process()._config["tempdir"] = str(path)  # type: ignore[attr-defined]
        # This does not run in forked processes. It runs last, because sockets may be in use until then.
        Finalize(None, shutil.rmtree, args=(path,), kwargs={"ignore_errors": True}, exitpriority=-200)
    return _held[os.getpid()][0]


@contextlib.contextmanager
def removed_by_fork_server() -> Iterator[None]:
    """A fork server that is started inside this block removes the scratch folder when it ends."""
    os.environ[VARIABLE] = str(folder())
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def _places() -> list[Path]:
    """The folders in which scratch folders may be; new ones are made in the last. A socket's path has at most 107
    characters."""
    place = Path(tempfile.gettempdir())
    return [place] if len(os.fsencode(place)) <= LONGEST_PLACE else [place, Path("/tmp")]


def clear_stale() -> None:
    """Remove the scratch folders of killed processes: those with a free lock."""
    for path in (path for place in _places() for path in place.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            about = path.lstat()
            if not path.is_dir() or path.is_symlink() or about.st_uid != os.getuid():
                continue
            try:
                with (path / LOCK).open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except FileNotFoundError:
                if time.time() - about.st_mtime < FRESH:
                    continue
            shutil.rmtree(path, ignore_errors=True)


def _end_server(path: str) -> None:
    """Remove the folder and end immediately: unloading PyTorch takes seconds on a busy machine."""
    shutil.rmtree(path, ignore_errors=True)
    os._exit(0)


if VARIABLE in os.environ:  # this is a fork server
    Finalize(None, _end_server, args=(os.environ.pop(VARIABLE),), exitpriority=-200)
