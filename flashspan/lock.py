"""A lock with which one process at a time writes to a folder. It is released when its process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LOCK = ".lock"
"""The name of the locked file, which is empty and stays."""


@contextlib.contextmanager
def locked_folder(folder: str | Path, option: str = "--checkpoint.folder") -> Iterator[None]:
    """Lock a folder for one run; ValueError, with the option to change, if another run has the lock. The lock is
    released when its process ends, even if it is killed. The file stays: alone, it locks nothing."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = os.fdopen(
            os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666), "rb"
        )  # a pipe would block
    except OSError as error:
        raise ValueError(
            f"the folder {folder} cannot be written to: {error.strerror} ({LOCK}); choose another with {option}"
        ) from error
    with lock:
        _lock(lock, folder, option)
        yield


def refuse_locked(folder: str | Path, option: str = "--checkpoint.folder") -> None:
    """ValueError if another run has locked the folder. Writes nothing."""
    file = Path(folder) / LOCK
    if file.is_file():
        with file.open("rb") as lock:
            _lock(lock, Path(folder), option, fcntl.LOCK_SH)  # several commands may check at the same time


def _lock(lock: BinaryIO, folder: Path, option: str, kind: int = fcntl.LOCK_EX) -> None:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"only one run at a time can write to a folder: another is at work in {folder}; wait for it, stop it, or "
            f"choose another with {option}"
        ) from error
    except OSError:  # a file system without locks, on which a second run is not detected
        pass
