"""The output of a run: a line per step on the screen, metrics.jsonl and loss.png."""

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
    """The metrics of one step. Only speed and memory depend on the parallelism config."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    mfu: float
    memory_gib: float
    seconds: float


Report: TypeAlias = Callable[[StepMetrics], None]
"""A function that is called with the metrics of each step."""

MOST_SHOWN = 999
"""If a run has more steps, their number is not in each line: the line would be wider than 80 columns."""


def describe(metrics: StepMetrics, num_steps: int, left: float) -> str:
    """A step as a line of at most 79 characters, with each field in the same column of every line. `left` is in
    seconds. The line has no mfu if the device's peak is unknown."""
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
    """A number of 0 or more in `width` characters, with as many decimals as fit."""
    whole = f"{value:.0f}"
    if len(whole) > width:
        return f"{value:.0e}"
    return f"{value:.{max(0, width - 1 - len(whole))}f}".rjust(width)


def _shorten(value: float) -> str:
    """A number up to 10 million in five characters: 4499 as 4.50k."""
    size, unit = next((pair for pair in ((1e6, "M"), (1e3, "k")) if value >= pair[0]), (1.0, ""))
    return f"{_fit(value / size, 4)}{unit}".rjust(5)


class Display:
    """The output of the first rank, on the screen and in files. On the other ranks it is inactive."""

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
        """`start`: the step from which the run resumes. `saved`: the time at which its checkpoint was saved."""
        self.folder, self.num_steps, self.active, self.report = folder, num_steps, active, report
        self._times: list[float] = []
        """The times at which the steps of this attempt ended."""
        self._bar: Any = None
        self._boards = boards
        self.status = "failed"
        """The status of the run, for the boards. A run that does not fail sets it before the end."""
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
            # Unbuffered: a buffer would write a line that has failed again, with the next line or at close.
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
        """Print a line on the screen."""
        if not self.active:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            say(text)

    def step(self, metrics: StepMetrics) -> None:
        self._times.append(time.monotonic())
        self.say(describe(metrics, self.num_steps, self._left(metrics)))
        if len(self._times) == 2:  # the moments of the optimizer are allocated by now
            self.say(f"memory: at most {metrics.memory_gib:.2f} GiB on the first rank so far")
        self._record({**asdict(metrics), "time": time.time()})
        if self.active and self.report is not None:
            self.report(metrics)
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step)

    def _left(self, metrics: StepMetrics) -> float:
        """The estimated seconds to the last step, from the steps so far and the evaluations and saves between them."""
        spans = len(self._times) - 1
        each = (self._times[-1] - self._times[0]) / spans if spans else metrics.seconds
        return each * (self.num_steps - metrics.step)

    def now(self, text: str) -> None:
        """Show the work that follows the last step: in the progress bar if there is one, else as a line."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        else:
            self.say(text)

    def evaluation(self, step: int, loss: float) -> None:
        self.say(f"step {step}  validation loss {loss:.4f}")
        self._record({"step": step, "validation_loss": loss})

    def evaluated(self, step: int) -> bool:
        """Whether metrics.jsonl has the validation loss of a step. Also True if the file cannot be read."""
        try:
            rows = read_metrics(self.folder / "metrics.jsonl")
        except OSError:
            return True
        return any(row["step"] == step and "validation_loss" in row for row in rows)

    def _record(self, row: dict[str, Any]) -> None:
        if not self.active:
            return
        # Leave out NaN, which JSON does not have: the mfu of a device with an unknown peak.
        row = {key: value for key, value in row.items() if value == value}
        try:
            if self._log is not None:
                _append(self._log, row)
            for board in self._boards:
                board.record(row["step"], {key: value for key, value in row.items() if key not in ("step", "time")})
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        """Print the first error of writing metrics. Training continues without them."""
        if not self._told:
            self.say(
                f"metrics were not written: {error}; training continues without them. Is there space in {self.folder}?"
            )
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
    """Open a file of rows to append to. OSError for a pipe: it would block until another process reads it."""
    if file.exists() and not file.is_file():
        raise OSError(f"{file} is not a regular file")
    return file.open("ab", buffering=0)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; truncated and damaged lines are skipped."""
    return _rows(file.read_bytes().splitlines() if file.is_file() else [])


def _rows(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The rows in these lines; other lines are skipped."""
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = parse_json(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def _append(log: io.FileIO, row: dict[str, Any]) -> None:
    """Append a whole row. If the disk is full, remove the part that was written and raise OSError."""
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
    """Rename a file of rows to the first free numbered name. Returns the new path; None if there are no rows."""
    if not file.is_file() or not file.stat().st_size:
        return None
    names = (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in itertools.count(1))
    return file.rename(next(name for name in names if not name.exists()))


def _put_back(file: Path, saved: float) -> Path | None:
    """If the file has the rows of a run that began after the checkpoint was saved, and saved none itself, set them
    aside and put back the rows of the run that resumes. Returns the new path of the rows that were set aside, or None.
    """
    if _began(file) <= saved:
        return None
    older = [path for path in file.parent.glob(f"{file.stem}-*{file.suffix}") if _began(path) <= saved]
    aside = _set_aside(file)
    if older:
        max(older, key=_began).rename(file)
    return aside


def _began(file: Path) -> float:
    """The first time in a file's rows; -inf if they have none."""
    times = (row.get("time") for row in read_metrics(file))
    return next((time for time in times if isinstance(time, float)), -math.inf)


def _drop_later(file: Path, start: int) -> None:
    """Truncate the file before the rows of steps after `start`, which will be repeated, or before an incomplete last
    line. This works on a full disk too."""
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
    """Draw the loss so far into loss.png. Returns its path; None if there is nothing to draw."""
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
    """The peak FLOPS of all ranks' GPUs in matmuls of this dtype, from their data sheet; NaN if unknown.

    It is always NaN on a CPU: a peak that was measured on a busy machine would differ from run to run.
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
    """The peak memory of this rank in GiB: allocated on its GPU, or resident in its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
