"""Documents in files, cut into parts that any process can read alone: text, JSONL, Parquet, Hugging Face datasets.

The parts depend on the inputs, and for text files on the tokenizer; they do not depend on the number of processes.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from flashspan.files import parse_json

PART_BYTES = 2**22
PART_ROWS = 2**12
NEAR, LINE, TRIES = 2**10, 2**16, 16
"""To find a line end at which a text can be split: bytes compared on either side, the longest line, lines tried."""


@dataclass(frozen=True)
class Part:
    """A part of one source: bytes of a JSONL file, a row group of Parquet, rows of a dataset, or bytes of a text file,
    which is one document."""

    kind: str
    source: str
    begin: int
    end: int
    size: int  # for the progress bar


def cut(inputs: Sequence[str], dataset: str = "", split: str = "train") -> list[Part]:
    """All parts of these files and this dataset, in order."""
    return [part for name in inputs for part in _cut_file(Path(name))] + (_cut_dataset(dataset, split))


def identify(inputs: Sequence[str], dataset: str, split: str) -> list[Any]:
    """A value that changes when an input changes."""
    files = [[str(Path(name).resolve()), Path(name).stat().st_size, Path(name).stat().st_mtime_ns] for name in inputs]
    return [*files, _open_dataset(dataset, split)._fingerprint] if dataset else files


def read(part: Part, field: str) -> Iterator[str]:
    """The documents of a part of any kind except "text"."""
    return {"lines": _read_lines, "parquet": _read_parquet, "dataset": _read_dataset}[part.kind](part, field)


def read_text(part: Part, may_cut: Callable[[str, str], bool]) -> tuple[str, bool, bool]:
    """The text of a part of a text file, and whether it is the first and the last part of the file.

    A part begins and ends at line ends where `may_cut(text before, text after)` is true. If there is none nearby, a
    part is empty and the one before it is longer. CRLF becomes LF; a byte order mark at the beginning is removed.
    """
    size, end, at = Path(part.source).stat().st_size, None, part.end
    with open(part.source, "rb") as stream:
        begin = _find_cut(stream, part.begin, size, may_cut)
        if begin is None:
            return "", False, False
        while end is None:
            end, at = size if at >= size else _find_cut(stream, at, size, may_cut), at + PART_BYTES
        stream.seek(begin)
        data = stream.read(end - begin)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        where = f"byte {begin + error.start:,}, {data[error.start]:#x}"
        raise ValueError(f"{part.source} is not UTF-8 text: {where}, is {error.reason}; convert it") from error
    return _with_newlines(text if begin else text.removeprefix("\ufeff")), begin == 0, end == size


def _find_cut(stream: BinaryIO, at: int, size: int, may_cut: Callable[[str, str], bool]) -> int | None:
    """The end of the first line at or after byte `at` where the text may be cut; None if there is none nearby."""
    if at == 0:
        return 0
    stream.seek(at)
    for _ in range(TRIES):
        ended = stream.readline(LINE).endswith(b"\n")
        here = stream.tell()
        if not ended or here >= min(at + PART_BYTES, size):
            return None
        stream.seek(max(0, here - NEAR))
        around = stream.read(min(NEAR, here)), stream.read(NEAR)  # may begin or end inside a character
        if may_cut(*(_with_newlines(near.decode(errors="ignore")) for near in around)):
            return here
        stream.seek(here)
    return None


def _with_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _cut_file(path: Path) -> list[Part]:
    if not path.is_file():
        if path.is_dir():
            raise ValueError(f"{path} is a folder: give the files in it")
        if path.exists():
            raise ValueError(f"{path} is a pipe or a device, which cannot be read twice: write its text to a file")
        raise ValueError(f"{path} does not exist: give a .txt, .jsonl or .parquet file, or --dataset NAME")
    size, suffix = path.stat().st_size, path.suffix.lower()
    if suffix in (".txt", ".md", ""):
        return _cut_bytes("text", path, size)
    if suffix == ".jsonl":
        return _cut_bytes("lines", path, size)
    if suffix == ".parquet":
        about = _open_parquet(str(path)).metadata
        groups = [about.row_group(i) for i in range(about.num_row_groups)]
        return [Part("parquet", str(path), i, i + 1, group.total_byte_size) for i, group in enumerate(groups)]
    raise ValueError(f"{path} must be a .txt, .jsonl or .parquet file: convert {path.suffix} files first")


def _cut_bytes(kind: str, path: Path, size: int) -> list[Part]:
    ends = [(at, min(at + PART_BYTES, size)) for at in range(0, size, PART_BYTES)]
    return [Part(kind, str(path), begin, end, end - begin) for begin, end in ends]


def _cut_dataset(name: str, split: str) -> list[Part]:
    num_rows = len(_open_dataset(name, split)) if name else 0
    starts = range(0, num_rows, PART_ROWS)
    source = json.dumps([name, split])
    return [Part("dataset", source, at, min(at + PART_ROWS, num_rows), min(PART_ROWS, num_rows - at)) for at in starts]


def _read_lines(part: Part, field: str) -> Iterator[str]:
    """The documents of the lines that begin in these bytes. Blank lines are skipped."""
    with open(part.source, "rb") as stream:
        if part.begin:
            stream.seek(part.begin - 1)
            stream.readline()
        while (at := stream.tell()) < part.end:
            line = stream.readline()
            if not line.strip():
                continue
            try:
                row = parse_json(line)
                text = _text_of(row[field])
            except KeyError:
                fault = f"it has {', '.join(row) or 'no keys'}; give the key of its text with --field"
            except (ValueError, TypeError) as error:
                fault = f"{error}; repair or drop it"
            else:
                yield text
                continue
            number = _line_number(stream, at)
            raise ValueError(f"{part.source} line {number} is not a JSON object with the key {field!r}: {fault}")


def _line_number(stream: BinaryIO, at: int) -> int:
    """The number, from 1, of the line that begins at this byte. Reads in blocks: a file may be larger than memory."""
    stream.seek(0)
    sizes = (min(PART_BYTES, at - begin) for begin in range(0, at, PART_BYTES))
    return 1 + sum(stream.read(size).count(b"\n") for size in sizes)


def _read_parquet(part: Part, field: str) -> Iterator[str]:
    file = _open_parquet(part.source)
    if field not in file.schema_arrow.names:
        raise ValueError(
            f"{part.source} has no column {field!r}: it has {', '.join(file.schema_arrow.names)}; give one with --field"
        )
    try:
        values = file.read_row_group(part.begin, columns=[field]).column(0)
    except (ValueError, OSError) as error:  # pyarrow raises both, with several lines, and often without the file
        raise ValueError(
            f"row group {part.begin} of {part.source} cannot be read: {' '.join(str(error).split())}; fetch it again"
        ) from error
    for number, value in enumerate(values):
        try:
            text = _text_of(value.as_py())
        except ValueError as error:  # also for bytes that are not UTF-8
            where = f"row {number} of row group {part.begin}"
            raise ValueError(f"{part.source} has no UTF-8 text in {where}: {error}; repair or drop it") from error
        yield text


def _read_dataset(part: Part, field: str) -> Iterator[str]:
    rows = _open_dataset(*json.loads(part.source))
    if field not in rows.column_names:
        raise ValueError(f"the dataset has no column {field!r}: it has {', '.join(rows.column_names)}; use --field")
    for number, text in enumerate(rows[part.begin : part.end][field], part.begin):
        try:
            checked = _text_of(text)
        except ValueError as error:
            raise ValueError(f"the dataset has no UTF-8 text in row {number}: {error}; repair or drop it") from error
        yield checked


def _text_of(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the value is of type {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{value[error.start]!a} is an unpaired surrogate") from error
    return value


@lru_cache(maxsize=1)  # parts of a file are consecutive, and many files cannot all be open
def _open_parquet(path: str) -> Any:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{path}: Parquet files need pyarrow: pip install 'flashspan[parquet]'")
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except (ValueError, OSError) as error:  # pyarrow raises both
        raise ValueError(f"{path} is not a Parquet file: {' '.join(str(error).split())}") from error


@cache
def _open_dataset(name: str, split: str) -> Any:
    """A dataset of the Hub, or a folder that `save_to_disk` wrote."""
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"{name}: Hugging Face datasets need a package: pip install 'flashspan[datasets]'")
    import datasets

    if not Path(name).is_dir():
        return datasets.load_dataset(name, split=split)
    found = datasets.load_from_disk(name)
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"{name} has no split {split!r}: it has {', '.join(map(str, found))}; use --split")
        return found[split]
    return found
