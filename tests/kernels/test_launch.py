"""What decides which compiled kernel a launch wants, and which tensors the copy engine takes; no GPU needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashspan.kernels.portable.arguments import Launch, _Plan

KERNEL = SimpleNamespace(arg_names=["x", "stride", "T", "scale", "BLOCK"], do_not_specialize=["T"])


def key(x: torch.Tensor, stride: int, length: int, scale: float, block: int) -> tuple[Any, ...]:
    launch = Launch(KERNEL, (1,), (x, stride, length, scale), {"BLOCK": block})
    return _Plan.of(launch).key(launch)


def test_a_launch_wants_the_kernel_of_its_types_alignment_and_constants() -> None:
    x = torch.zeros(64)
    first = key(x, 16, 100, 0.5, 32)
    assert first == key(x, 16, 7, 0.25, 32), "lengths and scales compile nothing"
    for other in (
        key(x.half(), 16, 100, 0.5, 32),
        key(x[1:], 16, 100, 0.5, 32),
        key(x, 1, 100, 0.5, 32),
        key(x, 16, 2**31, 0.5, 32),
        key(x, 16, 100, 0.5, 64),
    ):
        assert other != first


@pytest.mark.parametrize(
    ("view", "fits"),
    [
        (lambda x: x, True),
        (lambda x: x.transpose(1, 2), True),  # [B, T, H, D]
        (lambda x: x[..., :16], True),  # a part of a fused projection
        (lambda x: x[:, :, :1], True),
        (lambda x: x[..., 1:17], False),  # begins between 16 bytes
        (lambda x: x[:1].expand(2, -1, -1, -1), False),  # no step at all
        (lambda x: x.transpose(2, 3), False),
    ],
)
def test_what_the_copy_engine_takes_is_not_copied(view: Any, fits: bool) -> None:
    launch = pytest.importorskip("flashspan.kernels.hopper.launch")
    x = view(torch.randn(2, 3, 40, 64, generator=torch.Generator().manual_seed(0)).half())
    assert launch.is_aligned(x) is fits
    copy = launch.aligned(x)
    assert (copy is x) is fits
    assert launch.is_aligned(copy)
    assert torch.equal(copy, x)
