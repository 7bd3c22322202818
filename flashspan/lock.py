"""One process at a time writes to a folder: a lock that ends with its process."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LOCK = ".lock"
"""The file that is locked; it stays, empty."""


@contextlib.contextmanager
def locked_folder(folder: str | Path, option: str = "--checkpoint.folder") -> Iterator[None]:
    """Hold a folder for one run; ValueError, naming the option to change, where another holds it. The hold ends with
    its process, whatever ends it: the file stays, and says nothing."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK), "rb")  # a pipe would block
    except OSError as error:
        raise ValueError(
            f"the folder {folder} cannot be written to: {error.strerror} ({LOCK}); choose another with {option}"
        ) from error
    with lock:
        _lock(lock, folder, option)
        yield


def refuse_locked(folder: str | Path, option: str = "--checkpoint.folder") -> None:
    """ValueError where another run holds a folder; writes nothing."""
    file = Path(folder) / LOCK
    if file.is_file():
        with file.open("rb") as lock:
            _lock(lock, Path(folder), option)


def _lock(lock: BinaryIO, folder: Path, option: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"one run at a time writes to a folder: another is at work in {folder}; wait for it, stop it, or "
            f"choose another with {option}"
        ) from error
    except OSError:  # a file system without locks: two runs go unnoticed there, which is no reason to refuse one
        pass
