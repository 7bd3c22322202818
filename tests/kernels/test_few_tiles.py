"""Calls of few tiles, each pass one launch: in Triton's interpreter and, `pytest -m gpu`, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashspan import attention, promise
from flashspan.kernels import hopper
from flashspan.kernels.contract import Problem
from flashspan.kernels.launch.compiling import launches_of
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Mask, Rows
from flashspan.kernels.portable import decode, few_tiles
from flashspan.kernels.portable.forward import forward_launch
from flashspan.kernels.portable.tiles import Tile
from tests.kernels.cases import Inputs, Shape, make_inputs
from tests.kernels.compiler import compile_apart

GPU = torch.cuda.is_available()
interpreted = pytest.mark.skipif(GPU, reason="the kernels are compiled here, not interpreted")
GRADIENTS = ("dq", "dk", "dv")


def scattered(num_queries: int, num_keys: int) -> Rows:
    """Intervals in any order, so that the queries that see a key are not an interval."""
    start, end = torch.randint(0, num_keys + 1, (2, num_queries), generator=torch.Generator().manual_seed(0))
    return Rows(start, end, num_keys)


CASES: dict[str, tuple[Shape, Mask]] = {
    "one tile, grouped": (Shape(2, 4, 2, 25, 25, 16), CAUSAL),
    "odd head size, more queries": (Shape(1, 2, 2, 70, 40, 24), EVERYTHING),
    "the last query sees the last key": (Shape(1, 4, 1, 33, 130, 16), Band(None, 97)),
    "window": (Shape(1, 1, 1, 90, 90, 16), Band(-20, 0)),
    "keys that no query sees": (Shape(1, 2, 1, 20, 140, 16), Band(None, -7)),
    "keys ahead": (Shape(1, 1, 1, 70, 70, 16), Band(3, None)),
    "scattered": (Shape(1, 2, 1, 50, 100, 16), scattered(50, 100)),
}


@pytest.fixture(autouse=True)
def fill_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the parts of gradients begin as NaN."""
    empty = few_tiles.empty_parts
    monkeypatch.setattr(few_tiles, "empty_parts", lambda x, n: empty(x, n).fill_(torch.nan))


def compute(x: Inputs, mask: Mask, scale: float, size: Tile) -> dict[str, torch.Tensor]:
    """Run both passes with these tiles."""
    out = torch.full_like(x.q, torch.nan)
    lse = out.new_empty(out.shape[:3])
    forward_launch(x.q, x.k, x.v, out, lse, mask, scale, False, None, size=size)()
    grads = [torch.full_like(y, torch.nan) for y in (x.q, x.k, x.v)]
    assert few_tiles.backward((x.dout, x.q, x.k, x.v, lse, out), grads, Problem(mask, scale), size)
    return {"out": out, "lse": lse, **dict(zip(GRADIENTS, grads, strict=True))}


SIZES = {
    "wide": Tile(32, 64, 64, 4, 2),
    "tall": Tile(64, 32, 32, 4, 1, edge_stages=2),
    "parts of keys": Tile(32, 32, 32, 4, 1, key_parts=3),
    "parts of queries": Tile(32, 32, 32, 4, 1, query_parts=2),
    "parts of both": Tile(16, 32, 32, 4, 1, query_parts=5, key_parts=2),
}


@interpreted
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", CASES)
def test_keeps_the_promise(name: str, size: Tile) -> None:
    shape, mask = CASES[name]
    x = make_inputs(shape, seed=1)
    right = promise.solve(x.q, x.k, x.v, x.dout, mask=mask, scale=0.3)
    found = compute(x, mask, 0.3, size)
    ratios = right.ratios(torch.float32, **found)
    assert max(ratios.values()) <= 1, ratios
    assert all(torch.equal(found[name], y) for name, y in compute(x, mask, 0.3, size).items())


@interpreted
def test_nan_in_a_key_reaches_only_the_queries_that_see_it() -> None:
    x = make_inputs(Shape(1, 1, 1, 60, 60, 16), seed=2)
    clean = compute(x, CAUSAL, 0.3, Tile(32, 32, 32, 4, 1))
    x.k[:, :, 40], x.v[:, :, 50] = torch.nan, torch.nan
    found = compute(x, CAUSAL, 0.3, Tile(32, 32, 32, 4, 1))
    for name in ("out", "lse", "dq"):
        assert torch.equal(found[name][:, :, :40], clean[name][:, :, :40]), name
    assert found["out"][:, :, 40:].isnan().all()
    assert found["dq"][:, :, 40:].isnan().all()


def sizes_of(*shape: int, mask: Mask = EVERYTHING, dtype: torch.dtype = torch.bfloat16) -> list[Tile | None]:
    """The tiles of forward and backward for a shape; None for passes that other kernels run."""
    B, H, K, T, S, D = shape
    q, k = torch.empty(B, H, T, D, dtype=dtype, device="meta"), torch.empty(B, K, S, D, dtype=dtype, device="meta")
    return [few_tiles.forward_tile(q, k, mask), few_tiles.backward_tile(q, k, mask)]


def test_calls_of_few_tiles_are_served_and_no_others() -> None:
    for shape in ((4, 8, 2, 25, 25, 64), (2, 4, 4, 102, 51, 128), (2, 8, 8, 230, 230, 128), (2, 1, 1, 1259, 1259, 64)):
        assert all(sizes_of(*shape)), shape
    for shape in ((1, 4, 1, 659, 659, 128), (1, 4, 4, 2048, 2048, 64)):
        forward, backward = sizes_of(*shape, mask=CAUSAL)
        assert forward is not None
        assert backward is None
    for shape in ((32, 12, 12, 197, 197, 64), (2, 16, 16, 4096, 77, 64), (1, 16, 16, 8192, 8192, 128)):
        assert sizes_of(*shape) == [None, None], shape
    assert sizes_of(1, 8, 8, 100, 100, 64, dtype=torch.float32) == [None, None]
    assert sizes_of(1, 8, 8, 100, 0, 64) == [None, None]


def test_programs_share_a_block_if_many_query_heads_share_few_keys() -> None:
    def parts(*shape: int) -> tuple[int, int] | None:
        size = sizes_of(*shape)[1]
        return None if size is None else (size.query_parts, size.key_parts)

    assert parts(1, 4, 1, 495, 495, 128) == (16, 8)
    assert parts(1, 2, 1, 1259, 1259, 64) == (13, 6)
    assert parts(1, 16, 1, 25, 25, 128) == (8, 1)
    assert parts(2, 8, 8, 230, 230, 128) == (1, 1)
    assert parts(1, 8, 8, 47, 4480, 64) is None, "the keys are many, not the queries"
    assert parts(1, 8, 1, 495, 495, 128) is None, "too many tiles in total"


def test_edge_tiles_of_forward_are_pipelined_up_to_a_head_size_of_64() -> None:
    stages = [sizes_of(2, 8, 8, 230, 230, D)[0] for D in (40, 64, 128)]
    assert [size and size.edge_stages for size in stages] == [2, 2, 1]


def test_few_blocks_of_queries_over_many_keys_are_divided_by_keys() -> None:
    def num_splits(*shape: int, mask: Mask = EVERYTHING) -> int:
        B, H, K, T, S, D = shape
        q, k = (torch.empty(B, h, n, D, dtype=torch.bfloat16, device="meta") for h, n in ((H, T), (K, S)))
        return decode.count_splits(q, k, mask) if decode.takes(q, k, mask) else 0

    assert num_splits(1, 4, 4, 310, 24882, 128, mask=Band(None, 24572)) == 11
    assert num_splits(1, 2, 1, 900, 4000, 128) == 8
    assert num_splits(1, 1, 1, 4096, 4096, 128, mask=CAUSAL) == 4
    assert num_splits(1, 8, 8, 1024, 1024, 128, mask=CAUSAL) == 0
    assert num_splits(1, 12, 12, 4096, 4096, 64) == 0


@pytest.mark.parametrize(
    ("length", "mask", "names"),
    [
        (197, EVERYTHING, ["forward_kernel"]),
        (197, CAUSAL, ["forward_kernel", "repair_kernel"]),
        (197, Band(-50, None), ["forward_kernel", "repair_kernel"]),
        (4000, EVERYTHING, ["float16_kernel", "forward_kernel", "repair_kernel"]),
    ],
)
def test_rows_are_repaired_only_if_keys_are_hidden_or_v_is_converted(length: int, mask: Band, names: list[str]) -> None:
    q = torch.empty(32, 12, length, 64, dtype=torch.bfloat16, device="meta")
    launches = launches_of(lambda: hopper.forward(q, q, q, Problem(mask, 0.1), out_dtype=q.dtype))
    assert [launch.kernel.__name__ for launch in launches] == names


PROGRAM = """
import json, sys
import torch
from benchmarks.compile_kernels import compile_launch
from flashspan.kernels.contract import Problem
from flashspan.kernels.launch.compiling import launches_of
from flashspan.kernels.masks import CAUSAL
from flashspan.kernels.portable import few_tiles
for head_dim, length, key_heads in json.loads(sys.argv[1]):
    q = torch.empty(1, 4, length, head_dim, dtype=torch.bfloat16, device="meta")
    k, lse = q.new_empty(1, key_heads, length, head_dim), torch.empty(1, 4, length, device="meta")
    problem = Problem(CAUSAL, 0.1)
    forward, backward = few_tiles.forward_tile(q, k, CAUSAL), few_tiles.backward_tile(q, k, CAUSAL)
    launches = launches_of(lambda: few_tiles.forward(q, k, k, problem, forward, q.dtype))
    launches += launches_of(lambda: few_tiles.backward((q, q, k, k, lse, q), (q, k, k), problem, backward))
    costs = [compile_launch(launch) for launch in launches]
    print(json.dumps([[cost.spilled_bytes, cost.shared_bytes] for cost in costs]))
"""


@pytest.mark.slow
def test_every_tile_compiles_with_hardly_a_spill() -> None:
    calls = [(64, 25, 4), (64, 200, 4), (128, 25, 4), (128, 200, 4), (128, 495, 1)]
    for call, costs in zip(calls, compile_apart(PROGRAM, calls), strict=True):
        assert len(costs) == (3 if call[2] == 1 else 2)
        for spilled, shared in costs:
            assert spilled <= 160, call
            assert shared <= 232448 // 2, call


ON_GPU = [
    (Shape(4, 8, 2, 25, 25, 64), CAUSAL),
    (Shape(2, 4, 4, 102, 51, 128), EVERYTHING),
    (Shape(2, 8, 8, 230, 230, 128), EVERYTHING),
    (Shape(2, 1, 1, 1259, 1259, 64), EVERYTHING),
    (Shape(1, 8, 8, 512, 512, 40), Band(-70, 0)),
    (Shape(2, 2, 1, 20, 60, 256), EVERYTHING),
    (Shape(3, 2, 2, 90, 200, 64), scattered(90, 200)),
    (Shape(1, 4, 4, 310, 3000, 128), Band(None, 2690)),
    (Shape(1, 2, 1, 900, 4000, 96), EVERYTHING),
    # Backward: programs share a block.
    (Shape(1, 4, 1, 495, 495, 128), EVERYTHING),
    (Shape(1, 7, 1, 301, 301, 64), CAUSAL),
    (Shape(1, 16, 1, 25, 25, 128), CAUSAL),
    # Backward: few rows of large heads.
    (Shape(1, 8, 8, 47, 4480, 160), Band(None, 4433)),
    (Shape(2, 24, 8, 20, 1001, 256), EVERYTHING),
    (Shape(2, 4, 2, 17, 500, 160), scattered(17, 500)),
    # Forward: a head as two tiles of columns. Backward: Hopper's pass for dq in parts.
    (Shape(1, 4, 4, 333, 3001, 160), Band(None, 2668)),
    (Shape(1, 4, 2, 100, 2001, 192), EVERYTHING),
    # Backward: Hopper's pass for dq in parts.
    (Shape(1, 4, 2, 333, 1999, 256), Band(None, 1666)),
    (Shape(2, 3, 3, 129, 1000, 256), Band(-300, 900)),
]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "mask"), ON_GPU, ids=str)
def test_calls_keep_the_promise_on_a_gpu_and_repeat(shape: Shape, mask: Mask, dtype: torch.dtype) -> None:
    x = make_inputs(shape, seed=7, dtype=dtype, device="cuda")
    scale = shape.head_dim**-0.5
    right = promise.solve(x.q, x.k, x.v, x.dout, mask=mask, scale=scale, rounded=True)
    q, k, v = (y.detach().requires_grad_() for y in (x.q, x.k, x.v))

    def call() -> dict[str, torch.Tensor]:
        out, lse = attention(q, k, v, mask=mask, scale=scale, return_lse=True, deterministic=True)
        grads = torch.autograd.grad(out, (q, k, v), x.dout)
        return {"out": out, "lse": lse, **dict(zip(GRADIENTS, grads, strict=True))}

    first = call()
    ratios = right.ratios(dtype, **first)
    assert max(ratios.values()) <= 1, ratios
    for _ in range(10):
        assert all(torch.equal(first[name], y) for name, y in call().items())


@pytest.mark.gpu
def test_a_short_call_is_one_launch_and_its_backward_another(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    start = Launch.start

    def count(launch: Launch, compiled: Any) -> None:
        launched.append(launch.kernel.__name__)
        start(launch, compiled)

    monkeypatch.setattr(Launch, "start", count)
    q, k, v = torch.randn(3, 1, 4, 77, 64, device="cuda", dtype=torch.bfloat16).requires_grad_().unbind()
    attention(q, k, v, causal=True).sum().backward()
    assert launched == ["forward_kernel", "gradients_kernel"]
