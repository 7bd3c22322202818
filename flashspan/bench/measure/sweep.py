"""A sweep: measurements one after another. Each is recorded when it is done, and skipped when the sweep is repeated.

    run(jobs, path)                                               # in this process
    with Apart(limit=90) as apart: run(jobs, path, attempt=apart)  # in another process, which may die or hang
    prepare(jobs, seconds=120)                                    # before: compile their kernels in parallel

Failures are recorded with their reason, and so is running out of memory. A repeated sweep tries failed measurements
again, but not those that ran out of memory.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import math
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from flashspan.bench.measure import record
from flashspan.bench.measure.record import OUT_OF_MEMORY, Row
from flashspan.progress import progress

START = "spawn"
"""The start method of processes: a new interpreter, which inherits no CUDA state."""


@dataclass(frozen=True)
class Job:
    """`measure` returns a row for each of `expected`, which are rows without times.

    `prepare` compiles in advance, to the disk cache; jobs that need the same kernels have equal ones. Jobs in other
    processes share a process if their `process` is the same name; a job with None gets a new one. `part` is set if
    several implementations take turns in this job: it returns a job of some of the rows.
    """

    expected: tuple[Row, ...]
    measure: Callable[[], Sequence[Row]]
    prepare: functools.partial[Any] | None = None
    process: str | None = "timed"
    part: Callable[[Sequence[Row]], Job] | None = None

    @property
    def num_in_turns(self) -> int:
        """The number of implementations that take turns; 1 if none do."""
        return len({name_of(row) for row in self.expected}) if self.part else 1

    @property
    def name(self) -> str:
        if self.num_in_turns == 1:
            return name_of(self.expected[0])
        widest = max(self.expected, key=lambda row: row.ranks)  # the case of one device has fewer ranks
        return name_of(replace(widest, impl=f"{self.num_in_turns} in turns"))


def name_of(row: Row) -> str:
    """The name of a row's measurement, for messages."""
    ranks = f" on {row.ranks} ranks" if row.ranks > 1 else ""
    return f"{row.what} {row.shape} {row.impl} {row.dtype}{ranks}"


@dataclass(frozen=True)
class Outcome:
    """The result of a sweep: its rows, old and new, and the number of measurements left for the next run."""

    rows: list[Row]
    num_measured: int
    num_left: int
    num_known: int = 0  # recorded before the sweep began
    seconds: dict[str, float] = field(default_factory=dict)  # spent on each kind of measurement

    def note(self, path: Path) -> str:
        """A summary, as text."""
        known = f", {self.num_known} recorded earlier (--again repeats them)" if self.num_known else ""
        return f"{self.num_measured} measured{known}, rows in {path}"


class OutOfTime(Exception):
    """The sweep's time is over; the current job is left for the next run."""


def run(
    jobs: Sequence[Job],
    path: Path,
    *,
    again: bool = False,
    seconds: float | None = None,
    title: str = "sweep",
    attempt: Callable[[Job], list[Row]] | None = None,
) -> Outcome:
    """Measure everything that the file does not have yet (with `again`, everything); after `seconds`, start no job."""
    attempt = attempt or attempt_here
    todo = list(jobs) if again else left(jobs, path)
    known = {row.key: row for row in record.read(path)} if path.exists() else {}
    record.append([], path)  # an error here, before any measurement, if the folder is not writable
    begin = time.monotonic()
    wanted = {row.key for job in jobs for row in job.expected}
    total, missing, done = sum(job.num_in_turns for job in jobs), sum(job.num_in_turns for job in todo), 0
    spent: dict[str, float] = defaultdict(float)
    with progress(title, total, completed=total - missing) as line:
        for job in todo:
            started = time.monotonic()
            if seconds is not None and started - begin > seconds:
                break
            line.show(job.name)
            try:
                rows = attempt(job)
            except OutOfTime:
                break
            record.append(rows, path)
            spent[job.expected[0].what] += time.monotonic() - started
            known |= {row.key: row for row in rows}
            done += job.num_in_turns
            failed = {(row.impl, row.status): row for row in reversed(rows) if not row.ok}
            for row in reversed(failed.values()):
                line.print(f"{name_of(row)}: {row.status}")
            line.advance(job.num_in_turns)
    about = [row for key, row in known.items() if key in wanted]
    return Outcome(about, done, missing - done, total - missing, dict(spent))


def left(jobs: Sequence[Job], path: Path) -> list[Job]:
    """The jobs, or parts of jobs, that the file has no result for with the same settings (steps, warm-ups, ...)."""
    rows = record.newest(record.read(path)) if path.exists() else []
    known = {row.key: row.more for row in rows if row.ok or row.status == OUT_OF_MEMORY}

    def done(row: Row) -> bool:
        return row.key in known and record.as_written(row)["more"].items() <= known[row.key].items()

    missing = [(job, [row for row in job.expected if not done(row)]) for job in jobs]
    return [job.part(rows) if job.part else job for job, rows in missing if rows]


def attempt_here(job: Job) -> list[Row]:
    """The rows of a job; if it fails, the expected rows with the reason."""
    if job.process is None:
        with Apart() as apart:
            return apart(job)
    return _attempt(job)


def _attempt(job: Job) -> list[Row]:
    try:
        rows = list(job.measure())
    except Exception as error:  # Triton's errors are not RuntimeErrors
        rows = _failed(job, OUT_OF_MEMORY if is_out_of_memory(error) else f"failed: {first_line(error)}")
    # Here the error is out of scope, so the tensors in its frames are freed.
    _free()
    return rows


def _failed(job: Job, status: str) -> list[Row]:
    return [replace(row, status=status) for row in job.expected]


def _free() -> None:
    gc.collect()
    with contextlib.suppress(RuntimeError):  # the device is unusable after an illegal access
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Apart:
    """Runs jobs in another process. If a job dies, hangs or makes its device unusable, only its own rows are lost, and
    the next job gets a new process. Spare processes are started in advance, since imports take seconds.

    Jobs must be picklable: functions by name, and `functools.partial` of them. A job may take `limit` seconds. At
    `deadline` (of `time.monotonic`) the current job is ended and `OutOfTime` is raised.
    """

    def __init__(
        self, *, limit: float = math.inf, deadline: float = math.inf, spares: int = 1, modules: Sequence[str] = ()
    ) -> None:
        self.limit, self.deadline, self.modules = limit, deadline, tuple(modules)
        self._workers: dict[str, _Process] = {}
        self._spares = [_Process(self.modules) for _ in range(spares)]

    def __call__(self, job: Job) -> list[Row]:
        if time.monotonic() >= self.deadline:
            raise OutOfTime
        name = job.process
        worker = self._workers.pop(name, None) if name is not None else None
        worker = worker or (self._spares.pop(0) if self._spares else _Process(self.modules))
        seconds = min(self.limit, self.deadline - time.monotonic())
        usable = False
        try:
            rows, usable = worker.ask(functools.partial(_attempt, job), seconds)
        except TimeoutError:
            if time.monotonic() >= self.deadline:
                raise OutOfTime from None
            rows = _failed(job, f"failed: not done after {self.limit:g} s")
        except (EOFError, OSError):
            rows = _failed(job, f"failed: its process died ({worker.end(wait=2.0)})")
        finally:
            if usable and name is not None:
                self._workers[name] = worker
            else:
                worker.end()
        return list(rows)

    def close(self) -> None:
        """End all processes."""
        for process in (*self._spares, *self._workers.values()):
            process.end()
        self._spares, self._workers = [], {}

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prepare(
    jobs: Sequence[Job], *, seconds: float, num_processes: int | None = None, modules: Sequence[str] = ()
) -> int:
    """Run the `prepare` of all jobs, each once, in parallel processes; return the number that finished in time.

    The others are compiled when they are measured.
    """
    wanted = {(job.prepare.func, job.prepare.args): job.prepare for job in jobs if job.prepare is not None}
    todo = list(wanted.values())
    deadline = time.monotonic() + seconds
    pool = [_Process(tuple(modules)) for _ in range(min(len(todo), num_processes or os.cpu_count() or 1))]
    idle, busy = list(pool), dict[Connection, _Process]()
    done = 0
    try:
        while busy or (todo and idle):
            while todo and idle:
                process = idle.pop()
                process.pipe.send(functools.partial(_quietly, todo.pop(0)))
                busy[process.pipe] = process
            ready = wait(list(busy), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                process = busy.pop(pipe)
                with contextlib.suppress(EOFError, OSError):  # the process died
                    well, usable = pipe.recv()
                    done += well
                    idle += [process] if usable else []
    finally:
        for process in pool:
            process.end()
    return done


def _quietly(call: Callable[[], object]) -> bool:
    """Run a call; return whether it succeeded. If it fails, the measurement will report the reason."""
    try:
        call()
    except Exception:
        return False
    finally:
        _free()
    return True


class _Process:
    """A process that runs calls, and returns each result and whether the process is still usable."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        context = multiprocessing.get_context(START)
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, modules), daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        there.close()

    def ask(self, work: Callable[[], Any], seconds: float) -> tuple[Any, bool]:
        """Run a call. TimeoutError after these seconds; EOFError or OSError if the process has died."""
        self.pipe.send(work)
        if not self.pipe.poll(None if seconds == math.inf else max(0.0, seconds)):
            raise TimeoutError
        answer: tuple[Any, bool] = self.pipe.recv()
        return answer

    def end(self, wait: float = 0.0) -> str:
        """End the process, after waiting for one that is about to end; returns how it ended."""
        self.pipe.close()
        self.process.join(wait)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return f"exit code {self.process.exitcode}"


def _serve(pipe: Connection, modules: tuple[str, ...]) -> None:
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # collections after each job then skip the imported modules
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):  # the parent has ended
        while True:
            work = pipe.recv()
            pipe.send((work(), _usable()))
            del work  # frees a job's tensors


def _usable() -> bool:
    """Whether this process is usable: after an illegal access its device is not."""
    try:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine ran out of memory."""
    words = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or any(w in str(error) for w in words)


def first_line(error: BaseException) -> str:
    """An error in one line; for a traceback of a rank, its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines and "Traceback" in str(error) else (lines or [type(error).__name__])[0]
    return text[:200]
