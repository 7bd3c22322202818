"""Backward of few queries over many keys, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from flashspan.kernels import promise
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Mask
from flashspan.kernels.portable import few_tiles
from flashspan.kernels.portable.few_rows import few_rows_launch
from flashspan.kernels.portable.forward import forward_launch
from flashspan.kernels.portable.tiles import Tile
from tests.kernels.cases import Inputs, Shape, make_inputs
from tests.kernels.compiler import compile_apart
from tests.kernels.test_few_tiles import scattered

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, not interpreted")

CASES: dict[str, tuple[Shape, Mask]] = {
    "the last query sees the last key": (Shape(1, 2, 2, 31, 250, 24), Band(None, 219)),
    "grouped, window": (Shape(2, 4, 2, 9, 301, 16), Band(20, 150)),
    "three heads of a key head": (Shape(1, 3, 1, 7, 333, 40), EVERYTHING),
    "one query": (Shape(1, 2, 1, 1, 63, 16), EVERYTHING),
    "fewer keys than parts": (Shape(1, 2, 1, 5, 30, 16), CAUSAL),
    "rows that see nothing": (Shape(1, 2, 1, 16, 140, 16), Band(None, -7)),
    "scattered": (Shape(1, 2, 1, 13, 100, 16), scattered(13, 100)),
}


def compute(x: Inputs, mask: Mask, parts: int) -> dict[str, torch.Tensor]:
    """Gradients, with the keys in this number of parts."""
    out = torch.empty_like(x.q)
    lse = out.new_empty(out.shape[:3])
    forward_launch(x.q, x.k, x.v, out, lse, mask, 0.3, False, None, size=Tile(32, 32, 32, 4, 1))()
    size = Tile(32, 32, 32, 4, 2, key_parts=parts)
    grads = [torch.full_like(y, torch.nan) for y in (x.q, x.k, x.v)]
    written = few_tiles._parts(grads, size)
    if written:
        written[0].fill_(torch.nan)
    few_rows_launch((x.dout, x.q, x.k, x.v, lse, out), written or grads, mask, 0.3, size)()
    if written:
        few_tiles.add_launch(written, grads, size)()
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))


@interpreted
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_keeps_the_promise(name: str, parts: int) -> None:
    shape, mask = CASES[name]
    x = make_inputs(shape, seed=1)
    right = promise.solve(x.q, x.k, x.v, x.dout, mask=mask, scale=0.3)
    ratios = right.ratios(torch.float32, **compute(x, mask, parts))
    assert max(ratios.values()) <= 1, ratios


@interpreted
def test_nan_in_a_key_reaches_only_the_queries_that_see_it() -> None:
    x = make_inputs(Shape(1, 1, 1, 20, 90, 16), seed=2)
    mask = Band(None, 60)  # query i sees keys up to 60 + i
    clean = compute(x, mask, 2)
    x.k[:, :, 75], x.v[:, :, 77] = torch.nan, torch.nan
    found = compute(x, mask, 2)
    assert torch.equal(found["dq"][:, :, :15], clean["dq"][:, :, :15])
    assert found["dq"][:, :, 15:].isnan().all()


PROGRAM = """
import json, sys
import torch
from flashspan.kernels.compile import compile_launch
from flashspan.kernels.masks import Band
from flashspan.kernels.portable.few_rows import few_rows_launch
from flashspan.kernels.portable.tiles import Tile
for head_dim, *tile in json.loads(sys.argv[1]):
    q = torch.empty(1, 4, 30, head_dim, dtype=torch.bfloat16, device="meta")
    k, parts = q.new_empty(1, 4, 900, head_dim), q.new_empty(1, 12, 30, head_dim, dtype=torch.float32)
    lse = torch.empty(1, 4, 30, device="meta")
    size = Tile(*tile, key_parts=3)
    cost = compile_launch(few_rows_launch((q, q, k, k, lse, q), (parts, k, k), Band(None, 870), 0.1, size))
    print(json.dumps([cost.spilled_bytes, cost.shared_bytes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(64, 64, 64, 64, 8, 2), (128, 64, 32, 32, 8, 2), (256, 64, 32, 32, 8, 1)], ids=str)
def test_the_tiles_compile_without_spills(tile: tuple[int, ...]) -> None:
    ((spilled, shared),) = compile_apart(PROGRAM, [tile])
    assert spilled == 0
    assert shared <= 232448
