"""Backward of few queries over many keys, for heads above 128, in Triton's interpreter. tests/kernels/test_few_tiles.py
has the tests on a GPU."""

from __future__ import annotations

import pytest
import torch

from flashspan import promise
from flashspan.kernels import hopper
from flashspan.kernels.contract import Problem
from flashspan.kernels.failure import KernelFailed
from flashspan.kernels.launch.compiling import launches_of
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Mask
from flashspan.kernels.portable import few_tiles
from flashspan.kernels.portable.forward import forward_launch
from flashspan.kernels.portable.tiles import Tile
from tests.kernels.cases import Inputs, Shape, make_inputs
from tests.kernels.compiler import compile_apart
from tests.kernels.test_few_tiles import scattered

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, not interpreted")

CASES: dict[str, tuple[Shape, Mask]] = {
    "the last query sees the last key": (Shape(1, 2, 2, 31, 250, 160), Band(None, 219)),
    "grouped, window": (Shape(2, 4, 2, 9, 301, 136), Band(20, 150)),
    "three heads of a key head": (Shape(1, 3, 1, 7, 333, 192), EVERYTHING),
    "one query": (Shape(1, 2, 1, 1, 63, 256), EVERYTHING),
    "fewer keys than parts": (Shape(1, 2, 1, 5, 30, 160), CAUSAL),
    "rows that see nothing": (Shape(1, 2, 1, 16, 140, 160), Band(None, -7)),
    "scattered": (Shape(1, 2, 1, 13, 100, 144), scattered(13, 100)),
}


@pytest.fixture(autouse=True)
def fill_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the parts of gradients begin as NaN."""
    empty = few_tiles.empty_parts
    monkeypatch.setattr(few_tiles, "empty_parts", lambda x, n: empty(x, n).fill_(torch.nan))


def compute(x: Inputs, mask: Mask, parts: int) -> dict[str, torch.Tensor]:
    """Gradients, with the keys in this number of parts."""
    out = torch.empty_like(x.q)
    lse = out.new_empty(out.shape[:3])
    forward_launch(x.q, x.k, x.v, out, lse, mask, 0.3, False, None, size=Tile(32, 32, 32, 4, 1))()
    grads = [torch.full_like(y, torch.nan) for y in (x.q, x.k, x.v)]
    size = Tile(64, 32, 32, 8, 2, key_parts=parts)
    assert few_tiles.backward((x.dout, x.q, x.k, x.v, lse, out), grads, Problem(mask, 0.3), size)
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))


@interpreted
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_keeps_the_promise_and_repeats(name: str, parts: int) -> None:
    shape, mask = CASES[name]
    x = make_inputs(shape, seed=1)
    right = promise.solve(x.q, x.k, x.v, x.dout, mask=mask, scale=0.3)
    found = compute(x, mask, parts)
    ratios = right.ratios(torch.float32, **found)
    assert max(ratios.values()) <= 1, ratios
    assert all(torch.equal(found[name], y) for name, y in compute(x, mask, parts).items())


@interpreted
def test_nan_in_a_key_reaches_only_the_queries_that_see_it() -> None:
    x = make_inputs(Shape(1, 1, 1, 20, 90, 136), seed=2)
    mask = Band(None, 60)  # query i sees keys up to 60 + i
    clean = compute(x, mask, 2)
    x.k[:, :, 75], x.v[:, :, 77] = torch.nan, torch.nan
    found = compute(x, mask, 2)
    assert torch.equal(found["dq"][:, :, :15], clean["dq"][:, :, :15])
    assert found["dq"][:, :, 15:].isnan().all()


def meta(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    B, H, K, T, S, D = shape
    q, k = (torch.empty(B, heads, n, D, dtype=torch.bfloat16, device="meta") for heads, n in ((H, T), (K, S)))
    return q, k


def test_few_rows_of_large_heads_are_served_and_no_others() -> None:
    def parts(*shape: int) -> int:
        size = few_tiles.backward_tile(*meta(*shape), EVERYTHING)
        return 0 if size is None else size.key_parts

    assert parts(4, 12, 12, 60, 1742, 160) == 8  # 2.9 rounds of programs
    assert parts(1, 8, 8, 47, 4480, 192) == 16
    assert parts(2, 24, 8, 20, 3000, 256) == 8
    assert parts(2, 8, 8, 1, 40, 160) == 1
    assert parts(1, 8, 8, 47, 4480, 136) == 0, "spills"
    assert parts(64, 12, 12, 40, 40, 256) == 0, "fewer than 8 keys a query"
    assert parts(1, 8, 4, 33, 4480, 256) == 0, "more than 64 rows"
    assert few_tiles.backward_tile(*(x.float() for x in meta(1, 8, 8, 47, 4480, 192)), EVERYTHING) is None


def test_if_the_kernel_does_not_compile_the_hopper_kernels_compute_the_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise KernelFailed("PassManager::run failed")

    (q, k), lse = meta(1, 8, 8, 47, 4480, 192), torch.empty(1, 8, 47, device="meta")
    into = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(k)}

    def names() -> list[str]:
        given = (q, q, k, k, q, lse, Problem(EVERYTHING, 0.1))
        return [launch.kernel.__name__ for launch in launches_of(lambda: hopper.backward_of_output(*given, **into))]

    monkeypatch.setattr(few_tiles, "FAILED", [])
    assert names() == ["few_rows_kernel", "add_gradients_kernel"]
    monkeypatch.setattr(few_tiles, "replay", fail)
    with pytest.warns(RuntimeWarning, match="gradients of few tiles") as warned:
        failed = [names(), names()]
    assert failed == [["rows_kernel", "keys_kernel", "queries_kernel", "add_gradients_kernel"]] * 2
    assert len(warned) == 1


PROGRAM = """
import json, sys
import torch
from benchmarks.compile_kernels import compile_launch
from flashspan.kernels.launch.compiling import launches_of
from flashspan.kernels.contract import Problem
from flashspan.kernels.masks import Band
from flashspan.kernels.portable import few_tiles
for head_dim, dtype in json.loads(sys.argv[1]):
    q = torch.empty(1, 4, 30, head_dim, dtype=getattr(torch, dtype), device="meta")
    k, mask, lse = q.new_empty(1, 4, 900, head_dim), Band(None, 870), torch.empty(1, 4, 30, device="meta")
    size = few_tiles.backward_tile(q, k, mask)
    given = (q, q, k, k, lse, q), (q, k, k), Problem(mask, 0.1), size
    costs = [compile_launch(launch) for launch in launches_of(lambda: few_tiles.backward(*given))]
    print(json.dumps([[cost.spilled_bytes, cost.shared_bytes] for cost in costs]))
"""


@pytest.mark.slow
def test_the_kernels_compile_with_hardly_a_spill() -> None:
    """Triton 3.6 spills 32 bytes, Triton 3.7 64."""
    for costs in compile_apart(PROGRAM, [(160, "float16"), (192, "bfloat16"), (256, "bfloat16")]):
        assert len(costs) == 2
        assert all(spilled <= 64 and shared <= 232448 for spilled, shared in costs)
