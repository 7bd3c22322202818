"""The kernels for block maps compile for sm_90 without a GPU, and spill as much as those for intervals: one in CI, all
with `-m slow`."""

from __future__ import annotations

import pytest

from tests.kernels.compiler import compile_apart
from tests.kernels.test_compile import COMMON, REST, allowed

PROGRAM = """
import json, sys, torch
from flashspan.kernels.masks import Blocks
from benchmarks.compile_kernels import compile_launch, shipped_launches
from flashspan.kernels.masks import CAUSAL
for made, dtype, head_dim in json.loads(sys.argv[1]):
    mask = Blocks.of(CAUSAL, 4096, 4096)
    cost = compile_launch(shipped_launches(getattr(torch, dtype), head_dim, mask=mask)[made])
    print(json.dumps([cost.spilled_bytes, cost.shared_bytes, cost.instructions["HGMMA"] + cost.instructions["HMMA"]]))
"""
FIRST = [("dk dv", "bfloat16", 128)]


def check(*tiles: tuple[str, str, int]) -> None:
    for tile, (spilled, shared, products) in zip(tiles, compile_apart(PROGRAM, tiles), strict=True):
        assert spilled <= allowed(tile), tile
        assert shared <= 232448, "a Hopper block has 227 KiB of shared memory"
        assert products > 0, "the products must run on the tensor cores"


def test_common_tiles_compile_without_spills() -> None:
    check(*FIRST)


@pytest.mark.slow
@pytest.mark.parametrize(("made", "dtype", "head_dim"), [x for x in COMMON + REST if x not in FIRST])
def test_every_tile_compiles_without_spills(made: str, dtype: str, head_dim: int) -> None:
    check((made, dtype, head_dim))


MAPPING = """
import json, torch
from benchmarks.compile_kernels import compile_launch
from flashspan.kernels.masks.build_triton import Building
from flashspan.masks.runs_triton import runs_launch
launches = []
for length in (4096, 1000, 999):  # whole tiles, ragged ones, and a tensor that is read by bytes
    building = Building(torch.empty(1, 2, length, length, dtype=torch.bool, device="meta"), (128, 128))
    rows = torch.empty(2, length, dtype=torch.int32, device="meta")
    launches += [building.classify_launch(), runs_launch(building.visible[0], rows, rows, rows)]
launches += [building.measure_launch(), building.write_launch(building.allocate(99, 9))]
costs = [compile_launch(launch) for launch in launches]
fences = [cost.instructions["MEMBAR"] for cost in costs]
print(json.dumps([(cost.spilled_bytes, cost.registers, cost.shared_bytes) for cost in costs] + [fences]))
"""


@pytest.mark.slow
def test_the_making_of_a_map_compiles_without_spills() -> None:
    [[*costs, fences]] = compile_apart(MAPPING, [])
    assert [spilled for spilled, _, _ in costs] == [0] * 8
    assert all(registers <= 64 for _, registers, _ in costs[:2]), "few enough for the reading to hide its latency"
    assert all(shared <= 16384 for _, _, shared in costs)
    assert fences == [0] * 8, "counting waits for nothing"
