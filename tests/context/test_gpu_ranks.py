"""Attention across processes that share one GPU: real streams, events and copies between real ranks.

pytest -m gpu tests/context/test_gpu_ranks.py                  a sample of each
pytest -m "gpu and campaign" tests/context/test_gpu_ranks.py   every strategy, layout, mask and dtype; 500 delays
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flashspan.context import LAYOUTS, STRATEGIES, context_parallel
from flashspan.launch import RankError, Ranks
from tests.context.cases import Case, ratios, run_cases
from tests.context.disturbed import disturbances

pytestmark = pytest.mark.gpu
MASKS = ("causal", "window", "documents", "block map", "dropout")
OnGpu = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def on_gpu() -> Any:
    """on_gpu(4, fn, *args): fn on 4 ranks of one GPU."""
    pools: dict[int, Ranks] = {}

    def run(num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        for other in [n for n in pools if n != num_ranks]:
            pools.pop(other).close()
        if num_ranks not in pools or not pools[num_ranks].pids:
            pools[num_ranks] = Ranks(num_ranks, threads=1, timeout=120, share_gpu=True)
        return pools[num_ranks].run(fn, *args, timeout=timeout)

    yield run
    for pool in pools.values():
        pool.close()


def make_case(ranks: int, strategy: str, layout: str, mask: str, dtype: torch.dtype, **more: Any) -> Case:
    drop = 0.2 if mask == "dropout" else 0.0
    mask = "causal" if mask == "dropout" else mask
    options = {"timeout": 250.0} | more.pop("options", {})  # one rank may compile a kernel that the others do not need
    sizes = {"T": 203, "heads": 4, "kv_heads": 2, "D": 64, "batch": 1} | more
    return Case(ranks, strategy, layout, mask, dtype=dtype, dropout=drop, device="cuda", options=options, **sizes)  # type: ignore[arg-type]


def check(on_gpu: OnGpu, ranks: int, cases: list[Case]) -> None:
    begun = time.monotonic()
    answers = on_gpu(ranks, run_cases, cases)
    wrong, worst = [], 0.0
    for index, case in enumerate(cases):
        found = ratios(case, [answer[index] for answer in answers])
        worst = max(worst, *found.values())
        if not max(found.values()) <= 1.0:
            wrong.append((case.id, case.dtype, case.dropout, found))
    seconds = time.monotonic() - begun
    print(f"{len(cases)} cases on {ranks} ranks, {len(wrong)} wrong, worst {worst:.2f} of the promise, {seconds:.0f} s")
    assert not wrong, wrong


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_one_gpu_match_one_device(on_gpu: OnGpu, ranks: int) -> None:
    pairs = itertools.cycle(itertools.product(MASKS, LAYOUTS))
    cases = []
    for strategy, dtype in itertools.product(STRATEGIES, (torch.bfloat16, torch.float32)):
        mask, layout = next(pairs)
        cases.append(make_case(ranks, strategy, layout, mask, dtype))
    check(on_gpu, ranks, cases)


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_strategy_layout_and_mask(on_gpu: OnGpu, ranks: int, dtype: torch.dtype, mask: str) -> None:
    check(on_gpu, ranks, [make_case(ranks, *names, mask, dtype) for names in itertools.product(STRATEGIES, LAYOUTS)])


def run_disturbed(cases: list[Case], seeds: list[int]) -> tuple[int, int]:
    """On a rank: run the cases without, then with the delays of each seed. Returns the numbers of different results and
    of delays."""
    quiet = run_cases(cases)
    differing = delays = 0
    for seed in seeds:
        with disturbances(seed * 64 + dist.get_rank()) as arenas:
            for mine, others in zip(quiet, run_cases(cases), strict=True):
                differing += not all(np.array_equal(x, y, equal_nan=True) for x, y in zip(mine, others, strict=True))
        delays += sum(arena.delays for arena in arenas)
    return differing, delays


def check_disturbed(on_gpu: OnGpu, ranks: int, num_seeds: int) -> None:
    """Every strategy with deterministic gradients, `num_seeds` times with different delays."""
    options = {"deterministic": True}
    layouts = itertools.cycle(LAYOUTS)
    cases = [make_case(ranks, s, next(layouts), "causal", torch.bfloat16, options=options) for s in STRATEGIES]
    found = on_gpu(ranks, run_disturbed, cases, list(range(num_seeds)), timeout=500.0)
    print(f"{num_seeds * len(cases)} disturbed runs on {ranks} ranks, {sum(n for _, n in found)} delays")
    assert sum(n for _, n in found) > 10 * num_seeds
    assert sum(n for n, _ in found) == 0


@pytest.mark.timeout(300)
def test_delays_and_poisoned_buffers_change_no_bit(on_gpu: OnGpu) -> None:
    check_disturbed(on_gpu, 4, 2)


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "num_seeds"), [(2, 34), (4, 34), (8, 16)])
def test_five_hundred_runs_with_delays(on_gpu: OnGpu, ranks: int, num_seeds: int) -> None:
    check_disturbed(on_gpu, ranks, num_seeds)


def stall(how: str, step: str) -> None:
    """On a rank: rank 1 stalls or dies between two calls, or between forward and backward."""
    attend = context_parallel(dist.group.WORLD, timeout=3.0, num_tokens=256)
    q, k, v = (torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    attend(q, k, v).sum().backward()
    out = attend(q, k, v) if step == "backward" else None
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(12.0)
    out = attend(q, k, v) if out is None else out
    out.sum().backward()
    out.sum().item()


@pytest.mark.parametrize("step", ["forward", "backward"])
@pytest.mark.parametrize("how", ["stalls", "dies"])
def test_a_rank_that_stalls_or_dies_is_named_and_leaves_nothing(how: str, step: str) -> None:
    begun, before = time.monotonic(), set(os.listdir("/dev/shm"))
    with Ranks(2, threads=1, timeout=30, share_gpu=True) as ranks:
        pids = ranks.pids
        with pytest.raises(RankError, match="rank 1"):
            ranks.run(stall, how, step, timeout=60.0)
    assert time.monotonic() - begun < 45
    time.sleep(1.0)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert set(os.listdir("/dev/shm")) <= before
    apps = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    assert not set(apps.stdout.split()) & {str(pid) for pid in pids}


def call_for_ever() -> None:
    """On a rank: attention, forward and backward, until it fails."""
    attend = context_parallel(dist.group.WORLD, timeout=4.0, num_tokens=512)
    size = 512 // dist.get_world_size()
    q, k, v = (torch.randn(1, 2, size, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    while True:
        out = attend(q, k, v, causal=True)
        out.backward(out.detach())
        torch.cuda.synchronize()


@pytest.mark.campaign
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(50))
def test_a_rank_killed_or_stopped_at_a_random_moment_is_named(seed: int) -> None:
    """SIGKILL ends a rank, and SIGSTOP stalls it; the others wait for it on the device."""
    draw, before = random.Random(seed), set(os.listdir("/dev/shm"))
    how, victim = draw.choice([signal.SIGKILL, signal.SIGSTOP]), draw.randrange(2)
    with Ranks(2, threads=1, timeout=30, share_gpu=True) as ranks:
        pids = ranks.pids
        delay = 8.0 + 8.0 * draw.random()
        timer = threading.Timer(delay, os.kill, (pids[victim], how))
        timer.start()
        begun = time.monotonic()
        with pytest.raises(RankError, match=rf"rank {victim}\b"):
            ranks.run(call_for_ever, timeout=60.0)
        assert time.monotonic() - begun < delay + 4.0 + 15.0
    deadline = time.monotonic() + 10.0
    while (left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    assert set(os.listdir("/dev/shm")) <= before


def transport_of() -> str:
    return context_parallel(dist.group.WORLD).transport(torch.device("cuda", 0))


def test_ranks_that_share_a_gpu_choose_copies(on_gpu: OnGpu) -> None:
    assert on_gpu(2, transport_of) == ["symmetric: 2 ranks on one GPU copy into each other's memory"] * 2
