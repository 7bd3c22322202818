"""One row per measurement, appended to a CSV; tables are made from rows, never typed."""

from __future__ import annotations

import csv
import platform
import subprocess
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """What was measured (shape, implementation, pass), where, and how it went. Times are milliseconds."""

    device: str
    torch: str
    triton: str
    commit: str
    shape: str
    impl: str
    kind: str  # forward, backward or both
    p20_ms: float
    p50_ms: float
    p80_ms: float
    tflops: float
    error: float  # relative to float32 arithmetic on the same inputs
    peak_mib: float  # beyond the inputs


def append(rows: list[Row], path: Path) -> None:
    """Add rows to the file, with its header if it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(_header())
        writer.writerows([_short(value) for value in asdict(row).values()] for row in rows)


def read(path: Path) -> list[Row]:
    """The rows of a file that `append` wrote."""
    with path.open(newline="") as file:
        reader = csv.reader(file)
        if next(reader, None) != _header():
            raise ValueError(f"{path} does not hold rows of this version: its first line must be {','.join(_header())}")
        numbers = {field.name for field in fields(Row) if field.type == "float"}
        names = [field.name for field in fields(Row)]
        lines = [dict(zip(names, line, strict=True)) for line in reader]
    rows: list[dict[str, Any]] = [{n: float(c) if n in numbers else c for n, c in line.items()} for line in lines]
    return [Row(**row) for row in rows]


def environment(device: torch.device) -> dict[str, str]:
    """The first four columns."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__, "commit": commit()}


def commit() -> str:
    """The short hash of the checkout, or "unknown" outside one."""
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return asked.stdout.strip() or "unknown"


def _header() -> list[str]:
    return ["pass" if field.name == "kind" else field.name for field in fields(Row)]


def _short(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value
