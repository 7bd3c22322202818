"""manifest.json: the size and the hash of each file in a folder, to detect damage later."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from flashspan.files import read_json

MANIFEST = "manifest.json"


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Write a folder's manifest, from the present content of these files."""
    files = {name: {"bytes": (folder / name).stat().st_size, "blake2b": hash_file(folder / name)} for name in names}
    (folder / MANIFEST).write_text(json.dumps(files, indent=2))


def find_damage(folder: Path, needed: Iterable[str]) -> str | None:
    """A description of the damage of a folder's files; None if its manifest lists all `needed` files, and all listed
    files match it. ValueError if the manifest cannot be read."""
    manifest = read_json(folder / MANIFEST)
    if unlisted := sorted(set(needed) - set(manifest)):
        return f"{', '.join(unlisted)} is missing from its manifest"
    for name, about in manifest.items():
        if Path(name).name != name:
            return f"its manifest lists {name!r}, which is not a file name"
        if not isinstance(about, dict) or not {"bytes", "blake2b"} <= set(about):
            return f"its manifest has no size and hash of {name}"
        file = folder / name
        if not file.is_file():
            return f"{name} is {'not a regular file' if os.path.lexists(file) else 'missing'}"
        if file.stat().st_size != about["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {about['bytes']}"
        if hash_file(file) != about["blake2b"]:
            return f"the hash of {name} does not match its manifest"
    return None


def hash_file(path: Path) -> str:
    """The hash of a file's bytes, as in a manifest."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=20)).hexdigest()
