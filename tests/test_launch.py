"""Ranks on this machine: they run, report results and errors, and end."""

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashspan import launch
from flashspan.launch import RankError, Ranks, SilentRank, joined, start_fork_server


def add(value: float) -> float:
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return total.item()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no luck here")
    dist.barrier()


def stall_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def records_of(num_collectives: int) -> int:
    """The number of collectives that PyTorch remembers after `num_collectives`."""
    for _ in range(num_collectives):
        dist.all_reduce(torch.zeros(1))
    return len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=True))["entries"])


def process_id() -> int:
    return os.getpid()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as file:
        return file.read().split()[2] == "Z"


def test_cpu_ranks_record_their_last_collectives_only() -> None:
    """Otherwise memory would grow for a thousand steps."""
    with Ranks(1) as ranks:
        assert ranks.run(records_of, launch.NUM_RECORDS + 10) == [launch.NUM_RECORDS]


@pytest.mark.parametrize("name", sorted(launch.FLIGHT_RECORDER_NAMES))
def test_the_size_of_the_flight_recorder_may_be_set(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in launch.FLIGHT_RECORDER_NAMES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "7")
    launch.shorten_flight_recorder()
    assert {key: os.environ[key] for key in launch.FLIGHT_RECORDER_NAMES if key in os.environ} == {name: "7"}


def test_ranks_of_torchrun_take_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: calls.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("left"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    with joined(timeout=9) as device_type:
        assert device_type == "cuda"
    assert calls == [1, "nccl", "left"]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=r"found 2 on this host, .* rank 2; use --nproc-per-node 2"), joined(timeout=9):
        pass


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_rank_runs_and_answers_in_order(num_ranks: int) -> None:
    with Ranks(num_ranks) as ranks:
        expected = sum(range(num_ranks)) + 2.0 * num_ranks
        assert ranks.run(add, 2.0) == [expected] * num_ranks
        assert len(set(ranks.run(process_id))) == num_ranks


def test_a_failure_names_its_rank_and_ends_all() -> None:
    ranks = Ranks(3)
    pids = ranks.run(process_id)
    with pytest.raises(RankError, match=r"rank 1: .*(\n.*)*no luck here"):
        ranks.run(fail_on_one)
    assert all(gone(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="have ended"):
        ranks.run(add, 1.0)


def test_a_stall_is_named_and_ended() -> None:
    ranks = Ranks(2)
    pids = ranks.run(process_id)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not finish within 1 s"):
        ranks.run(stall_on_one, timeout=1.0)
    assert all(gone(pid) for pid in pids)


def test_ranks_end_with_a_killed_parent_that_is_not_reaped() -> None:
    program = """if __name__ == "__main__":
        import os, time
        from flashspan.launch import Ranks
        ranks = Ranks(1)
        print(*ranks.run(os.getpid), flush=True)
        ranks.run(time.sleep, 50, timeout=60)"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        parent.kill()
        end = time.monotonic() + 10
        while not gone(rank) and time.monotonic() < end:
            time.sleep(0.1)
        assert gone(rank)
        assert gone(parent.pid)  # ended, although no wait has released its process id yet
        os.kill(parent.pid, 0)
    finally:
        parent.kill()
        parent.communicate()


def test_the_death_of_the_fork_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(process: object) -> None:
        raise EOFError("unexpected EOF")

    monkeypatch.setattr(ForkServerProcess, "start", start)
    with pytest.raises(RankError, match="the fork server of the ranks died"):
        Ranks(2)


def test_a_death_is_named() -> None:
    with pytest.raises(RankError, match="the process of rank 1 died"), Ranks(2) as ranks:
        ranks.run(die_on_one)


def test_a_death_between_two_calls_is_named() -> None:
    with Ranks(2) as ranks:
        pids = ranks.run(process_id)
        os.kill(pids[1], signal.SIGKILL)
        while not gone(pids[1]):
            time.sleep(0.01)
        with pytest.raises(RankError, match="the process of rank 1 died"):
            ranks.run(process_id)
        assert gone(pids[0])


def test_ctrl_c_and_sighup_wait_while_the_fork_server_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both reach every process of a terminal. Only the parent reacts, and no import prints a traceback."""
    seen: list[set[Any]] = []
    monkeypatch.setattr(forkserver, "ensure_running", lambda: seen.append(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    start_fork_server(launch.PRELOAD)
    assert seen == [{signal.SIGINT, signal.SIGHUP}]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 rank"):
        Ranks(0)


def test_ranks_that_never_started_are_reported_by_waiting_ranks() -> None:
    store = dist.HashStore()
    for rank in (0, 2):
        store.set(f"{launch.HERE}/{rank}", "")
    said = launch._absent_ranks(store, 4, 6.0)
    assert said == "rank 1, 3 did not start within 6 s: stalled or dead"
    for rank in (1, 3):
        store.set(f"{launch.HERE}/{rank}", "")
    assert launch._absent_ranks(store, 4, 6.0) is None


def kill_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def fail_on_all() -> None:
    raise ValueError("no luck here")


def say_who_is_silent() -> None:
    raise SilentRank("rank 7 did not answer")


def test_the_first_cause_is_reported_in_one_line() -> None:
    for fn, cause in (
        (kill_on_one, "the process of rank 1 died: killed by SIGKILL"),
        (die_on_one, "the process of rank 1 died: exit code 3"),
        (say_who_is_silent, "rank 7 did not answer"),
    ):
        with pytest.raises(RankError) as caught, Ranks(2) as ranks:
            ranks.run(fn)
        assert caught.value.cause == caught.value.report == cause
    with pytest.raises(RankError) as caught, Ranks(2) as ranks:
        ranks.run(fail_on_all)
    assert caught.value.cause in ("rank 0: ValueError: no luck here", "rank 1: ValueError: no luck here")
    assert "Traceback" in caught.value.report
    with pytest.raises(ValueError, match=r"^no luck here$"):
        launch.raise_user_error(caught.value)


def test_a_death_is_reported_at_once_and_its_peers_have_ended() -> None:
    ranks, begin = Ranks(2), time.monotonic()
    pids = ranks.pids
    with pytest.raises(RankError):
        ranks.run(stall_or_die)
    assert time.monotonic() - begin < 10
    assert all(gone(pid) for pid in pids)


def stall_or_die() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)
    os._exit(3)


PRINTS = """
from flashspan.launch import Ranks
if __name__ == "__main__":
    with Ranks(1) as ranks:
        ranks.run(print, "r é")
"""


@pytest.mark.timeout(100)
def test_ranks_escape_what_the_encoding_of_stdout_lacks() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, timeout=90, env=environment, check=True)
    assert done.stdout == b"r \\xe9\n"


LEAVES = """
import signal
from flashspan.launch import PRELOAD, Ranks, start_fork_server
if __name__ == "__main__":
    start_fork_server(PRELOAD, blocked=(signal.SIGTERM,))
    ranks = Ranks(2, threads=1)
    print(*ranks.pids)
"""


@pytest.mark.timeout(100)
def test_a_script_that_forgets_to_close_its_ranks_ends() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=90, check=True)
    assert len(pids := done.stdout.split()) == 2
    assert all(gone(int(pid)) for pid in pids)
