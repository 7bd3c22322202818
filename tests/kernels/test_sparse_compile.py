"""The kernels for block maps compile for sm_90 with no GPU, and spill nothing: CI two of them, `-m slow` all."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.test_compile import COMMON, REST

PROGRAM = """
import json, sys, torch
from flashspan.kernels.blocks import Blocks
from flashspan.kernels.compile import compile_launch, shipped_launches
from flashspan.kernels.masks import CAUSAL
made, dtype, head_dim = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
cost = compile_launch(shipped_launches(dtype, head_dim, mask=Blocks.of(CAUSAL, 4096, 4096))[made])
print(json.dumps([cost.spilled_bytes, cost.shared_bytes, cost.instructions["HGMMA"] + cost.instructions["HMMA"]]))
"""
FIRST = [("out", "bfloat16", 128), ("dk dv", "bfloat16", 128)]


def check(made: str, dtype: str, head_dim: int) -> None:
    # A process of its own: this one runs Triton's interpreter, and the compiler may abort.
    command = [sys.executable, "-c", PROGRAM, made, dtype, str(head_dim)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    spilled, shared, products = json.loads(done.stdout)
    assert spilled == 0
    assert shared <= 232448, "a Hopper block has 227 KiB of shared memory"
    assert products > 0, "the products must run on the tensor cores"


@pytest.mark.parametrize(("made", "dtype", "head_dim"), FIRST)
def test_common_tiles_compile_without_spills(made: str, dtype: str, head_dim: int) -> None:
    check(made, dtype, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize(("made", "dtype", "head_dim"), [x for x in COMMON + REST if x not in FIRST])
def test_every_tile_compiles_without_spills(made: str, dtype: str, head_dim: int) -> None:
    check(made, dtype, head_dim)
