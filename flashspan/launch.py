"""Start ranks on this machine and run functions on them: a process group for tests, checks and commands.

    with Ranks(4) as ranks:
        results = ranks.run(fn, arg)      # fn(arg) on each rank; a list of 4 results

Under torchrun the ranks exist already, and this module is not needed. Rendezvous uses a file, and gloo and NCCL bind to
loopback unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set, so no port is chosen and no socket listens beyond this
machine. Ranks end when their parent ends, for any reason.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from flashspan import scratch
from flashspan.process import die_with, wait_for_end
from flashspan.stdout import open_stdout

PRELOAD = ["flashspan.launch"]
"""The modules that the fork server imports by default, so that ranks start quickly."""
NO_SERVER = "the fork server of the ranks died"
RANKS_PER_CORE, FEW_RANKS = 8, 64
"""The most processes that a command starts on a CPU: RANKS_PER_CORE per core, or FEW_RANKS if that is more."""
FLIGHT_RECORDER_NAMES = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
"""The environment variables that set the size of PyTorch's flight recorder; the second name is the older one."""
NUM_RECORDS = 100
"""The number of entries in the flight recorder of a rank that communicates by gloo."""
HERE = "flashspan/here"  # the prefix of the store's keys that ranks set when they start


@dataclass(frozen=True)
class RankFailure:
    """The reason why one rank's function did not return."""

    rank: int
    error: str  # "ValueError: ...", or how the process ended
    traceback: str = ""  # empty if it adds nothing to `error`
    died: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.traceback or self.error}"


class RankError(RuntimeError):
    """Ranks failed. The message has the number and the traceback of each. `first` is the first failure: other ranks
    usually fail later, from a broken connection."""

    def __init__(self, message: str, first: RankFailure | None = None) -> None:
        super().__init__(message)
        self.first = first

    @property
    def cause(self) -> str:
        """The reason of the first failure, in one line."""
        if self.first is None:
            return str(self)
        text = self.first.error.partition("\n")[0]
        return f"rank {self.first.rank}: {text}" if self.first.traceback else text

    @property
    def report(self) -> str:
        """The cause, with its traceback if there is one."""
        return str(self.first) if self.first and self.first.traceback else self.cause


@dataclass(frozen=True)
class Message:
    """A value that a rank sends to the process that started it, before its function returns."""

    value: Any


_PARENT: list[Connection] = []
"""In a rank: the pipe to the process that started it."""


def send_to_parent(value: Any) -> None:
    """Send a value from a rank to the `on_message` of the `Ranks.run` that called it."""
    _PARENT[0].send(Message(value))


class SilentRank(RuntimeError):
    """Ranks waited for another rank that neither arrived nor reported an error."""


def raise_user_error(error: RankError) -> None:
    """Raise ValueError, without tracebacks of ranks, if the first failure is a ValueError (bad input)."""
    if error.first is not None and error.first.error.startswith("ValueError: "):
        raise ValueError(error.first.error.removeprefix("ValueError: ")) from error


def check_num_ranks(ranks: int, command: str) -> None:
    """ValueError for fewer than 1 rank or more than this machine can run; called before they are started."""
    if ranks < 1:
        raise ValueError(f"--ranks must be 1 or more: got {ranks}")
    cores = os.cpu_count() or 1
    most = max(FEW_RANKS, RANKS_PER_CORE * cores)
    if ranks > most:
        raise ValueError(
            f"{command} starts a process for each rank: at most {RANKS_PER_CORE} per core, or {FEW_RANKS} if that is "
            f"more: got {ranks} on {cores} cores; use --ranks {most} or fewer"
        )


class Ranks:
    """`num_ranks` processes in one process group, kept alive to run any number of functions.

    A function must be importable by name (defined at the top of a module). Each rank has `threads` CPU threads (by
    default its share of the machine). A collective that stalls raises on its rank after `timeout` seconds; a call of
    `run` that exceeds its own timeout kills every rank and raises TimeoutError. With `share_gpu` all ranks use the
    first GPU, and gloo: NCCL refuses two ranks on one GPU. `own_functions` means that all functions are in this
    package, so the ranks do not import the main script.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        backend: str = "gloo",
        threads: int | None = None,
        timeout: float = 60.0,
        share_gpu: bool = False,
        own_functions: bool = False,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"a process group needs at least 1 rank: got {num_ranks}")
        if share_gpu and backend != "gloo":
            raise ValueError(f"ranks that share a GPU need the gloo backend: got {backend!r}")
        if share_gpu and not torch.cuda.is_available():
            raise ValueError("ranks that share a GPU need a GPU: found none")
        # Forking from a server that has imported torch, and run no code, starts a rank in milliseconds.
        context = mp.get_context("forkserver")
        start_fork_server(PRELOAD)
        threads = threads or max(1, (os.cpu_count() or 1) // num_ranks)
        self.num_ranks = num_ranks
        self._folder = tempfile.mkdtemp(prefix="ranks-", dir=scratch.folder())
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        # At exit multiprocessing sends SIGTERM, which ranks may have blocked, and waits for their end.
        util.Finalize(self, lambda processes: [p.kill() for p in processes], (self._processes,), exitpriority=0)
        try:
            for rank in range(num_ranks):
                here, there = context.Pipe()
                self._pipes.append(here)
                group = (rank, num_ranks, backend, share_gpu, self._folder)
                process = context.Process(
                    target=_serve, args=(*group, threads, timeout, there, os.getpid(), sys.path), daemon=True
                )
                with _without_main() if own_functions else contextlib.nullcontext():
                    process.start()
                self._processes.append(process)
                there.close()
        except (EOFError, ConnectionError) as error:
            self.close(force=True)
            raise RankError(NO_SERVER) from error
        except BaseException:
            self.close(force=True)
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids in rank order; empty after the ranks have ended."""
        return [process.pid for process in self._processes]

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        on_message: Callable[[Any], None] = lambda value: None,
    ) -> list[Any]:
        """Run fn(*args) on every rank; return the list of results. A failure raises RankError and ends all ranks.

        `on_message` is called here, in this process, with each value that a rank passes to `send_to_parent`.
        """
        if not self._processes:
            raise RuntimeError(
                "these ranks have ended: an earlier call failed or close() was called; start new ones with Ranks(...)"
            )
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a rank that has died: reported below
                pipe.send((fn, args))
        results: dict[int, Any] = {}
        failures: dict[int, RankFailure] = {}  # in the order of their arrival
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < self.num_ranks:
            waiting = [rank for rank in range(self.num_ranks) if rank not in results and rank not in failures]
            ready = wait([self._pipes[rank] for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close(force=True)
                if failures:
                    break
                raise TimeoutError(f"ranks {waiting} did not finish within {timeout:g} s; all ranks were ended")
            for rank in (rank for rank in waiting if self._pipes[rank] in ready):
                try:
                    answer = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    how = _how_it_ended(self._processes[rank])
                    answer = RankFailure(rank, f"the process of rank {rank} died: {how}", died=True)
                if isinstance(answer, Message):
                    on_message(answer.value)
                    continue
                if isinstance(answer, RankFailure):
                    failures[rank] = answer
                    # Other ranks usually fail next, from a broken connection; wait briefly for their reports, and
                    # less if a process has died, which is reason enough.
                    deadline = min(deadline, time.monotonic() + (0.5 if answer.died else 5.0))
                else:
                    (results[rank],) = answer
        if failures:
            self.close(force=True)
            message = "\n".join(str(failures[rank]) for rank in sorted(failures))
            raise RankError(message, min(failures.values(), key=lambda failure: not failure.died))
        return [results[rank] for rank in range(self.num_ranks)]

    def close(self, *, force: bool = False) -> None:
        """End every rank; with force, immediately."""
        if not force:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):
                    pipe.send(None)
        for process in self._processes:
            process.join(0 if force else 10)
            if process.is_alive():
                process.kill()
                process.join()
            if force:
                wait_for_end(process.pid)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(force=kind is not None)


# Note: the main script. multiprocessing has each new process import the main script again, under another name, in case
# a function to run is defined there. A script that starts ranks outside of `if __name__ == "__main__":` would then
# start ranks in each of them. Ranks that run functions of this package do not need the script.
@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Processes started in this block do not import the main script."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def joined(timeout: float) -> Iterator[str]:
    """Join the process group of torchrun; yields the type of device: "cuda" with NCCL and a GPU per rank, or "cpu" with
    gloo."""
    cuda = torch.cuda.is_available()
    if cuda:
        place, found = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if place >= found:
            raise ValueError(
                f"each rank needs a GPU of its own: found {found} on this host, too few for local rank {place}; "
                f"use --nproc-per-node {found}"
            )
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout))
    try:
        yield "cuda" if cuda else "cpu"
    finally:
        dist.destroy_process_group()


def start_fork_server(modules: list[str], *, blocked: Iterable[int] = (signal.SIGINT, signal.SIGHUP)) -> None:
    """Start the fork server, unless it is running, with these signals blocked in it and in its children.

    Ctrl-C, and SIGHUP when a terminal is closed, are sent to every process of a terminal. The parent handles them and
    ends the others. The fork server would print a traceback of its imports, or leave the scratch folder.
    """
    forkserver.set_forkserver_preload(modules)
    resource_tracker.ensure_running()  # it unblocks these signals when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        with scratch.removed_by_fork_server():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(
    rank: int,
    num_ranks: int,
    backend: str,
    share_gpu: bool,
    folder: str,
    threads: int,
    timeout: float,
    pipe: Connection,
    parent: int,
    path: list[str],
) -> None:
    """The main function of a rank: join the group, run functions, destroy the group."""
    die_with(parent)
    if not os.path.isdir(folder):  # the parent has already ended these ranks
        os._exit(1)
    sys.path[:] = path
    open_stdout()
    torch.set_num_threads(threads)
    use_loopback()
    if backend == "gloo":
        shorten_flight_recorder()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    if backend == "nccl" or share_gpu:
        torch.cuda.set_device(0 if share_gpu else rank)
    store = dist.FileStore(os.path.join(folder, "rendezvous"), num_ranks)
    span = timedelta(seconds=timeout)
    store.set(f"{HERE}/{rank}", "")
    try:
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=span)
        except RuntimeError as error:
            pipe.recv()
            pipe.send(RankFailure(rank, _absent_ranks(store, num_ranks, timeout) or f"{error}"))
            os._exit(1)
        _work(rank, pipe)
    except (EOFError, OSError, KeyboardInterrupt):  # the parent has ended, or is ending and reports it
        os._exit(1)
    dist.destroy_process_group()


def _absent_ranks(store: dist.Store, num_ranks: int, timeout: float) -> str | None:
    """A message with the ranks that had not started when the others timed out; None if all had."""
    absent = [str(rank) for rank in range(num_ranks) if not store.check([f"{HERE}/{rank}"])]
    return f"rank {', '.join(absent)} did not start within {timeout:g} s: stalled or dead" if absent else None


def use_loopback() -> None:
    """Let process groups listen on loopback only, unless the environment sets an interface."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, loopback)


def shorten_flight_recorder() -> None:
    """Let PyTorch keep records of the last collectives only, unless the environment sets their number."""
    # PyTorch's default of 2,000 entries, up to 1 KiB each, fills over a thousand steps: memory grows by 1%.
    if not FLIGHT_RECORDER_NAMES & os.environ.keys():
        os.environ["TORCH_FR_BUFFER_SIZE"] = str(NUM_RECORDS)


def _work(rank: int, pipe: Connection) -> None:
    _PARENT[:] = [pipe]
    while (work := pipe.recv()) is not None:
        fn, args = work
        answer: tuple[Any] | RankFailure
        try:
            answer = (fn(*args),)
        except SilentRank as error:
            answer = RankFailure(rank, str(error))
        except Exception as error:  # reported by the parent
            text = "".join(traceback.format_exception_only(error)).strip()
            answer = RankFailure(rank, text, traceback.format_exc())
        try:
            pipe.send(answer)
        except Exception as error:  # a result that cannot be pickled
            pipe.send(RankFailure(rank, f"the result of {fn.__name__} could not be sent back: {error}"))


def _how_it_ended(process: Any) -> str:
    process.join(2.0)
    code = process.exitcode
    if code is None:
        return "it closed its pipe and does not end"
    if code == 255:  # multiprocessing's code for an unknown status
        return NO_SERVER
    if code >= 0:
        return f"exit code {code}"
    names = {signal.value: signal.name for signal in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"
