"""Rounding of the Hopper kernels: scores far apart, values of any size. `pytest -m gpu` on a Hopper GPU."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashspan import attention
from flashspan.kernels import reference
from flashspan.kernels.contract import Problem
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Blocks
from tests.kernels.cases import relative
from tests.kernels.hopper_cases import FORWARD_BOUND, ON_HOPPER, UNIT, check, tensors

pytestmark = ON_HOPPER


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_scores_far_apart(head_dim: int, dtype: torch.dtype) -> None:
    """Maxima that grow by more than the softmax allows, so that its sums are rescaled, in a call and with a carry; or
    by more than float32 can represent, so that rows are recomputed."""
    for spread in (6, 100):
        for mask, pieces in ((CAUSAL, 1), (EVERYTHING, 1), (Band(-300, 200), 3)):
            x = tensors(random.Random(3), 1, 4, 2, 701, 903, head_dim, dtype)
            # Scores are larger by this factor, and so are the rounding errors in float32.
            scale = spread * head_dim**-0.5
            check(x, mask, scale, pieces, lse_bound=1e-5 * spread)
            if head_dim == 64:
                check([x[0] * (scale / UNIT), *x[1:]], mask, UNIT, pieces, lse_bound=1e-5 * spread)


@pytest.mark.parametrize(("dtype", "size", "score"), [(torch.bfloat16, 8.0, -160.0), (torch.float16, 1.0, -20.0)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_that_are_none_have_no_part_in_dq(head_dim: int, dtype: torch.dtype, size: float, score: float) -> None:
    """Past the last key K is 0, and a probability there would be exp(-lse), too large for 16 bits if all scores are
    this low."""
    q, k, v, dout = tensors(random.Random(5), 1, 2, 2, 257, 100, head_dim, dtype)
    mean = score / (size * head_dim)
    check([torch.full_like(q, size), mean * (1 + k), v, dout], EVERYTHING, 1.0, 1, lse_bound=1e-3)


@pytest.mark.parametrize(("sharp", "loose"), [(1.0, 1.1), (4.0, 1.5)])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_rounding_error_is_at_most_that_of_pytorch(way: str, head_dim: int, sharp: float, loose: float) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4096, head_dim, device="cuda", generator=generator).bfloat16() for _ in range(3))
    q = q * sharp
    right = reference.forward(q.double(), k.double(), v.double(), Problem(CAUSAL, head_dim**-0.5)).out
    ours = relative(attention(q, k, v, causal=True, backend="hopper"), right)
    theirs = relative(F.scaled_dot_product_attention(q, k, v, is_causal=True), right)
    bound = (0.9 if sharp == 1 else 1.0) if way == "float16" and head_dim <= 128 else 1.01
    assert ours <= bound * theirs
    if head_dim <= 128:  # block maps neither track a maximum nor convert V to float16: docs/kernels.md
        blocks = Blocks.of(CAUSAL, 4096, 4096).to("cuda")
        assert relative(attention(q, k, v, mask=blocks, backend="hopper"), right) <= loose * theirs


def rowwise(found: Tensor, wanted: Tensor) -> float:
    """The largest error of a row, relative to the row."""
    found, wanted = found.double(), wanted.double()
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)).max())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e-5, 1.0, 1e3, 1e6, 1e30])
def test_values_of_any_size(way: str, head_dim: int, size: float) -> None:
    choice = random.Random(1)
    q, k, v, _ = tensors(choice, 1, 2, 2, 900, 900, head_dim)
    v = (v * size).bfloat16()
    v[:, 1, 300:500] = 0.0
    right = reference.forward(q.double(), k.double(), v.double(), Problem(CAUSAL, head_dim**-0.5)).out
    assert rowwise(attention(q, k, v, causal=True, backend="hopper"), right) <= 2e-2


@pytest.mark.parametrize("head_dim", [64, 128])
def test_values_that_differ_by_more_than_float16_holds(way: str, head_dim: int) -> None:
    """Keys a million times larger or smaller than their neighbours, visible and hidden."""
    q, k, v, _ = tensors(random.Random(2), 1, 2, 2, 900, 900, head_dim)
    for place, size in ((3, 1e-6), (130, 1e6), (131, 1e-9), (640, 1e9), (899, 1e30)):
        v[:, :, place] *= size
    right = reference.forward(q.double(), k.double(), v.double(), Problem(CAUSAL, head_dim**-0.5)).out
    assert rowwise(attention(q, k, v, causal=True, backend="hopper"), right) <= 2e-2


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("place", [0, -1])
def test_keys_that_weigh_little_beside_one_of_no_value(way: str, head_dim: int, place: int) -> None:
    """The keys with weights of e^-14 of the largest determine the row, because the value of the largest is 0."""
    q, k, v, _ = tensors(random.Random(6), 1, 2, 2, 4096, 4096, head_dim)
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[:, :, place, 0], v[:, :, place] = 14.0, 0.0
    right = reference.forward(q.double(), k.double(), v.double(), Problem(EVERYTHING, 0.125)).out
    assert relative(attention(q, k, v, scale=0.125, backend="hopper"), right) <= FORWARD_BOUND


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_whose_scores_rise_late_and_not_all_at_once(way: str, head_dim: int) -> None:
    """Keys are visited from the last to the first. Here, for some rows, the first keys have much larger scores, which
    grow in steps and in one jump, and all keys together outweigh the largest one."""
    q, k, v, _ = tensors(random.Random(4), 1, 2, 2, 2000, 2000, head_dim)
    k[..., 0], q[..., 0] = 0.0, 0.0
    q[:, :, 5::64, 0] = 8.0
    q[:, 1, 40::64, 0] = 16.0
    # Times a row's factor and the scale of 1 / 8: up to 20, or 40, nats.
    k[:, :, :1500, 0] = (torch.arange(1500, 0, -1, device="cuda") / 75).bfloat16()
    k[:, 1, 700, 0] = 32.0
    for mask in (CAUSAL, EVERYTHING):
        check([q, k, v, torch.randn_like(q)], mask, 0.125, 1, lse_bound=1e-4)
        if head_dim == 64:
            check([q * (0.125 / UNIT), k, v, torch.randn_like(q)], mask, UNIT, 1, lse_bound=1e-4)
