"""Block maps on the Hopper kernels. They compile for sm_90 without a GPU; on one: `pytest -m gpu` of this file."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashspan import attention, explain, masks
from flashspan.kernels import reference
from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.delta import row_delta
from flashspan.kernels.masks import Blocks
from tests.kernels.cases import relative
from tests.kernels.compiler import run_apart
from tests.kernels.hopper_cases import ON_HOPPER

PROGRAM = """
import json, sys, torch
from flashspan.kernels.masks import Blocks
from benchmarks.compile_kernels import compile_launch, hopper_launches
from flashspan.kernels.masks import CAUSAL
which, head_dim = sys.argv[1], int(sys.argv[2])
launch = hopper_launches(torch.bfloat16, head_dim, mask=Blocks.of(CAUSAL, 4096, 4096))[which]
cost = compile_launch(launch)
print(json.dumps([cost.spilled_bytes, cost.shared_bytes, cost.instructions["HGMMA"], cost.warnings]))
"""


def compiles(which: str, head_dim: int) -> None:
    [[spilled, shared, products, warnings]] = run_apart(PROGRAM, which, str(head_dim))
    assert spilled <= 400, "a few addresses outside the loops, at most"
    assert shared <= 232448, "a Hopper block has 227 KiB of shared memory"
    assert products > 0
    assert not [warning for warning in warnings if "serialized" in warning]


def test_forward_compiles() -> None:
    compiles("forward", 64)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "head_dim"), [("forward", 128), ("backward", 64), ("backward", 128)])
def test_the_others_compile(which: str, head_dim: int) -> None:
    compiles(which, head_dim)


def gpu_test(test: Callable[..., None]) -> Callable[..., None]:
    for mark in ON_HOPPER:
        test = mark(test)
    return test


def some_map(generator: torch.Generator, *lead: int, T: int, S: int) -> Tensor:
    """Full, partial and empty blocks, as bool [*lead, T, S]; one line and one column are hidden."""
    kinds = torch.rand(*lead, -(-T // 128), -(-S // 128), generator=generator)

    def spread(x: Tensor) -> Tensor:
        return x.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :T, :S]

    seen = spread(kinds < 0.6) & (spread(kinds < 0.3) | (torch.rand(*lead, T, S, generator=generator) < 0.5))
    seen[..., 128:256, :] = False
    seen[..., :, 256:384] = False
    return seen


@gpu_test
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
@pytest.mark.parametrize("lead", [(), (1, 4), (3, 1), (3, 4)])
def test_maps_of_heads_and_batches_match_the_reference(lead: tuple[int, ...], head_dim: int) -> None:
    from flashspan.kernels import hopper

    B, H, K, T, S = 3, 4, 2, 1000, 777
    generator = torch.Generator().manual_seed(head_dim)
    mask = Blocks.from_dense(some_map(generator, *lead, T=T, S=S)).to("cuda")
    q, k, v, dout = (
        torch.randn(B, n, heads, head_dim, generator=generator).cuda().bfloat16().transpose(1, 2)
        for n, heads in ((T, H), (S, K), (S, K), (T, H))
    )
    assert explain(q, k, v, mask=mask).name == "hopper"
    full, scale = [x.float() for x in (q, k, v, dout)], head_dim**-0.5
    right = reference.forward(*full[:3], Problem(mask, scale))
    delta = row_delta(dout, right.out)
    wanted = [torch.zeros_like(x) for x in full[:3]]
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
    half = mask.part(range(T), range(S // 2)), mask.part(range(T), range(S // 2, S))
    carry: Carry | None = None
    for part, keys in zip(half, (slice(S // 2), slice(S // 2, S)), strict=True):
        carry = hopper.forward(q, k[:, :, keys], v[:, :, keys], Problem(part, scale), carry=carry)
    once = hopper.forward(q, k, v, Problem(mask, scale), out_dtype=q.dtype)
    assert carry is not None
    for got in (carry, once):
        assert relative(got.out, right.out) <= 4e-3
        assert torch.equal(got.lse.isinf(), right.lse.isinf())
        assert (got.lse - right.lse).nan_to_num(0, 0, 0).abs().max() <= 1e-5
        assert not got.out[right.lse.isinf()].any()
    fresh = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    sums = [torch.ones(x.shape, device="cuda") for x in (q, k, v)]
    for grads, accumulate in ((fresh, False), (sums, True)):
        hopper.backward(
            dout,
            q,
            k,
            v,
            right.lse,
            delta,
            Problem(mask, scale),
            dq=grads[0],
            dk=grads[1],
            dv=grads[2],
            accumulate=accumulate,
        )
    for name, a, b, want in zip(("dq", "dk", "dv"), fresh, sums, wanted, strict=True):
        assert relative(a, want, *wanted) <= 6e-3, name
        assert relative(b - 1, want, *wanted) <= 6e-3, name


@gpu_test
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_in_a_masked_key_reaches_no_result(head_dim: int) -> None:
    mask = Blocks.of(masks.window(150, 20), 500, 500).to("cuda")
    sees = mask.dense()[:, 300]
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(1, 2, 500, head_dim, generator=generator).cuda().bfloat16() for _ in range(4))
    for hidden in (k, v):
        kept = hidden[0, 0, 300].clone()
        for value in (torch.nan, torch.inf):
            hidden[0, 0, 300] = value
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = attention(*leaves, mask=mask, backend="hopper")
            grads = torch.autograd.grad(out, leaves, dout)
            assert out[0, 0, ~sees].isfinite().all()
            assert not out[0, 0, sees].isfinite().any()
            assert out[0, 1].isfinite().all()
            assert grads[0][0, 0, ~sees].isfinite().all()
            assert all(x[0, 1].isfinite().all() for x in grads)
        hidden[0, 0, 300] = kept


@gpu_test
def test_who_serves_which_map() -> None:
    q = torch.zeros(1, 1, 256, 128, device="cuda", dtype=torch.bfloat16)
    wide = torch.zeros(1, 1, 256, 256, device="cuda", dtype=torch.bfloat16)
    mask, small = (Blocks.of(masks.window(100, 0), 256, 256, block=size).to("cuda") for size in (128, 64))
    assert explain(q, q, q, mask=mask).name == "hopper"
    assert explain(q, q, q, mask=mask, deterministic=True).name == "portable"
    for x, other, reason in ((q, small, "64 x 64"), (wide, mask, "256")):
        choice = explain(x, x, x, mask=other)
        assert choice.name == "portable"
        assert reason in choice.reasons["hopper"]
