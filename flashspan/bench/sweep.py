"""A sweep: measurements one after another, each recorded when it is done, none lost and none done twice.

Running out of memory is a result and is recorded as one; so is any other failure, with its reason. What ran out of
memory is not tried again unless asked for; what failed is.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flashspan.bench import record
from flashspan.bench.record import OUT_OF_MEMORY, Row


@dataclass(frozen=True)
class Job:
    """`measure` gives a row for each of `expected`: rows that say what, without times."""

    expected: tuple[Row, ...]
    measure: Callable[[], Sequence[Row]]

    @property
    def name(self) -> str:
        first = self.expected[0]
        ranks = f" on {first.ranks} ranks" if first.ranks > 1 else ""
        return f"{first.what} {first.shape} {first.impl} {first.dtype}{ranks}"


@dataclass(frozen=True)
class Outcome:
    """What a sweep did: the rows it was about, old and new, and how many jobs are left for the next run."""

    rows: list[Row]
    num_measured: int
    num_left: int


def run(
    jobs: Sequence[Job], path: Path, *, again: bool = False, seconds: float | None = None, title: str = "sweep"
) -> Outcome:
    """Measure what the file does not hold yet (or everything, `again`); after `seconds` begin no further job."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    todo = list(jobs) if again else left(jobs, path)
    known = {row.key: row for row in record.read(path)} if path.exists() else {}
    record.append([], path)  # a folder that cannot be written to is found before anything is measured
    begin = time.monotonic()
    done = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(title, total=len(jobs), completed=len(jobs) - len(todo))
        for job in todo:
            if seconds is not None and time.monotonic() - begin > seconds:
                break
            bar.update(task, description=job.name)
            rows = attempt(job)
            record.append(rows, path)
            known |= {row.key: row for row in rows}
            done += 1
            for status in dict.fromkeys(row.status for row in rows if not row.ok):
                bar.console.print(f"{job.name}: {status}", markup=False, highlight=False)
            bar.advance(task)
    wanted = {row.key for job in jobs for row in job.expected}
    return Outcome([row for key, row in known.items() if key in wanted], done, len(todo) - done)


def left(jobs: Sequence[Job], path: Path) -> list[Job]:
    """The jobs that a file has no result of, or one with other settings (steps, warm-ups, ...)."""
    rows = record.newest(record.read(path)) if path.exists() else []
    known = {row.key: row.more for row in rows if row.ok or row.status == OUT_OF_MEMORY}

    def done(row: Row) -> bool:
        return row.key in known and record.as_written(row)["more"].items() <= known[row.key].items()

    return [job for job in jobs if not all(done(row) for row in job.expected)]


def attempt(job: Job) -> list[Row]:
    """The rows of a job; if it cannot be done, what was expected, with the reason."""
    try:
        rows = list(job.measure())
    except Exception as error:  # Triton's are no RuntimeErrors
        reason = OUT_OF_MEMORY if is_out_of_memory(error) else f"failed: {first_line(error)}"
        rows = [replace(row, status=reason) for row in job.expected]
    # The error is out of scope here, and with it the frames that held the tensors.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rows


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the machine, had no memory left."""
    words = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or any(w in str(error) for w in words)


def first_line(error: BaseException) -> str:
    """What an error says, in a line: of a rank's traceback, the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines and "Traceback" in str(error) else (lines or [type(error).__name__])[0]
    return text[:200]
