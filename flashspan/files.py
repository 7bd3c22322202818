"""Files and folders that commands read and write, checked before their content is used."""

from __future__ import annotations

import errno
import json
import os
import select
import stat
import time
import tomllib
from pathlib import Path
from typing import Any, NoReturn

MAX_TEXT_BYTES = 16 * 2**20
"""The largest JSON or TOML file that is read."""
MAX_LINES_BYTES = 2**28
"""The largest file of rows or prompts, one per line, that is read."""
PIPE_SECONDS = 3.0
"""The seconds after which a named pipe without a writer is refused."""


def make_folder(path: str | Path, option: str) -> Path:
    """Create the folder if it is missing; if that fails, ValueError with the option to change."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null byte in its name
        raise _no_folder(path, error, option) from error
    return path


def check_folder(path: str | Path, option: str) -> None:
    """ValueError if `make_folder` would fail, as far as can be seen without creating the folder."""
    path = Path(path).absolute()
    try:
        for place in (path, *path.parents):
            try:
                place.lstat()
            except FileNotFoundError:
                continue
            if not stat.S_ISDIR(place.stat().st_mode):  # for a link, its target
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            if not os.access(place, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
    except (OSError, ValueError) as error:
        raise _no_folder(path, error, option) from error


def _no_folder(path: Path, error: OSError | ValueError, option: str) -> ValueError:
    why = error.strerror if isinstance(error, OSError) else error
    return ValueError(f"the folder {str(path)[:200]} cannot be made: {why}; choose another with {option}")


def require_file(path: str | Path, remedy: str = "") -> Path:
    """The path of a regular file. ValueError for anything else: a pipe or a device would block, or never end."""
    path = Path(path)
    remedy = f": {remedy}" if remedy else ""
    try:
        if path.is_file():
            return path
        kind = "is missing" if not os.path.lexists(path) else "is not a regular file"
    except (OSError, ValueError) as error:  # a name that is too long, a loop of links, a null byte
        raise ValueError(f"{str(path)[:200]!r} cannot be opened: {error}{remedy}") from error
    raise ValueError(f"{path} {'is a folder, not a file' if path.is_dir() else kind}{remedy}")


def read_bytes(path: str | Path, remedy: str = "", *, limit: int = MAX_TEXT_BYTES) -> bytes:
    """The bytes of a small file, or of a pipe such as `<(command)`; ValueError if there are more than `limit`."""
    path = Path(path)
    if path.is_fifo():
        return _read_pipe(path, limit)
    size = require_file(path, remedy).stat().st_size
    if size > limit:
        _refuse_size(path, f"{size:,}", limit)
    return path.read_bytes()


def _read_pipe(path: Path, limit: int) -> bytes:
    """The bytes that are written to a pipe. A pipe without a writer is refused after PIPE_SECONDS."""
    data, deadline, written = bytearray(), time.monotonic() + PIPE_SECONDS, False
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                piece = os.read(handle, 2**16)
            except BlockingIOError:  # a writer exists, but has written nothing yet
                written = True
                select.select([handle], [], [])
                continue
            data += piece
            if len(data) > limit:
                _refuse_size(path, f"more than {limit:,}", limit)
            if not piece and (written or data):
                return bytes(data)
            if not piece and time.monotonic() > deadline:
                raise ValueError(f"{path} is a pipe without a writer: give a file, or start the writer first")
            if not piece:
                time.sleep(0.02)
    finally:
        os.close(handle)


def _refuse_size(path: Path, size: str, limit: int) -> NoReturn:
    raise ValueError(f"{path} has {size} bytes: at most {limit:,} are read")


def parse_json(text: str | bytes, *, strict: bool = False) -> Any:
    """A JSON value. ValueError also for brackets nested deeper than Python can read; with `strict`, also for NaN and
    Infinity, which Python writes but JSON does not have, and for a name that an object has twice."""
    try:
        if strict:
            return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_doubles)
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error


def parse_toml(text: str) -> dict[str, Any]:
    """A TOML document. ValueError also for brackets nested deeper than Python can read."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is set twice")
    return found


def read_json(path: str | Path, remedy: str = "") -> dict[str, Any]:
    """The JSON object in a small regular file."""
    data = read_bytes(require_file(path, remedy))
    try:
        found = parse_json(data.decode("utf-8"), strict=True)
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object: got a {type(found).__name__}")
    return found
