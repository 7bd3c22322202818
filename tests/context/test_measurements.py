"""The scripts that measure rings run, and agree with their references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashspan.bench.suites.cpu_ring import compare
from flashspan.bench.suites.single_device_ring import Stopwatch, all_steps, in_turn, one_step
from flashspan.kernels.contract import Carry
from flashspan.kernels.masks import CAUSAL
from flashspan.launch import Ranks

OnRanks = Callable[..., list[Any]]


def test_our_ring_and_pytorchs_agree(on_ranks: OnRanks) -> None:
    """An independent reference: `_templated_ring_attention`, forward and backward, on 8 ranks."""
    for chunks in (None, 2):
        for answer in on_ranks(compare, 256, 2, 16, 1, chunks):
            assert max(answer["difference"]) < 2e-6
            assert len(answer["ours"]) == len(answer["theirs"]) == 1


@pytest.mark.slow
def test_a_rank_holds_little_more_than_its_share() -> None:
    """4 ranks, T = 8192, 8 heads of 64: 1.3x of q, k, v, out and gradients, and two buffers of keys and values."""
    with Ranks(4, timeout=300) as ranks:
        answers = ranks.run(compare, 8192, 8, 64, 2, None, timeout=600)
    tensor = 8192 * 8 * 64 * 4 / 4 / 2**20
    peaks = [answer["peaks"][0] for answer in answers]
    # q, k, v and dout exist before the peak is measured.
    assert max(peaks) + 4 * tensor <= 1.3 * 8 * tensor + 4 * tensor


@pytest.mark.parametrize("strategy", ["ring", "helper"])
def test_all_ranks_of_a_ring_can_be_timed_on_one_device(strategy: str) -> None:
    inputs = [torch.randn(1, 2, 96, 16) for _ in range(4)]
    once = all_steps(inputs, CAUSAL, 4, strategy=strategy, layout="zigzag", backend="tiled")
    assert min(once()) > 0


@pytest.mark.parametrize("carried", [False, True])
def test_one_step_of_a_ring_can_be_timed(carried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a ring continues a float32 carry and accumulates gradients; a plain call does neither."""
    seen: list[tuple[bool, torch.dtype]] = []
    forward, backward = Stopwatch.forward, Stopwatch.backward

    def watch_forward(self: Stopwatch, *args: Any, **rest: Any) -> Carry:
        seen.append((rest["carry"] is not None, rest["out_dtype"]))
        return forward(self, *args, **rest)

    def watch_backward(self: Stopwatch, *args: Any, **rest: Any) -> None:
        seen.append((rest["accumulate"], rest["dq"].dtype))
        backward(self, *args, **rest)

    monkeypatch.setattr(Stopwatch, "forward", watch_forward)
    monkeypatch.setattr(Stopwatch, "backward", watch_backward)
    inputs = [torch.randn(1, 2, 96, 16, dtype=torch.bfloat16) for _ in range(4)]
    once = one_step(inputs, CAUSAL, carried=carried, backend="tiled")
    assert min(min(once()) for _ in range(3)) > 0
    assert seen == [(carried, torch.float32 if carried else torch.bfloat16)] * 6


def test_what_is_compared_runs_in_turn_and_counts_by_its_median() -> None:
    """First one warm-up call of each, then a, b, a, b, so that a slow moment does not affect only one of them."""
    order: list[str] = []
    times = {"a": iter([90.0, 1.0, 2.0, 50.0]), "b": iter([90.0, 3.0, 70.0, 4.0])}

    def once(name: str) -> tuple[float, float]:
        order.append(name)
        time = next(times[name])
        return time, 2 * time

    assert in_turn([lambda: once("a"), lambda: once("b")], repeats=3) == [(2.0, 4.0), (4.0, 8.0)]
    assert order == ["a", "b"] * 4
