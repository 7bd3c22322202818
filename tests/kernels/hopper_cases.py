"""Inputs and checks for the tests of the Hopper kernels, which need a Hopper GPU."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from flashspan.kernels import reference
from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.delta import row_delta
from flashspan.kernels.masks import Mask
from tests.kernels.cases import relative

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
]
FORWARD_BOUND, GRADIENT_BOUND = 4e-3, 6e-3  # bfloat16 has eight bits; compared with float32
UNIT = math.log(2)
"""The scale with which scores are exponents of 2 without a multiplication (parts.py)."""

WAYS = {"float16": 0, "followed": 2**62}
"""The least number of queries that see a key for which V becomes float16; otherwise TRACK_MAXIMUM (softmax.py)."""


def let_hopper_serve_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the Hopper kernels run short calls, for which few_tiles.py would be chosen, with V in float16 or not."""
    from flashspan.kernels.hopper.tiles import FLOAT16_BLOCKS  # imported here, because Triton may be missing
    from flashspan.kernels.portable import few_tiles

    for head_dim in FLOAT16_BLOCKS:
        monkeypatch.setitem(FLOAT16_BLOCKS, head_dim, 0)
    for name in ("forward_tile", "backward_tile"):
        monkeypatch.setattr(few_tiles, name, lambda q, k, mask: None)


def tensors(
    choice: random.Random, B: int, H: int, K: int, T: int, S: int, D: int, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """q, k, v and dout in a random layout: [B, H, T, D], [B, T, H, D] or a view of fused projections."""
    generator = torch.Generator("cuda").manual_seed(choice.randint(0, 2**31))

    def make(heads: int, tokens: int) -> Tensor:
        layout = choice.choice(("BHTD", "BTHD", "fused"))
        if layout == "BHTD":
            return torch.randn(B, heads, tokens, D, device="cuda", generator=generator).to(dtype)
        wide = heads * D * (3 if layout == "fused" else 1)
        flat = torch.randn(B, tokens, wide, device="cuda", generator=generator).to(dtype)
        return flat[..., : heads * D].unflatten(-1, (heads, D)).transpose(1, 2)

    return [make(H, T), make(K, S), make(K, S), make(H, T)]


def check(
    x: list[Tensor], mask: Mask, scale: float, pieces: int, repeatable: bool = False, lse_bound: float = 1e-5
) -> None:
    """Compare with float32: forward in several calls that share a carry, and backward that overwrites and
    accumulates."""
    from flashspan.kernels import hopper

    q, k, v, dout = x
    mask = mask.to("cuda")
    full = [t.float() for t in x]
    right = reference.forward(*full[:3], Problem(mask, scale))
    wanted = tuple(torch.zeros_like(t) for t in full[:3])
    delta = row_delta(dout, right.out)
    reference.backward(
        full[3],
        *full[:3],
        right.lse,
        delta,
        Problem(mask, scale),
        dq=wanted[0],
        dk=wanted[1],
        dv=wanted[2],
        accumulate=True,
    )

    num_keys = k.shape[2]
    cuts = [num_keys * i // pieces for i in range(pieces + 1)]
    carry: Carry | None = None
    for a, b in itertools.pairwise(cuts):
        part = mask.slice(range(q.shape[2]), range(a, b)).to("cuda") if pieces > 1 else mask
        kind = torch.float32 if pieces > 1 else q.dtype
        carry = hopper.forward(q, k[:, :, a:b], v[:, :, a:b], Problem(part, scale), carry=carry, out_dtype=kind)
    assert carry is not None
    assert relative(carry.out, right.out) <= FORWARD_BOUND
    assert torch.equal(carry.lse.isinf(), right.lse.isinf())
    assert (carry.lse - right.lse).nan_to_num(0, 0, 0).abs().max() <= lse_bound
    assert not carry.out[right.lse.isinf()].any()

    fresh = tuple(torch.full_like(t, torch.nan) for t in (q, k, v))
    problem = Problem(mask, scale, deterministic=repeatable)
    hopper.backward(dout, q, k, v, right.lse, delta, problem, dq=fresh[0], dk=fresh[1], dv=fresh[2], accumulate=False)
    sums = tuple(torch.ones(t.shape, device="cuda") for t in (q, k, v))
    hopper.backward(dout, q, k, v, right.lse, delta, problem, dq=sums[0], dk=sums[1], dv=sums[2], accumulate=True)
    # backward_of_output with a 16-bit output must equal backward with the delta of that output, which differs from the
    # exact delta if one key has all the weight.
    out = right.out.to(q.dtype)
    again, same = ([torch.full_like(t, torch.nan) for t in (q, k, v)] for _ in range(2))
    hopper.backward_of_output(dout, q, k, v, out, right.lse, problem, dq=again[0], dk=again[1], dv=again[2])
    given = (dout, q, k, v, right.lse, row_delta(dout, out))
    hopper.backward(*given, problem, dq=same[0], dk=same[1], dv=same[2], accumulate=False)
    for name, a, b, want in zip(("dq", "dk", "dv"), fresh, sums, wanted, strict=True):
        assert relative(a, want, *wanted) <= GRADIENT_BOUND, name
        assert relative(b - 1, want, *wanted) <= GRADIENT_BOUND, name
    for name, a, b in zip(("dq", "dk", "dv"), again, same, strict=True):
        assert relative(a, b.float(), *wanted) <= 1e-3, f"{name} of the output"
