"""Folders that commands write to."""

from __future__ import annotations

from pathlib import Path


def make_folder(path: str | Path, option: str) -> Path:
    """The folder, made if it is not there; where it cannot be, a ValueError that names the option to change."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the folder {path} cannot be made: {error.strerror}; choose another with {option}") from error
    return path
