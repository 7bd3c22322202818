"""Calls of few tiles, each pass one launch: in Triton's interpreter and, `pytest -m gpu`, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashspan import attention
from flashspan.kernels import hopper, promise
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


def compute(x: Inputs, mask: Mask, scale: float, size: Tile) -> dict[str, torch.Tensor]:
    """Run both passes, each in one launch."""
    out = torch.full_like(x.q, torch.nan)
    lse = out.new_empty(out.shape[:3])
    forward_launch(x.q, x.k, x.v, out, lse, mask, scale, False, None, size=size)()
    grads = [torch.full_like(y, torch.nan) for y in (x.q, x.k, x.v)]
    parts = [torch.full_like(y, torch.nan) for y in few_tiles._parts(grads, size)]
    parts = [y if n == 1 else part for y, part, n in zip(grads, parts, _counts(size), strict=bool(parts))]
    few_tiles.gradients_launch((x.dout, x.q, x.k, x.v, lse, out), parts or grads, mask, scale, size)()
    if parts:
        few_tiles.add_launch(parts, grads, size)()
    return {"out": out, "lse": lse, **dict(zip(GRADIENTS, grads, strict=True))}


def _counts(size: Tile) -> tuple[int, int, int]:
    return size.key_parts, size.query_parts, size.query_parts


SIZES = {
    "wide": Tile(32, 64, 64, 4, 2),
    "tall": Tile(64, 32, 32, 4, 1),
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
    ratios = right.ratios(torch.float32, **compute(x, mask, 0.3, size))
    assert max(ratios.values()) <= 1, ratios


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
from flashspan.kernels.compile import compile_launch
from flashspan.kernels.masks import CAUSAL
from flashspan.kernels.portable import few_tiles
for head_dim, length in json.loads(sys.argv[1]):
    x = torch.empty(1, 4, length, head_dim, dtype=torch.bfloat16, device="meta")
    size = few_tiles.backward_tile(x, x, CAUSAL)
    lse = torch.empty(1, 4, length, device="meta")
    cost = compile_launch(few_tiles.gradients_launch((x, x, x, x, lse, x), (x, x, x), CAUSAL, 0.1, size))
    print(json.dumps([cost.spilled_bytes, cost.shared_bytes]))
"""


@pytest.mark.slow
def test_every_tile_of_backward_compiles_with_hardly_a_spill() -> None:
    for spilled, shared in compile_apart(PROGRAM, [(64, 25), (64, 200), (128, 25), (128, 200)]):
        assert spilled <= 160
        assert shared <= 232448 // 2


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
