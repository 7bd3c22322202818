"""Tiles fit the GPU for which they are chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from triton import knobs

from flashspan.kernels.launch import triton_abi
from flashspan.kernels.portable import tiles


@pytest.mark.parametrize(
    ("room", "hip", "small", "products"),
    [
        (227, None, False, "bf16x6"),
        (163, None, True, "tf32x3"),
        (99, None, True, "tf32x3"),
        (64, "6.4", True, "bf16x6"),
    ],
)
def test_a_gpu_gets_tiles_that_fit_it_and_products_it_has(
    monkeypatch: pytest.MonkeyPatch, room: int, hip: str | None, small: bool, products: str
) -> None:
    """For GPUs that this machine does not have."""
    monkeypatch.setattr(triton_abi, "shared_memory", lambda index: room * 1024)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    device = torch.device("cuda", 0)
    q, wide, exact = (
        cast(Any, SimpleNamespace(device=device, shape=(1, 1, 9, head_dim), element_size=lambda size=size: size))
        for head_dim, size in ((128, 2), (256, 2), (128, 4))
    )
    before = torch.get_float32_matmul_precision()
    tiles.is_small.cache_clear()
    try:
        assert tiles.tile("dq", wide, bits=True) == (tiles.SMALL if small else tiles.BITS)["dq", 2, 256]
        assert tiles.tile("dk dv", q, dropout=True) == (tiles.SMALL if small else tiles.DROPOUT)["dk dv", 2, 128]
        assert tiles.tile("dk dv", q) == (tiles.SMALL if small else tiles.TABLE)["dk dv", 2, 128]
        assert tiles.precision(device) == products
        own = tiles.SMALL if small else tiles.TABLE
        assert tiles.tile("dq", exact) == own["dq", 4, 128]
        torch.set_float32_matmul_precision("high")
        assert tiles.precision(device) == (products if hip else "tf32")
        assert tiles.tile("dq", exact) == (own if small else tiles.TF32)["dq", 4, 128]
        assert tiles.tile("dq", exact, bits=True) == own["dq", 4, 128]
    finally:
        torch.set_float32_matmul_precision(before)
        tiles.is_small.cache_clear()
