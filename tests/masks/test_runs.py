"""Runs that a kernel finds equal those of PyTorch's operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashspan.masks.runs import find_runs
from flashspan.masks.runs_triton import find_runs as find_runs_by_kernels

KERNELS_ON = "cuda" if torch.cuda.is_available() else "cpu"
"""The device on which Triton's kernels run: without a GPU, the CPU, in the interpreter."""


def some_runs(random: torch.Generator, num_batch: int, T: int, S: int) -> Tensor:
    """bool [B, T, S]: at most one run of keys in each row."""
    start, end = torch.randint(S + 1, (2, num_batch, T, 1), generator=random)
    return (torch.arange(S) >= start) & (torch.arange(S) < end)


@pytest.mark.parametrize(
    "S", [1, 31, 100, 1024, *(pytest.param(x, marks=pytest.mark.slow) for x in (32, 1023, 2600, 4096))]
)
def test_kernels_find_the_same_runs(S: int) -> None:
    random = torch.Generator().manual_seed(S)
    for num_batch, T in ((1, 1), (2, 9), (1, 16)):
        runs = some_runs(random, num_batch, T, S)
        for visible in (runs, runs.mT.contiguous().mT, runs[:, :1].expand(-1, T, -1), runs[..., :1].expand(-1, -1, S)):
            found, want = find_runs_by_kernels(visible.to(KERNELS_ON)), find_runs(visible)
            assert found is not None
            assert want is not None
            keys = torch.arange(S)
            assert torch.equal((keys >= want[0][..., None]) & (keys < want[1][..., None]), visible)
            for one, two in zip(found, want, strict=True):
                assert one.dtype == two.dtype == torch.int32
                assert torch.equal(one.cpu(), two)


@pytest.mark.parametrize("S", [3, 32, 100, 1030, 2048])
def test_a_gap_in_any_row_is_seen(S: int) -> None:
    random = torch.Generator().manual_seed(S)
    for gap in {1, S // 2, S - 2}:
        visible = some_runs(random, 2, 9, S)
        visible[1, 8] = True
        visible[1, 8, gap] = False
        assert find_runs(visible) is None
        assert find_runs_by_kernels(visible.to(KERNELS_ON)) is None
    many = torch.arange(2048).remainder(2).bool()[None, None]  # 1024 True: more than a byte can count
    assert find_runs(many) is None
