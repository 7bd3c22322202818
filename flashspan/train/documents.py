"""Documents in files, cut into parts that any process can read alone: text, JSONL, Parquet, Hugging Face datasets.

How inputs are cut depends on the inputs alone, never on who reads them.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

PART_BYTES = 2**22
PART_ROWS = 2**12


@dataclass(frozen=True)
class Part:
    """Some documents of one source: a text file, bytes of a JSONL file, a row group of Parquet, rows of a dataset."""

    kind: str
    source: str
    begin: int
    end: int
    size: int  # for the progress bar


def cut(inputs: Sequence[str], dataset: str = "", split: str = "train") -> list[Part]:
    """All parts of these files and this dataset, in order."""
    return [part for name in inputs for part in _cut_file(Path(name))] + (_cut_dataset(dataset, split))


def identify(inputs: Sequence[str], dataset: str, split: str) -> list[Any]:
    """What changes when an input does."""
    files = [[str(Path(name).resolve()), Path(name).stat().st_size, Path(name).stat().st_mtime_ns] for name in inputs]
    return [*files, _open_dataset(dataset, split)._fingerprint] if dataset else files


def read(part: Part, field: str) -> Iterator[str]:
    """The documents of a part."""
    return {"text": _read_text, "lines": _read_lines, "parquet": _read_parquet, "dataset": _read_dataset}[part.kind](
        part, field
    )


def _cut_file(path: Path) -> list[Part]:
    if not path.is_file():
        raise ValueError(f"{path} is missing" if not path.exists() else f"{path} is not a file: name the files in it")
    size, suffix = path.stat().st_size, path.suffix.lower()
    if suffix in (".txt", ".md", ""):
        return [Part("text", str(path), 0, size, size)]
    if suffix == ".jsonl":
        starts = range(0, size, PART_BYTES)
        return [Part("lines", str(path), at, min(at + PART_BYTES, size), min(PART_BYTES, size - at)) for at in starts]
    if suffix == ".parquet":
        about = _open_parquet(str(path)).metadata
        groups = [about.row_group(i) for i in range(about.num_row_groups)]
        return [Part("parquet", str(path), i, i + 1, group.total_byte_size) for i, group in enumerate(groups)]
    raise ValueError(f"{path}: .txt, .jsonl and .parquet files are read; convert {path.suffix} files first")


def _cut_dataset(name: str, split: str) -> list[Part]:
    num_rows = len(_open_dataset(name, split)) if name else 0
    starts = range(0, num_rows, PART_ROWS)
    source = json.dumps([name, split])
    return [Part("dataset", source, at, min(at + PART_ROWS, num_rows), min(PART_ROWS, num_rows - at)) for at in starts]


def _read_text(part: Part, field: str) -> Iterator[str]:
    """A whole file; as Python reads text, CRLF becomes LF. The mark that Windows puts before a text is none of it."""
    try:
        yield Path(part.source).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{part.source} is not UTF-8 text: {error}") from error


def _read_lines(part: Part, field: str) -> Iterator[str]:
    """The documents of the lines that begin in these bytes; a blank line is none."""
    with open(part.source, "rb") as stream:
        if part.begin:
            stream.seek(part.begin - 1)
            stream.readline()
        while (at := stream.tell()) < part.end:
            line = stream.readline()
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                text = _text_of(row[field])
            except KeyError:
                fault = f"it has {', '.join(row) or 'nothing'}; name the key of its text with --field"
            except (ValueError, TypeError, RecursionError) as error:
                fault = f"{error}; repair or drop it"
            else:
                yield text
                continue
            number = _line_number(stream, at)
            raise ValueError(f"{part.source} line {number} is not a JSON object with {field!r}: {fault}")


def _line_number(stream: BinaryIO, at: int) -> int:
    """Which line begins at this byte, counted from 1, a block at a time: files may be larger than the memory."""
    stream.seek(0)
    sizes = (min(PART_BYTES, at - begin) for begin in range(0, at, PART_BYTES))
    return 1 + sum(stream.read(size).count(b"\n") for size in sizes)


def _read_parquet(part: Part, field: str) -> Iterator[str]:
    file = _open_parquet(part.source)
    if field not in file.schema_arrow.names:
        raise ValueError(
            f"{part.source} has no column {field!r}: it has {', '.join(file.schema_arrow.names)}; name one with --field"
        )
    try:
        values = file.read_row_group(part.begin, columns=[field]).column(0)
    except (ValueError, OSError) as error:  # pyarrow's are both, of several lines, and may name no file
        raise ValueError(
            f"row group {part.begin} of {part.source} cannot be read: {' '.join(str(error).split())}; fetch it again"
        ) from error
    for number, value in enumerate(values):
        try:
            text = _text_of(value.as_py())
        except ValueError as error:  # of bytes that are no UTF-8, too
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
        raise ValueError(f"a {type(value).__name__} is no text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{value[error.start]!a} is half a character") from error
    return value


@lru_cache(maxsize=1)  # parts of a file come one after another, and of many files not all may be open
def _open_parquet(path: str) -> Any:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{path}: Parquet files need pyarrow: pip install 'flashspan[parquet]'")
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except (ValueError, OSError) as error:  # as above
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
