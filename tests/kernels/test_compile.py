"""Every shipped tile of the portable kernels compiles for sm_90 without a GPU, and spills nothing."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, torch
from flashspan.kernels.compile import compile_launch, shipped_launches
made, dtype, head_dim = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
cost = compile_launch(shipped_launches(dtype, head_dim)[made])
wide, narrow = cost.instructions["HGMMA"], cost.instructions["HMMA"]
print(json.dumps([cost.spilled_bytes, cost.shared_bytes, wide, narrow, cost.warnings]))
"""
# Each takes seconds: CI compiles the tiles users meet most, `-m slow` all of them.
COMMON = [("out", "bfloat16", 128), ("dk", "bfloat16", 128), ("dk dv", "bfloat16", 64), ("dq", "bfloat16", 64)]
REST = [
    *[("dv", "bfloat16", 128), ("dq", "bfloat16", 128), ("out", "bfloat16", 64)],
    *[(made, "bfloat16", size) for size in (16, 32) for made in ("out", "dk dv", "dq")],
    *[(made, "bfloat16", 256) for made in ("out", "dk", "dv", "dq")],
    *[(made, "float32", size) for size in (16, 32, 64) for made in ("out", "dk dv", "dq")],
    *[(made, "float32", size) for size in (128, 256) for made in ("out", "dk", "dv", "dq")],
]


def check(made: str, dtype: str, head_dim: int) -> None:
    # A process of its own: this one runs Triton's interpreter, and the compiler may abort.
    command = [sys.executable, "-c", PROGRAM, made, dtype, str(head_dim)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=_compiling(), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    spilled, shared, wide, narrow, warnings = json.loads(done.stdout)
    assert spilled == 0
    assert shared <= 232448, "a Hopper block has 227 KiB of shared memory"
    assert wide + narrow > 0, "the products must run on the tensor cores"
    if dtype == "bfloat16":  # float32's small tiles use the narrow instruction
        assert wide > 0, "16-bit products must use the warpgroup's instruction"
    assert not [line for line in warnings if "serialized" in line]


def _compiling() -> dict[str, str]:
    import os

    return {**os.environ, "TRITON_INTERPRET": "0"}


@pytest.mark.parametrize(("made", "dtype", "head_dim"), COMMON)
def test_common_tiles_compile_without_spills(made: str, dtype: str, head_dim: int) -> None:
    check(made, dtype, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize(("made", "dtype", "head_dim"), REST)
def test_every_tile_compiles_without_spills(made: str, dtype: str, head_dim: int) -> None:
    check(made, dtype, head_dim)


def test_the_lists_above_are_the_whole_table() -> None:
    from flashspan.kernels.portable.tiles import TABLE

    listed = {(made, 2 if dtype == "bfloat16" else 4, size) for made, dtype, size in COMMON + REST}
    assert listed == set(TABLE)
