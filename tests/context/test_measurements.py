"""The scripts that measure rings run, and what they compare with gives the same answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashspan.bench.ring_cpu import compare
from flashspan.bench.walk import measure
from flashspan.kernels.masks import CAUSAL

OnRanks = Callable[..., list[Any]]


def test_our_ring_and_pytorchs_agree(on_ranks: OnRanks) -> None:
    """An oracle of its own: `_templated_ring_attention`, forward and backward, on 8 ranks."""
    for chunks in (1, 2):
        for answer in on_ranks(compare, 256, 2, 16, 1, chunks):
            assert max(answer["difference"]) < 2e-6
            assert len(answer["ours"]) == len(answer["theirs"]) == 1


@pytest.mark.parametrize("strategy", ["ring", "helper"])
def test_all_ranks_of_a_ring_can_be_timed_on_one_device(strategy: str) -> None:
    inputs = [torch.randn(1, 2, 96, 16) for _ in range(4)]
    times = measure(inputs, CAUSAL, 4, strategy=strategy, layout="zigzag", backend="tiled", repeats=1)
    assert min(times) > 0
