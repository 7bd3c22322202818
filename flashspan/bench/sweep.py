"""A sweep: measurements one after another, each recorded when it is done, none lost and none done twice.

Running out of memory is a result and is recorded as one; so is any other failure, with its reason.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
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

    known = {row.key: row for row in record.newest(record.read(path))} if path.exists() else {}
    todo = [job for job in jobs if again or any(row.key not in known for row in job.expected)]
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


def attempt(job: Job) -> list[Row]:
    """The rows of a job; if it cannot be done, what was expected, with the reason."""
    try:
        rows = list(job.measure())
    except (RuntimeError, MemoryError, NotImplementedError) as error:
        reason = OUT_OF_MEMORY if is_out_of_memory(error) else f"failed: {first_line(error)}"
        rows = [replace(row, status=reason) for row in job.expected]
    # The error is out of scope here, and with it the frames that held the tensors.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rows


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the machine, had no memory left."""
    words = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc")
    return isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or any(w in str(error) for w in words)


def first_line(error: BaseException) -> str:
    """What an error says, in a line: of a rank's traceback, the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines and "Traceback" in str(error) else (lines or [type(error).__name__])[0]
    return text[:200]


def missing(rows: Iterable[Row]) -> list[Row]:
    """Rows that say why there is no measurement."""
    return [row for row in rows if not row.ok]
