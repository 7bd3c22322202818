"""Forward for only the blocks of 64 queries that are flagged, in the interpreter and compiled for sm_90."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashspan.kernels import portable
from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Blocks, Mask
from flashspan.kernels.portable.forward import forward_launch
from flashspan.masks.patterns import documents, ragged
from tests.kernels.cases import FORWARD_BOUND, Inputs, Shape, make_inputs, relative
from tests.kernels.compiler import run_apart

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, not interpreted")

random = torch.Generator().manual_seed(0)
SOME = torch.rand(2, 2, 150, 130, generator=random) < 0.5
CASES: dict[str, tuple[Shape, Mask]] = {
    "band": (Shape(2, 2, 1, 150, 170, 16), Band(-30, 40)),
    "rows": (Shape(1, 2, 1, 150, 150, 20), documents([10, 0, 80, 60]) & CAUSAL),
    "rows of each sequence": (Shape(2, 1, 1, 130, 70, 16), ragged([10, 60], 130, 70)),
    "blocks": (Shape(1, 2, 1, 200, 170, 16), Blocks.of(Band(-200, 20), 200, 170, block=64)),
    "blocks of two parts, a map for each": (Shape(2, 2, 1, 150, 130, 16), Blocks.from_dense(SOME)),
}
IN_CI = {("band", True), ("band", False), ("rows", False), ("rows of each sequence", True), ("blocks", True)}
"""Each kind of mask, with a carry or without; the slow tests have every pair."""


def rows_of(flags: Tensor, num_queries: int) -> Tensor:
    """bool [B, H, T]: the rows whose flag is set."""
    return flags.bool().repeat_interleave(64, -1)[..., :num_queries]


def launch(x: Inputs, mask: Mask, into: Carry, carry: bool, flags: Tensor) -> None:
    forward_launch(x.q, x.k, x.v, *into, mask, 0.3, carry, None, only=flags)()


def ordinary(x: Inputs, mask: Mask, into: Carry, carry: bool) -> None:
    """Run the ordinary kernel with 64 queries per program."""
    whole = forward_launch(x.q, x.k, x.v, *into, mask, 0.3, carry, None)
    B, H, T, _ = x.q.shape
    line = mask.block[0] if isinstance(mask, Blocks) else 64  # a map's lines are computed up to their end
    grid = B * H * -(-T // line) * line // 64
    replace(whole, grid=(grid,), constants={**whole.constants, "BM": 64})()


@interpreted
@pytest.mark.parametrize(
    ("name", "carry"),
    [
        pytest.param(name, carry, marks=[] if (name, carry) in IN_CI else [pytest.mark.slow])
        for carry in (True, False)
        for name in CASES
    ],
)
def test_flagged_rows_are_the_ordinary_kernel_s_and_others_stay(name: str, carry: bool) -> None:
    shape, mask = CASES[name]
    x = make_inputs(shape, seed=1)
    B, H, T, D = x.q.shape
    flags = torch.randint(0, 2, (B, H, -(-T // 64)), generator=random).int()
    flags[0, 0, -1], flags[-1, -1, 0] = 1, 0
    if carry:
        before = Carry(torch.randn(B, H, T, D, generator=random), torch.randn(B, H, T, generator=random))
    else:
        before = Carry(torch.full((B, H, T, D), torch.nan), torch.full((B, H, T), torch.nan))
    right, made = (Carry(before.out.clone(), before.lse.clone()) for _ in range(2))
    ordinary(x, mask, right, carry)
    launch(x, mask, made, carry, flags)
    flagged = rows_of(flags, T)
    for now, then, wanted in zip(made, before, right, strict=True):
        assert torch.equal(now[flagged], wanted[flagged])
        assert torch.equal(now[~flagged].nan_to_num(7), then[~flagged].nan_to_num(7))
    plain = portable.forward(x.q, x.k, x.v, Problem(mask, 0.3), carry=before if carry else None)
    assert relative(made.out[flagged], plain.out[flagged]) <= FORWARD_BOUND


@interpreted
@pytest.mark.parametrize("sparse", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_few_programs_look_at_any_number_of_flags(sparse: bool) -> None:
    heads = 10000
    x = make_inputs(Shape(1, heads, 1, 1, 5, 16), seed=2)
    mask = Blocks.of(EVERYTHING, 1, 5) if sparse else EVERYTHING
    flagged = torch.tensor([0, 130, 131, 4191, 4192, 4193, 8383, 8384, 9998])  # 131 programs, 32 flags at a time
    flags = torch.zeros(1, heads, 1).int()
    flags[0, flagged] = 1
    out, lse = torch.full_like(x.q, torch.nan), torch.full((1, heads, 1), torch.nan)
    assert forward_launch(x.q, x.k, x.v, out, lse, mask, 0.3, False, None, only=flags).grid[0] <= 256
    launch(x, mask, Carry(out, lse), False, flags)
    plain = portable.forward(x.q[:, flagged], x.k, x.v, Problem(mask, 0.3))
    assert relative(out[:, flagged], plain.out) <= FORWARD_BOUND
    assert relative(lse[:, flagged], plain.lse) <= FORWARD_BOUND
    assert int(lse.isfinite().sum()) == int(out.isfinite().any(-1).sum()) == len(flagged)


PROGRAM = """
import json, sys, torch
from flashspan.kernels.masks import Blocks
from benchmarks.compile_kernels import compile_launch
from flashspan.kernels.masks import CAUSAL
from flashspan.masks.patterns import documents
from flashspan.kernels.portable.forward import forward_launch
kind, head_dim, carry = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "carry"
mask = {"band": CAUSAL, "rows": documents([1000, 3096]), "blocks": Blocks.of(CAUSAL, 4096, 4096)}[kind]
q, k, v = (torch.empty(1, 8, 4096, head_dim, dtype=torch.bfloat16, device="meta") for _ in range(3))
lse, flags = torch.empty(1, 8, 4096, device="meta"), torch.empty(1, 8, 64, dtype=torch.int32, device="meta")
cost = compile_launch(forward_launch(q, k, v, q.float() if carry else q, lse, mask, 0.125, carry, None, only=flags))
print(json.dumps([cost.shared_bytes, cost.instructions["HGMMA"], cost.warnings]))
"""


def compiles(kind: str, head_dim: int, carry: str) -> None:
    [[shared, products, warnings]] = run_apart(PROGRAM, kind, str(head_dim), carry)
    assert shared <= 232448, "a Hopper block has 227 KiB of shared memory"
    assert products > 0
    assert not [warning for warning in warnings if "serialized" in warning]


@pytest.mark.slow
def test_it_compiles() -> None:
    compiles("band", 128, "plain")


@pytest.mark.slow
@pytest.mark.parametrize("carry", ["plain", "carry"])
@pytest.mark.parametrize(("kind", "head_dim"), [("band", 256), ("rows", 128), ("blocks", 64), ("blocks", 128)])
def test_the_others_compile(kind: str, head_dim: int, carry: str) -> None:
    compiles(kind, head_dim, carry)
