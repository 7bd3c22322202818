"""`flashspan check --preflight` reports wrong or slow parts of a cluster, and nothing else."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flashspan.bench.measure import links
from flashspan.bench.measure.links import MESSAGES, End, Link, Overlap, join_ends, measure_links, pairs_of, rounds_of
from flashspan.bench.measure.strategies import over_all_ranks
from flashspan.commands import preflight
from flashspan.commands.check import Result
from flashspan.commands.preflight import even_hosts
from flashspan.commands.verdict import LISTED, Job, Planned, Report, judge, print_report, slow_links
from flashspan.context.schedule import Shape
from flashspan.context.strategy import context_parallel
from flashspan.context.transport import GroupTransport, Message
from flashspan.kernels.backends import Chosen
from flashspan.kernels.contract import Carry
from flashspan.launch import RankError
from flashspan.plan.devices import LINKS

ROOT = Path(__file__).parents[2]
OnRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")
JOB = Job("ring", "zigzag", "float32", "auto", share_gpu=False)
GOOD = Result("ring", "zigzag", 1e-7, 1e-7, 1e-7, 1e-7)


def all_links(num_ranks: int, speed: float = 46e9) -> tuple[Link, ...]:
    ranks = range(num_ranks)
    return tuple(Link(a, b, 0, (b - a) % num_ranks, speed) for a in ranks for b in ranks if a != b)


def report(num_ranks: int = 4, device: str = "NVIDIA H100 80GB HBM3", **changes: Any) -> Report:
    """The report of a healthy cluster of two hosts, with these changes."""
    hosts = tuple("ab"[2 * rank // num_ranks] for rank in range(num_ranks))
    found = tuple(
        replace(link, bandwidth=350e9) if hosts[link.src] == hosts[link.dst] else link for link in all_links(num_ranks)
    )
    overlap = Overlap((4e-3,) * num_ranks, 3.5e-3, 4.2e-3, 4096, Shape(1, 8, 8, 64, 2))
    planned = Planned("H100", LINKS["nvlink-h100"], 3.9e-3, 4.0e-3)
    alone = (GOOD,) * num_ranks
    whole = Report(JOB, 1000, device, "group", hosts, GOOD, alone, found, 50e-6, overlap, planned)
    return replace(whole, **changes)


def changed(found: tuple[Link, ...], pair: tuple[int, int], **changes: Any) -> tuple[Link, ...]:
    return tuple(replace(link, **changes) if (link.src, link.dst) == pair else link for link in found)


@pytest.mark.parametrize("num_ranks", [2, 4, 16])
def test_a_healthy_cluster_is_fine(num_ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    healthy = report(num_ranks)
    assert judge(healthy) == []
    print_report(healthy, [])
    assert capsys.readouterr().out.rstrip().endswith("verdict: fine")


def test_a_slow_link_is_named_with_its_hosts_and_nothing_else() -> None:
    one = report()
    assert judge(replace(one, links=changed(one.links, (1, 2), bandwidth=24e9))) == []
    (fault,) = judge(replace(one, links=changed(one.links, (1, 2), bandwidth=11.2e9)))
    assert fault.startswith("rank 1 -> rank 2 (host a -> host b): 11.2 GB/s, others 46; ")
    assert "NCCL_IB_HCA" in fault
    (fault,) = judge(replace(one, links=changed(one.links, (3, 2), bandwidth=100e9)))
    assert fault.startswith("rank 3 -> rank 2 (both on host b): 100 GB/s, others 350; ")
    assert "nvlink" in fault


def test_ranks_that_share_cores_make_links_slow_by_turns() -> None:
    one = report(device="cpu")
    assert judge(replace(one, links=changed(one.links, (1, 0), bandwidth=100e9))) == []
    (fault,) = judge(replace(one, links=changed(one.links, (1, 0), bandwidth=50e9)))
    assert fault.startswith("rank 1 -> rank 0 (both on host a): 50 GB/s, others 350; ")
    (fault,) = judge(replace(one, links=changed(one.links, (1, 2), bandwidth=11e9)))
    assert "GLOO_SOCKET_IFNAME" in fault


def test_a_rank_at_which_many_links_are_slow_is_named() -> None:
    one = report(16)
    slow = tuple(replace(x, bandwidth=5e9) if 3 in (x.src, x.dst) else x for x in one.links)
    faults = judge(replace(one, links=slow))
    assert len(faults) == LISTED + 1
    assert faults[-1] == "22 more links are slow; of all 30, 30 begin or end at rank 3 (a)"


def test_a_link_that_delivers_other_bytes_is_named() -> None:
    one = report()
    (fault,) = judge(replace(one, links=changed(one.links, (0, 3), intact=False)))
    assert fault.startswith("rank 0 -> rank 3 (host a -> host b): received bytes differ")


@pytest.mark.parametrize("bad", [math.nan, 1e-3])
@pytest.mark.parametrize("part", ["out", "dq", "dk", "dv"])
def test_wrong_numbers_are_found_and_their_rank_named(part: str, bad: float) -> None:
    wrong = replace(GOOD, **{part: bad})
    (fault,) = judge(report(parity=wrong))
    assert fault.startswith("ring zigzag differs from one device")
    (fault,) = judge(report(alone=(GOOD, GOOD, wrong, GOOD)))
    assert fault.startswith("rank 2 (b) computes wrong numbers even without the others")


def test_the_planner_s_expectation_applies_to_unshared_gpus() -> None:
    one = report()
    slow = tuple(replace(x, bandwidth=40e9) for x in one.links)
    (fault,) = judge(replace(one, links=slow))
    assert fault.startswith("links inside a host: 40 GB/s, expected for nvlink-h100 of H100: 360")
    assert one.overlap is not None
    late = replace(one.overlap, attention=(4e-3, 4e-3, 9e-3, 4e-3), both=9e-3)
    (fault,) = judge(replace(one, overlap=late))
    assert fault.startswith("rank 2 (b): attention takes 9 ms, on others 4")
    apart = replace(one.overlap, both=7e-3)
    (fault,) = judge(replace(one, overlap=apart))
    assert "50% of the transfers" in fault
    assert "14%" in fault
    assert judge(replace(one, overlap=apart, job=replace(JOB, strategy="ulysses"))) == []
    for shared in (replace(one, device="cpu"), replace(one, job=replace(JOB, share_gpu=True))):
        assert judge(replace(shared, overlap=apart)) == judge(replace(shared, overlap=late)) == []


def test_only_the_slow_link_remains_from_the_times_of_nccl() -> None:
    # In a ring of four, 2 -> 3 is slow. NCCL gives one time for what a rank sends and receives.
    times = {0: 1.0, 1: 1.0, 2: 9.0, 3: 9.0}
    ends = [End(r, (r + 1) % 4, 0, 1, sent=times[r]) for r in range(4)]
    ends += [End((r - 1) % 4, r, 0, 1, received=times[r]) for r in range(4)]
    found = {(link.src, link.dst): link.bandwidth for link in join_ends(ends, 18, "cuda")}
    assert found == {(0, 1): 18.0, (1, 2): 18.0, (2, 3): 2.0, (3, 0): 18.0}
    (link,) = join_ends([End(0, 1, 0, 1, sent=1.0), End(0, 1, 0, 1, received=2.0)], 18, "cpu")
    assert link.bandwidth == 9.0


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_rounds_hold_every_pair_once_and_each_rank_sends_to_one(num_ranks: int) -> None:
    pairs = {(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b}
    rounds = rounds_of(pairs, num_ranks)
    assert sorted(pair for some in rounds.values() for pair in some) == sorted(pairs)
    for some in rounds.values():
        assert len({src for src, _ in some}) == len({dst for _, dst in some}) == len(some)


def test_with_many_ranks_only_pairs_of_the_strategy_are_measured() -> None:
    settings = context_parallel(None).settings
    ring: Any = SimpleNamespace(
        settings=settings, num_ranks=20, outer=SimpleNamespace(num_ranks=20), inner=SimpleNamespace(num_ranks=1)
    )
    assert pairs_of(ring, 1000) == [{(rank, (rank + 1) % 20) for rank in range(20)}, set()]
    ring.num_ranks = ring.outer.num_ranks = 16
    assert len(pairs_of(ring, 1000)[0]) == 16 * 15


def test_hosts_are_counted_if_ranks_divide_over_them() -> None:
    assert even_hosts("aabb") == 2
    assert even_hosts("abab") == even_hosts("aab") == even_hosts("aaaa") == 1


HERE = Report(JOB, 12, "cpu", "group", ("a",) * 3, GOOD, (GOOD,) * 3)


def slow_wait(transport: GroupTransport, message: Message) -> None:
    WAIT(transport, message)
    if message.dst == transport.rank and message.key[-1] == 0:  # the first of MESSAGES
        time.sleep(0.2 if (message.src, message.dst) == (1, 2) else 0.01)


def spoiling_wait(transport: GroupTransport, message: Message) -> None:
    WAIT(transport, message)
    if (message.src, message.dst, message.key[-1]) == (2, 0, MESSAGES - 1) and transport.rank == 0:
        message.buffer[-1] += 1


WAIT = GroupTransport.wait


def links_with(wait: Callable[..., None]) -> list[Link]:
    attend = over_all_ranks("ring", "zigzag", "cpu", num_tokens=12)
    with mock.patch.object(GroupTransport, "wait", wait), mock.patch.object(links, "REPEATS", 3):
        return measure_links(
            attend,
            pairs_of(attend, 12),
            CPU,
            lambda some: [link for link, _ in slow_links(HERE, some)],
            num_bytes=4096,
        )


@pytest.mark.timeout(60)
def test_a_link_slowed_down_is_named_and_no_other(on_ranks: OnRanks) -> None:
    for found in on_ranks(3, links_with, slow_wait):
        assert len(found) == 6
        assert [(link.src, link.dst) for link, _ in slow_links(HERE, found)] == [(1, 2)]
        assert all(link.intact for link in found)


@pytest.mark.timeout(60)
def test_a_link_that_changes_a_byte_is_found(on_ranks: OnRanks) -> None:
    found = on_ranks(3, links_with, spoiling_wait)[1]
    assert [(link.src, link.dst) for link in found if not link.intact] == [(2, 0)]


def measured(job: Job, broken: int | None = None) -> Report:
    """The report of a preflight with small messages, in which one rank's kernels may be wrong (`broken`)."""

    def forward(self: Chosen, *tensors: Any, **rest: Any) -> Carry:
        out, lse = right(self, *tensors, **rest)
        return Carry(out * (1.001 if dist.get_rank() == broken else 1.0), lse)

    right, stack = Chosen.forward, contextlib.ExitStack()
    if broken is not None:
        stack.enter_context(mock.patch.object(preflight, "measure_links", return_value=[]))
        stack.enter_context(mock.patch.object(preflight, "measure_overlap", return_value=None))
    with stack:
        stack.enter_context(mock.patch.dict(links.MESSAGE_BYTES, {"cpu": 2**16}))
        stack.enter_context(mock.patch.object(Chosen, "forward", forward))
        stack.enter_context(mock.patch.object(links, "LINKS_S", 0.5))
        return preflight.run_on_rank(job, "cpu")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["ring", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_a_preflight_measures_all_it_promises(on_ranks: OnRanks, strategy: Any) -> None:
    found, other = on_ranks(2, measured, replace(JOB, strategy=strategy))
    assert (found.links, found.overlap, found.alone) == (other.links, other.overlap, other.alone)
    assert found.parity.passes("float32")
    assert all(one.passes("float32") for one in found.alone)
    assert {(link.src, link.dst) for link in found.links} == {(0, 1), (1, 0)}
    assert all(link.intact and 0 < link.bandwidth < math.inf for link in found.links)
    assert found.empty_step > 0
    overlap = found.overlap
    assert len(overlap.attention) == 2
    assert min(*overlap.attention, overlap.transfers, overlap.both) > 0
    assert overlap.tokens >= 2 * links.SHORTEST


@pytest.mark.timeout(60)
def test_a_wrong_kernel_is_found_and_its_rank_named(on_ranks: OnRanks) -> None:
    found, other = on_ranks(2, measured, JOB, 1)
    faults = judge(found)
    assert faults == judge(other), "every rank's exit code is the verdict"
    assert [fault.split(":")[0] for fault in faults] == [
        f"rank 1 ({found.hosts[1]}) computes wrong numbers even without the others",
        "ring zigzag differs from one device",
    ]


def lose_rank_one(how: str) -> None:
    with mock.patch.object(preflight, "PATIENCE", 3.0):
        if dist.get_rank() == 1:
            os._exit(1) if how == "died" else time.sleep(60)
        preflight.run_on_rank(JOB, "cpu")


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", ["died", "stalled"])
def test_a_lost_rank_is_named(on_ranks: OnRanks, how: str) -> None:
    with pytest.raises(RankError) as raised:
        on_ranks(3, lose_rank_one, how)
    assert re.search(rf"rank 1\b.*{how}", raised.value.cause), raised.value.cause


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("module", ["flashspan.check", "flashspan.cli check"])
def test_under_torchrun_it_joins_the_ranks(module: str) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *module.split()]
    done = subprocess.run(
        [sys.executable, *words, "--preflight"],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.count("preflight of 2 ranks") == 1, done.stderr
    assert done.stdout.count("verdict: ") == 1
    assert (done.returncode == 0) == ("verdict: fine" in done.stdout)
