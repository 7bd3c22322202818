"""One row type for all measurements; tables, plots and pages are made from rows, never typed.

    append(rows, Path("runs/bench/model.jsonl"))      # writes every field; a .csv has only some columns
    rows = newest(read(Path("runs/bench/model.jsonl")))

A row is written as soon as it is measured, so a killed sweep keeps its finished rows; an incomplete last line is
ignored. `Row.key` identifies the measurement and where it ran: a repeated sweep skips keys that are already recorded.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean, quantiles, stdev
from typing import Any

import torch
from torch import Tensor

from flashspan.files import MAX_LINES_BYTES, parse_json, read_bytes, require_file
from flashspan.kernels import reference
from flashspan.kernels.contract import Problem
from flashspan.kernels.masks import Mask

FOLDER = Path("runs/bench")
"""The default folder of sweeps and of `flashspan report`."""
CSV_COLUMNS = 13
CSV_BENCHES = ("attention", "leaderboard", "random", "sparse", "trainer")
"""The benchmarks that write NAME.csv, where the name is also `Row.what`."""
CSV_MORE = {"random": ("status", "more")}
"""The further columns of a benchmark's CSV, after the first CSV_COLUMNS: failures, and numbers such as the seed."""
ERROR_ROWS = 512
"""The number of queries that `output_error` compares: evenly spaced, since in a causal mask the first see few keys."""
OK, OUT_OF_MEMORY = "ok", "out of memory"
POSITIVE = ("p20_ms", "p50_ms", "p80_ms", "mean_ms", "tflops")


@dataclass(frozen=True)
class Row:
    """A measurement: shape, implementation, pass, environment and results. Times are in milliseconds."""

    device: str
    torch: str
    triton: str
    commit: str
    shape: str
    impl: str
    kind: str  # forward, backward, both, ...: column "pass"
    p20_ms: float
    p50_ms: float
    p80_ms: float
    tflops: float
    error: float  # relative to float32 arithmetic on the same inputs
    peak_mib: float  # attention: without the inputs; models: all allocated memory
    # The thirteen above are the columns of a CSV (CSV_MORE: some have more); JSON lines have all.
    what: str = "attention"
    dtype: str = "bfloat16"
    ranks: int = 1
    mean_ms: float = math.nan
    std_ms: float = math.nan
    bytes: float = math.nan  # sent or moved by one rank
    status: str = OK  # or "out of memory", or "failed: reason"
    more: dict[str, Any] = field(default_factory=dict)  # further numbers of this kind of measurement

    @property
    def subject(self) -> tuple[object, ...]:
        """The measurement, without the environment."""
        return (self.what, self.shape, self.impl, self.kind, self.dtype, self.ranks)

    @property
    def key(self) -> tuple[object, ...]:
        """The measurement, its device and its PyTorch; not the commit, so that a sweep can resume after a commit."""
        return (*self.subject, self.device, self.torch)

    @property
    def ok(self) -> bool:
        return self.status == OK


def row(
    where: dict[str, Any],
    *,
    what: str,
    shape: str,
    impl: str,
    kind: str,
    dtype: str,
    samples_ms: Sequence[float] = (),
    tflop: float = math.nan,
    **rest: Any,
) -> Row:
    """A row from the times of single runs, and the work of one run in TFLOP."""
    times = summarise(samples_ms)
    known = {"error": math.nan, "peak_mib": math.nan, **times, **rest}
    return Row(
        **where,
        shape=shape,
        impl=impl,
        kind=kind,
        tflops=1e3 * tflop / known["p50_ms"],
        what=what,
        dtype=dtype,
        **known,
    )


def summarise(samples_ms: Sequence[float]) -> dict[str, float]:
    """p20, p50, p80, mean and standard deviation of times; nan if there are none."""
    names = ("p20_ms", "p50_ms", "p80_ms", "mean_ms", "std_ms")
    if not samples_ms:
        return dict.fromkeys(names, math.nan)
    times = list(samples_ms)
    cuts = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
    deviation = stdev(times) if len(times) > 1 else 0.0
    return dict(zip(names, (cuts[1], cuts[4], cuts[7], fmean(times), deviation), strict=True))


def append(rows: Iterable[Row], path: Path) -> None:
    """Add rows to a .csv or .jsonl file; they are on disk when this returns."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists() or not require_file(path).stat().st_size  # refuses a pipe
        cut = not fresh and not path.read_bytes().endswith(b"\n")  # after an incomplete line, begin a new one
        with path.open("a", newline="", encoding="utf-8") as file:
            if cut:
                file.write("\n")
            if path.suffix == ".csv":
                writer = csv.writer(file)
                columns = _columns(path)
                if fresh:
                    writer.writerow(_header(path))
                writer.writerows([_short(getattr(row, column.name)) for column in columns] for row in rows)
            else:
                file.writelines(json.dumps(as_written(item), allow_nan=False) + "\n" for item in rows)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(
            f"rows cannot be written to {path}: {error.strerror}; free some space, or use another folder"
        ) from error


def as_written(item: Row) -> dict[str, Any]:
    """A row as JSON: measured values with six digits, unknown ones as null."""
    return {name: _jsonable(value) for name, value in asdict(item).items()}


def kept(item: Row) -> Row:
    """A row as it will be read from a file, so that tables made now and later are equal."""
    return _row_of(as_written(item))


def read(path: Path) -> list[Row]:
    """The rows of a file that `append` wrote; ValueError for rows of another version."""
    require_file(path)
    return _read_csv(path) if path.suffix == ".csv" else _read_lines(path)


def files_of(folder: Path) -> list[Path]:
    """The files of a folder that may have rows: every .jsonl file, and the .csv files of CSV_BENCHES."""
    tables = (folder / f"{name}.csv" for name in CSV_BENCHES)
    return [*sorted(folder.glob("*.jsonl")), *(file for file in tables if file.exists())]


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each measurement, in the order in which measurements first appear."""
    return list({item.key: item for item in rows}.values())


@torch.no_grad()
def output_error(q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Mask) -> float:
    """The relative error of an attention's output compared with float32 arithmetic, on evenly spaced queries."""
    rows = range(0, q.shape[2], -(-q.shape[2] // ERROR_ROWS))
    part, scale = mask.slice(rows, range(k.shape[2])), q.shape[3] ** -0.5
    exact = reference.forward(q[:, :, :: rows.step].float(), k.float(), v.float(), Problem(part, scale)).out
    return float((out[:, :, :: rows.step].float() - exact).norm() / exact.norm())


def environment(device: torch.device) -> dict[str, Any]:
    """The first four columns of a row: device, torch, triton and commit."""
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    name = f"{platform.machine()}, {os.cpu_count()} cores"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {"device": name, "torch": torch.__version__, "triton": triton, "commit": commit()}


@functools.lru_cache(maxsize=1)
def commit() -> str:
    """The short hash of the checkout, with a + if the package differs from it, or "unknown" outside a checkout."""
    package = Path(__file__).parents[2]

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=package, check=False)
        return done.stdout.strip()

    try:
        found, changes = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "--", str(package))
    except OSError:  # no git
        return "unknown"
    return f"{found}{'+' if changes else ''}" if found else "unknown"


def find_device(name: str) -> torch.device:
    """The device to measure on: "auto" is the GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda: got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device: found none; use --device cpu")
    return torch.device(name)


def _read_csv(path: Path) -> list[Row]:
    if path.stem not in CSV_BENCHES:
        raise ValueError(f"a .csv of rows must have its benchmark's name ({', '.join(CSV_BENCHES)}): got {path}")
    text = read_bytes(path, limit=MAX_LINES_BYTES).decode(errors="replace")
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        header, columns = _header(path), _columns(path)
        if next(reader, None) != header:
            raise ValueError(
                f"{path} does not hold rows of this version: its first line must be {','.join(header)}; measure again"
            )
        lines = [line for line in reader if len(line) == len(columns)]
    except csv.Error as error:  # an unterminated field
        raise ValueError(f"{path} does not hold rows of this version: {error}; measure again") from error
    parsers: dict[str, Callable[[str], Any]] = {"float": float, "str": str}
    try:
        found: list[dict[str, Any]] = [
            {c.name: parsers.get(str(c.type), _parse_object)(v) for c, v in zip(columns, line, strict=True)}
            for line in lines
        ]
    except ValueError as error:
        raise ValueError(f"{path} does not hold rows of this version: {error}; measure again") from error
    return [Row(**values, what=path.stem) for values in found]


def _parse_object(text: str) -> dict[str, Any]:
    values = parse_json(text)
    if not isinstance(values, dict):
        raise ValueError(f"a column that must be a JSON object holds {text[:40]!r}")
    return values


def _read_lines(path: Path) -> list[Row]:
    names = {column.name: str(column.type) for column in fields(Row)}
    rows = []
    for number, line in enumerate(read_bytes(path, limit=MAX_LINES_BYTES).decode(errors="replace").splitlines(), 1):
        try:
            values = parse_json(line)
        except ValueError:
            continue  # incomplete after a kill
        differ = ["all"]
        if isinstance(values, dict):
            differ = sorted(set(values) ^ names.keys()) or [n for n, k in names.items() if not _fits(n, k, values[n])]
        if differ:
            raise ValueError(
                f"{path}, line {number}, does not hold a row of this version (different fields: "
                f"{', '.join(differ)}): move the file away and measure again"
            )
        rows.append(_row_of(values))
    return rows


def _row_of(values: dict[str, Any]) -> Row:
    """A row from JSON, in which unknown values are null."""
    unknown = {x.name: math.nan for x in fields(Row) if str(x.type) == "float" and values[x.name] is None}
    return Row(**values | unknown)


def _fits(name: str, kind: str, value: object) -> bool:
    """Whether a JSON value is valid for a field: text, a count, or a number that is not negative (a time: positive)."""
    if kind == "float":
        known = isinstance(value, int | float) and 0 <= value < math.inf
        return value is None or (known and (value != 0 or name not in POSITIVE))
    if kind == "int":
        return type(value) is int and value > 0
    return isinstance(value, str if kind == "str" else dict)


def _columns(path: Path) -> list[Field[Any]]:
    """The fields of a row that this CSV keeps."""
    further = CSV_MORE.get(path.stem, ())
    return [column for number, column in enumerate(fields(Row)) if number < CSV_COLUMNS or column.name in further]


def _header(path: Path) -> list[str]:
    return ["pass" if column.name == "kind" else column.name for column in _columns(path)]


def _short(value: object) -> object:
    if isinstance(value, dict):
        return json.dumps(_jsonable(value), allow_nan=False)
    return f"{value:.4g}" if isinstance(value, float) else value


def _jsonable(value: Any) -> Any:
    """A value for JSON: nan becomes null. Whole numbers are counts, of bytes or tokens, and stay exact."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if value.is_integer() else float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    return value
