"""What a run shows and writes: a line a step, metrics.jsonl, a picture of the loss."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeAlias, cast

import torch

from flashspan.files import parse_json
from flashspan.plan.devices import DEVICES, is_named
from flashspan.stdout import Stdout, say

from .boards import Board


@dataclass(frozen=True)
class StepMetrics:
    """One step: the same numbers under any parallelism, apart from speed and memory."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    mfu: float
    memory_gib: float
    seconds: float


Report: TypeAlias = Callable[[StepMetrics], None]
"""What is called with the metrics of each step."""

MOST_SHOWN = 999
"""Runs of more steps do not show that number in each line, which would be wider than a terminal of 80 columns."""


def describe(metrics: StepMetrics, num_steps: int, left: float) -> str:
    """A step as a line of at most 79 characters, each field where it was in the line before; `left` is in seconds.
    Where the device's peak is not known, without mfu."""
    mfu = "" if math.isnan(metrics.mfu) else f"mfu {_fit(100 * metrics.mfu, 3)}% "
    total = f"/{num_steps}" if num_steps <= MOST_SHOWN else ""
    return (
        f"step {metrics.step:>{len(str(num_steps))}}{total} loss {_fit(metrics.loss, 6)} lr {metrics.lr:.1e} "
        f"norm {_fit(metrics.grad_norm, 5)} {_shorten(metrics.tokens_per_second)} tok/s {mfu}left {_span(left)}"
    )


def _span(seconds: float) -> str:
    """A time in five characters: 12:05 (minutes and seconds), 3h05m, 27.8h or 12.3d."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes:>2}:{rest:02}"
    if minutes < 600:
        return f"{minutes // 60}h{minutes % 60:02}m"
    return f"{_fit(minutes / 60, 4)}h" if minutes < 6000 else f"{_fit(minutes / 1440, 4)}d"


def _fit(value: float, width: int) -> str:
    """A number of 0 or more in `width` characters, with the decimals that there is room for."""
    whole = f"{value:.0f}"
    if len(whole) > width:
        return f"{value:.0e}"
    return f"{value:.{max(0, width - 1 - len(whole))}f}".rjust(width)


def _shorten(value: float) -> str:
    """A number up to 10 million in five characters: 4499 as 4.50k."""
    size, unit = next((pair for pair in ((1e6, "M"), (1e3, "k")) if value >= pair[0]), (1.0, ""))
    return f"{_fit(value / size, 4)}{unit}".rjust(5)


class Display:
    """The first rank's screen and files; every other rank has one that is silent."""

    def __init__(
        self,
        folder: Path,
        num_steps: int,
        *,
        active: bool,
        boards: Sequence[Board] = (),
        start: int = 0,
        saved: float = math.inf,
        report: Report | None = None,
    ) -> None:
        """`start`: the step that the run resumes from, whose state was `saved` at that time."""
        self.folder, self.num_steps, self.active, self.report = folder, num_steps, active, report
        self._times: list[float] = []
        """When the steps of this attempt ended."""
        self._bar: Any = None
        self._boards = boards
        self.status = "failed"
        """How the run ended, for the boards: set before the end by a run that does not fail."""
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._told = False
        self._log: io.FileIO | None = None
        try:
            if start:
                if aside := _put_back(folder / "metrics.jsonl", saved):
                    self.say(f"the metrics.jsonl of a run that left no checkpoint is kept as {aside}")
                _drop_later(folder / "metrics.jsonl", start)
            elif aside := _set_aside(folder / "metrics.jsonl"):
                self.say(f"the metrics.jsonl of an earlier run is kept as {aside}")
            # No buffer: a line that the disk refuses must not come again with the next one, or when the file is closed.
            self._log = _open_log(folder / "metrics.jsonl")
        except OSError as error:
            self._tell(error)
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, console=Console(file=cast(IO[str], Stdout())))
            self._task = self._bar.add_task("training", total=num_steps, completed=start)
            self._bar.start()
        if start < num_steps and num_steps > MOST_SHOWN:
            self.say(f"training to step {num_steps}")

    def say(self, text: str) -> None:
        """A line on the screen."""
        if not self.active:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            say(text)

    def step(self, metrics: StepMetrics) -> None:
        self._times.append(time.monotonic())
        self.say(describe(metrics, self.num_steps, self._left(metrics)))
        if len(self._times) == 2:  # when the moments of the optimizer are there
            self.say(f"memory: {metrics.memory_gib:.2f} GiB at most on the first rank so far")
        self._record({**asdict(metrics), "time": time.time()})
        if self.active and self.report is not None:
            self.report(metrics)
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step)

    def _left(self, metrics: StepMetrics) -> float:
        """Seconds to the last step, by all steps so far with what came between them."""
        spans = len(self._times) - 1
        each = (self._times[-1] - self._times[0]) / spans if spans else metrics.seconds
        return each * (self.num_steps - metrics.step)

    def now(self, text: str) -> None:
        """Say what comes after the last step and takes a while: in the bar, where there is one."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        else:
            self.say(text)

    def evaluation(self, step: int, loss: float) -> None:
        self.say(f"step {step}  validation loss {loss:.4f}")
        self._record({"step": step, "validation_loss": loss})

    def evaluated(self, step: int) -> bool:
        """Whether the validation loss of a step is recorded, or cannot be."""
        try:
            rows = read_metrics(self.folder / "metrics.jsonl")
        except OSError:
            return True
        return any(row["step"] == step and "validation_loss" in row for row in rows)

    def _record(self, row: dict[str, Any]) -> None:
        if not self.active:
            return
        # The mfu of a device whose peak is not known is no number, which JSON has no word for.
        row = {key: value for key, value in row.items() if value == value}
        try:
            if self._log is not None:
                _append(self._log, row)
            for board in self._boards:
                board.record(row["step"], {key: value for key, value in row.items() if key not in ("step", "time")})
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        """A curve with holes is worth a line on the screen, once, and not the run."""
        if not self._told:
            self.say(f"metrics were not written: {error}; training continues without them. Free space in {self.folder}")
            self._told = True

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        for board in self._boards:
            board.close(self.status if error is None else "failed")
        if self.active and self._log is not None:
            self._log.close()


def _open_log(file: Path) -> io.FileIO:
    """A file of rows to append to; OSError for a pipe, which would block until someone reads it."""
    if file.exists() and not file.is_file():
        raise OSError(f"{file} is not a regular file")
    return file.open("ab", buffering=0)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a line that a kill cut short, or a disk damaged, is skipped."""
    return _rows(file.read_bytes().splitlines() if file.is_file() else [])


def _rows(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Those lines that are rows."""
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = parse_json(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def _append(log: io.FileIO, row: dict[str, Any]) -> None:
    """Add a row, or nothing: what a disk that fills took of it would end the file for a reader."""
    line = (json.dumps(row) + "\n").encode()
    end = log.seek(0, os.SEEK_END)
    try:
        if log.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            log.truncate(end)
        raise


def _set_aside(file: Path) -> Path | None:
    """Rename a file of rows to the first numbered name that is free, which is returned; None where there are none."""
    if not file.is_file() or not file.stat().st_size:
        return None
    names = (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in itertools.count(1))
    return file.rename(next(name for name in names if not name.exists()))


def _put_back(file: Path, saved: float) -> Path | None:
    """Set aside the rows of a run that started after the last checkpoint was saved and left none of its own, and put
    back the rows of the run that resumes. Returns the new path of the rows that were set aside, or None."""
    if _began(file) <= saved:
        return None
    older = [path for path in file.parent.glob(f"{file.stem}-*{file.suffix}") if _began(path) <= saved]
    aside = _set_aside(file)
    if older:
        max(older, key=_began).rename(file)
    return aside


def _began(file: Path) -> float:
    """When the first of a file's rows was written, as far as they say."""
    times = (row.get("time") for row in read_metrics(file))
    return next((time for time in times if isinstance(time, float)), -math.inf)


def _drop_later(file: Path, start: int) -> None:
    """Forget the rows of steps that will be taken again, so that a curve has each step once, and half a line at the
    end. The file is cut: for that no disk is too full."""
    if not file.is_file():
        return
    with file.open("r+b") as stream:
        kept = 0
        for line in stream:
            if not line.endswith(b"\n") or any(row["step"] > start for row in _rows([line])):
                break
            kept += len(line)
        stream.truncate(kept)


def draw_loss(folder: Path) -> Path | None:
    """A picture of the loss so far, loss.png; None when there is nothing to draw."""
    rows = read_metrics(folder / "metrics.jsonl")
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    if not train:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*train, strict=True), label="training", linewidth=1.2)
    held_out = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", label="validation", markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(folder / "loss.png", dpi=150)
    return folder / "loss.png"


def peak_flops(device: torch.device, num_ranks: int, dtype: str) -> float:
    """Operations per second that all ranks' GPUs could do in matmuls of this dtype, by their data sheet.

    nan where that is not known. On a CPU it never is: a peak timed on a busy machine would differ from run to run.
    """
    if device.type != "cuda":
        return math.nan
    name, tf32 = torch.cuda.get_device_name(device), torch.get_float32_matmul_precision() != "highest"
    peaks = (
        known.peak(4 if dtype == "float32" else 2, tf32=tf32)
        for known in DEVICES.values()
        if is_named(known.name, name)
    )
    return num_ranks * next(peaks, math.nan)


def memory_gib(device: torch.device) -> float:
    """The most memory this rank has held: allocated on its GPU, or resident in its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
