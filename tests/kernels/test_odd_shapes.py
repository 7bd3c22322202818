"""Odd shapes on the Hopper kernels, alone and under NVIDIA's compute-sanitizer, which detects every access outside of
allocated memory: `pytest -m gpu tests/kernels/test_odd_shapes.py`."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys

import pytest
import torch

from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Mask, Rows
from flashspan.masks.patterns import documents, random_blocks
from tests.kernels.hopper_cases import ON_HOPPER, check, let_hopper_serve_short_calls, tensors

pytestmark = ON_HOPPER

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def backwards(num_queries: int, num_keys: int) -> Mask:
    """Intervals in no order; every third one is empty."""
    start = torch.arange(num_queries).flip(0) % num_keys
    end = torch.where(torch.arange(num_queries) % 3 == 0, start, num_keys)
    return Rows(start.int(), end.int(), num_keys)


# batch, heads, key heads, queries, keys, head size, mask, parts of the keys, repeatable
SHAPES: list[tuple[int, int, int, int, int, int, Mask, int, bool]] = [
    (1, 1, 1, 1, 1, 64, EVERYTHING, 1, False),
    (1, 1, 1, 1, 1, 256, CAUSAL, 1, True),
    (2, 3, 1, 1, 700, 128, EVERYTHING, 2, False),
    (3, 2, 2, 129, 1, 64, EVERYTHING, 1, False),
    (1, 4, 2, 63, 65, 128, CAUSAL, 1, False),
    (1, 4, 1, 65, 63, 64, CAUSAL, 1, False),
    (2, 2, 1, 127, 257, 256, CAUSAL, 2, True),
    (1, 3, 3, 333, 517, 72, CAUSAL, 1, False),
    (1, 2, 2, 333, 517, 40, EVERYTHING, 2, False),
    (1, 2, 2, 250, 250, 200, CAUSAL, 1, True),
    (2, 4, 4, 511, 511, 64, Band(-99, 0), 1, False),
    (2, 4, 1, 511, 640, 128, Band(-99, 57), 1, False),
    (1, 2, 1, 400, 300, 128, Band(350, 400), 1, False),
    (1, 2, 2, 385, 385, 64, Band(-5, 5), 3, True),
    (1, 4, 2, 600, 600, 128, documents([1, 0, 130, 269, 200]), 1, False),
    (1, 4, 2, 600, 600, 64, documents([1, 0, 130, 269, 200]), 1, True),
    (2, 2, 2, 260, 301, 128, backwards(260, 301), 1, False),
    (1, 4, 2, 768, 768, 128, random_blocks(768, 0.4), 1, False),
    (1, 2, 2, 1000, 1000, 64, random_blocks(1000, 0.3) & CAUSAL, 1, False),
    (1, 1, 1, 1537, 1537, 128, EVERYTHING, 1, False),
    (1, 4, 1, 300, 1100, 64, EVERYTHING, 1, False),
    (1, 4, 1, 1200, 1200, 64, CAUSAL, 1, False),
]


@pytest.mark.parametrize("kernels", ["hopper", "any"])
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_it_is_right(number: int, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """kernels="any": the kernels that are chosen for such calls, many of which are short (few_tiles.py)."""
    if kernels == "hopper":
        let_hopper_serve_short_calls(monkeypatch)
    B, H, K, T, S, D, mask, parts, repeatable = SHAPES[number]
    check(tensors(random.Random(number), B, H, K, T, S, D), mask, D**-0.5, parts, repeatable)


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not here")
def test_nothing_is_touched_that_was_not_allocated() -> None:
    """Every tensor has an allocation of its own; otherwise an access outside of it would fall into PyTorch's cache."""
    assert SANITIZER is not None
    command = [SANITIZER, "--error-exitcode=9", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib"]  # without pytest options for plugins that may be missing
    run = subprocess.run(
        [*command, __file__, "-k", "right"],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
    assert re.search(r"ERROR SUMMARY: 0 errors", run.stdout), run.stdout[-4000:]
    assert f"{2 * len(SHAPES)} passed" in run.stdout
