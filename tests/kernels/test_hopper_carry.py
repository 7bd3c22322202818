"""Carries in the Hopper kernels, and tiles that are split into parts. `pytest -m gpu` on a Hopper GPU."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from flashspan.kernels import reference
from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Mask, Rows
from tests.kernels.cases import relative
from tests.kernels.hopper_cases import FORWARD_BOUND, ON_HOPPER, check, tensors

pytestmark = ON_HOPPER


def follow(
    x: list[Tensor], mask: Mask, cuts: list[int], out: Tensor | None = None, hidden: dict[int, float] | None = None
) -> tuple[Carry, Carry]:
    """The carry of calls over the keys between `cuts`, after hidden keys are replaced, and the float32 result."""
    from flashspan.kernels import hopper

    q, k, v, _ = x
    scale = q.shape[-1] ** -0.5
    right = reference.forward(q.float(), k.float(), v.float(), Problem(mask, scale))
    for index, value in (hidden or {}).items():
        k[:, :, index] = value
        v[:, :, index] = value
    carry: Carry | None = None
    if out is not None:
        nothing = torch.full(q.shape[:3], -torch.inf, device="cuda")
        carry = Carry(out.zero_(), nothing)
    for a, b in itertools.pairwise(cuts):
        part = mask.slice(range(q.shape[2]), range(a, b)).to("cuda")
        carry = hopper.forward(
            q, k[:, :, a:b], v[:, :, a:b], Problem(part, scale), carry=carry, out_dtype=torch.float32
        )
    assert carry is not None
    return carry, right


def check_carry(got: Carry, right: Carry) -> None:
    assert got.out.dtype == got.lse.dtype == torch.float32
    assert relative(got.out, right.out) <= FORWARD_BOUND
    assert torch.equal(got.lse.isinf(), right.lse.isinf())
    assert (got.lse - right.lse).nan_to_num(0, 0, 0).abs().max() <= 1e-5
    assert not got.out[right.lse.isinf()].any()


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(4100, 1280), (4100, 1344), (4100, 1300), (4200, 8960), (8300, 9088)]
)
def test_tiles_of_a_full_mask_are_cut_into_parts(num_queries: int, num_keys: int, head_dim: int) -> None:
    """If gradients are accumulated: all tiles if there are fewer than multiprocessors, otherwise those of the last
    round. Each part must be computed by exactly one program."""
    from flashspan.kernels.hopper.one_pass import backward_launch
    from flashspan.kernels.hopper.parts import new_rows
    from flashspan.kernels.hopper.tensors import BackwardInputs, new_counter

    q, k, v, dout = x = tensors(random.Random(head_dim), 1, 4, 2, num_queries, num_keys, head_dim)
    rows, sums = new_rows(q), [t.float() for t in (q, k, v)]
    counter = new_counter(q.device)
    launch = backward_launch(BackwardInputs(dout, q, k, v, rows, rows, EVERYTHING, 1.0, *sums, True, counter, counter))
    assert launch.constants["SPLIT_TILES"]
    assert launch.arguments[-1] > 1, "parts"
    check(x, EVERYTHING, head_dim**-0.5, 1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 136, 160, 192, 256])
def test_a_carry_survives_what_is_hidden_and_rows_that_see_nothing(head_dim: int) -> None:
    """If a tile has a NaN behind the mask, another kernel recomputes it, so the first must not change its carry."""
    start = torch.arange(333, dtype=torch.int32) % 300
    end = torch.where(start % 7 == 0, start, (start + 150).clamp(max=480))
    cases: list[tuple[Mask, list[int], tuple[int, ...]]] = [
        (Band(190, 289), [0, 150, 260, 500], (0, 100, 189)),  # no row sees the first call's keys, the last rows none
        (Rows(start, end, 500), [0, 130, 131, 390, 500], (485, 499)),  # every seventh row sees nothing
    ]
    for dtype, value in ((torch.bfloat16, torch.nan), (torch.float16, torch.inf)):
        for mask, cuts, hidden in cases:
            x = tensors(random.Random(head_dim), 2, 4, 2, 333, 500, head_dim, dtype)
            check_carry(*follow(x, mask.to("cuda"), cuts, hidden=dict.fromkeys(hidden, value)))


@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_a_carry_may_be_a_view_of_something_larger(head_dim: int) -> None:
    """It is updated in place, and the memory around it must not change: it may belong to other tensors."""
    x = tensors(random.Random(head_dim), 2, 3, 1, 200, 300, head_dim)
    larger = torch.full((2, 264, 5, head_dim + 8), 7.0, device="cuda")
    out = larger[:, 32:232, 1:4, :head_dim].transpose(1, 2)
    got, right = follow(x, CAUSAL, [0, 70, 300], out=out)
    check_carry(got, right)
    assert got.out.data_ptr() == out.data_ptr()
    out.fill_(7.0)
    assert (larger == 7.0).all()


def test_the_sequences_of_a_carry_may_lie_two_to_the_31_numbers_apart() -> None:
    x = tensors(random.Random(0), 2, 3, 1, 200, 300, 128)
    room = torch.empty(2**31 + 2**17, device="cuda")
    got, right = follow(x, CAUSAL, [0, 70, 300], out=room.as_strided((2, 3, 200, 128), (2**31, 128, 384, 1)))
    assert got.out.data_ptr() == room.data_ptr(), "in place"
    check_carry(got, right)
