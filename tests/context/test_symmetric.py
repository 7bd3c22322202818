"""Transfers as copies into the receiver's memory, between processes of this machine, on the CPU."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flashspan.context import LAYOUTS, STRATEGIES, context_parallel, symmetric
from flashspan.context.generators import GENERATORS
from flashspan.context.layout import place
from flashspan.context.schedule import Schedule, Shape, reverse
from flashspan.context.shared_memory import COMPUTE, HostPeerMemory
from flashspan.context.slots import Receive, assign_slots, receives
from flashspan.context.transport import ExchangeError, GroupTransport
from flashspan.context.visibility import Visibility
from flashspan.kernels.masks import CAUSAL
from flashspan.launch import RankError, Ranks
from tests.context.cases import MASKS, Case, run_cases
from tests.context.disturbed import disturbances
from tests.context.fake_gpu import Stream, fake_gpu
from tests.context.test_strategies import check

OnRanks = Callable[..., list[Any]]
SYMMETRIC = {"transport": "symmetric"}


def cases_of(ranks: int, strategy: str) -> list[Case]:
    """Cases: each mask with one layout, each layout with the most important mask, few tokens, uneven heads."""
    layouts = itertools.cycle(LAYOUTS)
    cases = [Case(ranks, strategy, next(layouts), mask, T=45 + 2 * ranks, options=SYMMETRIC) for mask in MASKS]
    cases += [Case(ranks, strategy, layout, "causal documents", options=SYMMETRIC) for layout in LAYOUTS]
    cases += [Case(ranks, strategy, next(layouts), T=T, options=SYMMETRIC) for T in (0, 1, 3, 7)]
    heads = ((6, 6), (6, 3), (5, 1), (2, 1))
    return cases + [Case(ranks, strategy, heads=h, kv_heads=kv, T=19, options=SYMMETRIC) for h, kv in heads]


IN_CI = [x if x in ("ring", "helper", "ulysses") else pytest.param(x, marks=pytest.mark.slow) for x in STRATEGIES]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_copies_match_one_device(on_ranks: OnRanks, strategy: str, ranks: int) -> None:
    if strategy == "hybrid" and ranks % 2:
        pytest.skip("a 2-D mesh with 2 columns has an even number of ranks")
    check(on_ranks, cases_of(ranks, strategy))


def run_on_fake_gpu(cases: list[Case]) -> list[Any]:
    with fake_gpu():
        return run_cases(cases)


@pytest.mark.parametrize(
    ("strategy", "layouts"),
    [
        *zip(("ring", "helper", "ulysses"), ([layout] for layout in LAYOUTS), strict=True),
        *(pytest.param(strategy, list(LAYOUTS), marks=pytest.mark.slow) for strategy in STRATEGIES),
    ],
)
def test_gpu_peer_memory_does_not_deadlock(on_ranks: OnRanks, strategy: str, layouts: list[str]) -> None:
    """CudaPeerMemory with a driver simulated in host memory gives the same bits as the group."""
    cases = [Case(8, strategy, layout, options=SYMMETRIC) for layout in layouts]
    by_group = on_ranks(run_cases, [replace(case, options={"transport": "group"}) for case in cases])
    for mine, others in zip(on_ranks(run_on_fake_gpu, cases), by_group, strict=True):
        for a, b in zip(mine, others, strict=True):
            assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b, strict=True))


def call_on_two_streams() -> bool:
    """On a rank: whether a call on a second stream waits for the first call, whose slots it reuses."""
    attend = context_parallel(dist.group.WORLD, transport="symmetric")
    q = torch.ones(1, 1, 2, 8)
    with fake_gpu() as first:
        attend(q, q, q)
        second = Stream()
        with mock.patch.object(torch.cuda, "current_stream", return_value=second):
            attend(q, q, q)
        return first in second.waited_for


def test_a_call_on_another_stream_follows_the_one_before(on_ranks: OnRanks) -> None:
    assert all(on_ranks(call_on_two_streams))


def run_disturbed(cases: list[Case], seed: int) -> tuple[list[Any], int]:
    """On a rank: the results of the cases with random delays, and the number of delays."""
    with disturbances(seed * 64 + dist.get_rank()) as arenas:
        return run_cases(cases), sum(arena.delays for arena in arenas)


@pytest.mark.parametrize("strategy", IN_CI)
def test_delays_and_poisoned_buffers_change_no_bit(on_ranks: OnRanks, strategy: str) -> None:
    pairs = zip(LAYOUTS, ("causal", "causal documents", "window"), strict=True)
    cases = [Case(4, strategy, layout, mask, options=SYMMETRIC) for layout, mask in pairs]
    quiet = on_ranks(run_cases, cases)
    for seed in range(2):
        disturbed = on_ranks(run_disturbed, cases, seed)
        assert sum(delays for _, delays in disturbed) > 20
        for mine, (others, _) in zip(quiet[4:], disturbed[4:], strict=True):
            for a, b in zip(mine, others, strict=True):
                assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b, strict=True))


def reach_of_two_hosts(group: GroupTransport, transport: str, device: torch.device) -> symmetric.Reach:
    """As if each pair of neighbours in a group were on a separate host."""
    if group.num_ranks == 1:
        return symmetric.Reach((0,), "")
    first = group.rank // 2 * 2
    return symmetric.Reach((first, first + 1), "symmetric: inside a host")


def run_on_two_hosts(cases: list[Case]) -> list[Any]:
    with mock.patch.object(symmetric, "find_reach", reach_of_two_hosts):
        return run_cases(cases)


def test_ranks_of_two_hosts_copy_inside_each_and_send_between_them(on_ranks: OnRanks) -> None:
    cases = [Case(4, strategy, options={"head_chunks": 1}) for strategy in STRATEGIES if strategy != "hybrid"]
    by_group = on_ranks(run_cases, cases)
    mixed = on_ranks(run_on_two_hosts, cases)
    for mine, others in zip(mixed[4:], by_group[4:], strict=True):
        for a, b in zip(mine, others, strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def host_of_this_rank() -> str:
    return f"host {dist.get_rank() // 2}"


def refuse_two_hosts() -> str:
    with mock.patch.object(symmetric, "_host", host_of_this_rank):
        attend = context_parallel(dist.group.WORLD, transport="symmetric")
        try:
            attend(*(torch.randn(1, 1, 2, 8) for _ in range(3)))
        except ValueError as error:
            return str(error)
    return ""


def attend_in_inference_mode() -> bool:
    """On a rank: call attention in inference mode, which creates the arena, then with gradients. Whether the bits are
    those of the group."""
    results = []
    for transport in ("symmetric", "group"):
        attend = context_parallel(dist.group.WORLD, transport=transport, timeout=20.0)  # type: ignore[arg-type]
        make = torch.Generator().manual_seed(dist.get_rank())
        q, k, v = (torch.randn(1, 2, 6, 8, generator=make) for _ in range(3))
        with torch.inference_mode():
            first = attend(q, k, v, causal=True).clone()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, causal=True)
        out.backward(out.detach())
        results.append([first.clone(), out.detach(), *(x.grad for x in leaves)])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_arena_made_in_inference_mode_serves_training(on_ranks: OnRanks) -> None:
    assert all(on_ranks(attend_in_inference_mode))


def send_from_a_gpu_by_gloo() -> str:
    attend = context_parallel(dist.group.WORLD, transport="group")
    try:
        attend.transport("cuda")
    except ValueError as error:
        return str(error)
    return ""


def test_gpu_tensors_are_not_sent_by_gloo(on_ranks: OnRanks) -> None:
    assert all("backend gloo cannot send tensors on a GPU" in text for text in on_ranks(send_from_a_gpu_by_gloo))


def refuse_hybrid(case: Case) -> str:
    """On a rank: the last rank is on another host, which only its row and its column of the mesh know."""
    with mock.patch.object(symmetric, "_host", lambda: str(dist.get_rank() == 7)):  # noqa: PT008 - asked on each rank
        try:
            run_cases([case])
        except ValueError as error:
            return str(error)
    return ""


def test_symmetric_on_a_part_of_a_mesh_is_refused_on_all_of_it(on_ranks: OnRanks) -> None:
    found = on_ranks(refuse_hybrid, Case(8, "hybrid", options=SYMMETRIC))
    assert all("2 hosts" in text for text in found), found


def refuse_then_serve() -> tuple[str, bool]:
    """On a rank: a refused first call does not affect the second call."""
    attend = context_parallel(dist.group.WORLD, transport="symmetric")
    q = torch.ones(1, 1, 2, 8)
    text = ""
    with mock.patch.object(symmetric, "_host", host_of_this_rank):
        try:
            attend(q, q, q)
        except ValueError as error:
            text = str(error)
    return text, bool(attend(q, q, q).isfinite().all())


def test_a_call_after_a_refused_one_works(on_ranks: OnRanks) -> None:
    assert all("4 hosts" in text and served for text, served in on_ranks(refuse_then_serve))


def come_late() -> str:
    """On a rank: the error if one rank does not take part when memory is shared."""
    attend = context_parallel(dist.group.WORLD, transport="symmetric", timeout=1.0, num_tokens=16)
    q = torch.ones(1, 1, 2, 8)
    with mock.patch.object(attend, "_agree", return_value=16):  # otherwise `_agree` would detect it
        if dist.get_rank() == 5:
            time.sleep(3.0)
            return "late"
        try:
            attend(q, q, q)
        except (ExchangeError, ValueError) as error:
            return str(error)
    return ""


def test_a_rank_that_does_not_share_its_memory_is_noticed_in_time() -> None:
    with Ranks(8, threads=1, timeout=30) as ranks:
        found = ranks.run(come_late, timeout=30.0)
    assert all("waited" in text for rank, text in enumerate(found) if rank != 5), found


def count_groups() -> list[int]:
    """On a rank: the number of process groups after each of three attentions over half of the ranks."""
    counts = []
    with mock.patch.object(symmetric, "find_reach", reach_of_two_hosts):
        for _ in range(3):
            context_parallel(dist.group.WORLD)(*(torch.ones(1, 1, 4, 8) for _ in range(3)))
            counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_attentions_over_the_same_ranks_share_a_control_group(on_ranks: OnRanks) -> None:
    assert all(len(set(counts)) == 1 for counts in on_ranks(count_groups))


def test_symmetric_across_hosts_is_refused_on_every_rank(on_ranks: OnRanks) -> None:
    assert all("4 hosts" in text and "transport='auto'" in text for text in on_ranks(refuse_two_hosts))


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="transport must be one of auto, symmetric, group: got 'nvlink'"):
        context_parallel(None, transport="nvlink")  # type: ignore[arg-type]


def without_memory(transport: str) -> tuple[str, str]:
    """On a rank: the error of attention (empty if none) and its transport, if one rank cannot create a file."""
    attend = context_parallel(dist.group.WORLD, transport=transport)  # type: ignore[arg-type]
    failing = mock.Mock(side_effect=OSError("no memory is left"))
    reach = reach_of_two_hosts if transport == "auto" else symmetric.find_reach
    with (
        mock.patch.object(symmetric, "find_reach", reach),
        mock.patch("os.memfd_create", failing) if dist.get_rank() == 3 else contextlib.nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            attend(*(torch.ones(1, 1, 4, 8) for _ in range(3)))
        except ValueError as error:
            return str(error), ""
        return "", attend.transport("cpu")


def test_ranks_that_cannot_share_memory_send_by_the_group(on_ranks: OnRanks) -> None:
    """Both ranks of that host use the group, and the others copy."""
    found = on_ranks(without_memory, "auto")
    assert {error for error, _ in found} == {""}
    assert all("rank 1: no memory is left" in how for _, how in found[2:4])
    assert all("inside a host" in how for _, how in found[:2] + found[4:])


def test_symmetric_alone_is_refused_where_memory_cannot_be_shared(on_ranks: OnRanks) -> None:
    found = on_ranks(without_memory, "symmetric")
    assert all("rank 3: no memory is left" in error and "transport='group'" in error for error, _ in found)


def stall(dies: bool) -> str:
    """On a rank: the error of the others if the last rank is late for the second call, or dies before it."""
    attend = context_parallel(dist.group.WORLD, transport="symmetric", timeout=1.0, num_tokens=64)
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    attend(q, k, v)
    if dist.get_rank() == 3:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3.0)
        return "late"
    try:
        attend(q, k, v)
    except ExchangeError as error:
        if dies:
            raise
        return str(error)
    return ""


@pytest.mark.timeout(60)
def test_a_rank_that_stalls_is_named() -> None:
    with Ranks(4, threads=1, timeout=30) as ranks:
        found = ranks.run(stall, False, timeout=30.0)
    assert all(found[:3]), found
    assert any("rank 3" in text for text in found[:3]), found


@pytest.mark.timeout(60)
def test_a_rank_that_dies_is_named() -> None:
    begun = time.monotonic()
    with Ranks(4, threads=1, timeout=30) as ranks, pytest.raises(RankError, match="rank 3"):
        ranks.run(stall, True, timeout=30.0)
    assert time.monotonic() - begun < 25


def wait_for_the_dead() -> list[str]:
    """On a rank: wait for a flag that is set, and for one that is not set, of a rank that counts as dead."""
    assert dist.group.WORLD is not None
    memory = HostPeerMemory(dist.group.WORLD, 4, 1, 60.0)
    rank = dist.get_rank()
    found = [f"rank {peer} of {rank} has ended" for peer in range(8) if memory._processes.has_ended(peer)]
    memory.signal(COMPUTE, rank, 1, 77)
    with mock.patch.object(memory._processes, "has_ended", lambda peer: peer == 2):
        memory.wait(COMPUTE, 2, 1, 77, "rank 2")
        try:
            memory.wait(COMPUTE, 2, 3, 78, "rank 2")
        except ExchangeError as error:
            found.append(str(error))
    memory.close()
    return found


@pytest.mark.timeout(60)
def test_a_wait_for_a_dead_rank_ends_before_the_timeout(on_ranks: OnRanks) -> None:
    assert on_ranks(wait_for_the_dead) == [["rank 2 has died"]] * 8


def schedules(num_ranks: int) -> list[Schedule]:
    options: dict[str, Any] = {"double_ring": {"sizes": (2, num_ranks // 2)}}
    visibility = Visibility(place("zigzag", 1000, num_ranks), CAUSAL)
    made = [generate(visibility, **options.get(name, {})) for name, generate in GENERATORS.items()]
    return made + [reverse(schedule) for schedule in made]


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 32])
def test_slots_in_use_at_the_same_time_do_not_overlap(num_ranks: int) -> None:
    shape = Shape(1, 4, 2, 64, 2)
    for schedule in schedules(num_ranks):
        found = receives(schedule, shape.bytes)
        slots = assign_slots(found)
        by_rank: dict[int, list[Receive]] = {}
        for one in found:
            by_rank.setdefault(one.dst, []).append(one)
        for mine in by_rank.values():
            for a, b in itertools.combinations(mine, 2):
                if a.start < b.free and b.start < a.free:
                    one, other = slots.ranges[a.key], slots.ranges[b.key]
                    assert one.stop <= other.start or other.stop <= one.start
        assert slots.num_bytes >= max(len(place) for place in slots.ranges.values())


def test_a_ring_of_any_length_needs_memory_for_three_messages() -> None:
    shape = Shape(1, 4, 2, 64, 2)
    for num_ranks in (4, 16, 64):
        schedule = GENERATORS["ring"](Visibility(place("zigzag", 64 * 32, num_ranks), CAUSAL))
        largest = max(shape.bytes(t) for t in schedule.transfers)
        assert assign_slots(receives(schedule, shape.bytes)).num_bytes <= 3 * largest


def test_slots_of_random_messages_do_not_overlap() -> None:
    draw = random.Random(0)
    for _ in range(50):
        found = []
        for key in range(40):
            start = draw.randrange(20)
            found.append(Receive(key, 0, 1, draw.randrange(1, 5000), start, start + draw.randrange(1, 6)))
        slots = assign_slots(found)
        for a, b in itertools.combinations(found, 2):
            if a.start < b.free and b.start < a.free:
                one, other = slots.ranges[a.key], slots.ranges[b.key]
                assert one.stop <= other.start or other.stop <= one.start


def count_arenas() -> list[int]:
    """On a rank: the number of mapped arenas after attention over longer and longer sequences."""
    attend = context_parallel(dist.group.WORLD, transport="symmetric")
    counts = []
    for tokens in (8, 64, 256):
        attend(*(torch.randn(1, 2, tokens, 8) for _ in range(3)), causal=True)
        with open("/proc/self/maps") as file:
            counts.append(sum("memfd:flashspan" in line for line in file))
    return counts


def test_an_arena_that_grows_leaves_nothing_of_the_old_one(on_ranks: OnRanks) -> None:
    for counts in on_ranks(count_arenas):
        assert len(set(counts)) == 1, counts
