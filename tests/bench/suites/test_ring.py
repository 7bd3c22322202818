"""The timeline of attention across ranks: the numbers read from it, its picture, and a real one on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashspan.bench.measure import record
from flashspan.bench.report import plots
from flashspan.bench.suites.ring import PassProfile, Shape, Span, bench_ring, draw, row_of

SHAPE = Shape("ring", "zigzag", 1024, 4, 2, 64, True)
PROFILE = PassProfile(
    (
        Span("forward_kernel", 0.0, 100.0, False),
        Span("Memcpy DtoD", 20.0, 60.0, True),
        Span("forward_kernel", 105.0, 200.0, False),
        Span("Memcpy DtoD", 190.0, 210.0, True),
        Span("cast", 230.0, 240.0, False),
        Span("forward_kernel", 240.0, 330.0, False),
        Span("cast", 400.0, 410.0, False),
    ),
    (),
    "symmetric",
)


def test_gaps_are_times_without_a_kernel() -> None:
    """Only gaps between tiles count: the time after the last tile is not a gap between steps."""
    assert PROFILE.gaps == [5.0, 30.0, 0.0]


def test_copies_are_hidden_behind_kernels() -> None:
    assert PROFILE.hidden == pytest.approx(50 / 60)


def test_a_row_has_what_the_table_shows() -> None:
    row = row_of(record.environment(torch.device("cpu")), SHAPE, "forward", 1, PROFILE, 2, True)
    assert (row.more["longest_gap_us"], row.more["kernels"], row.more["copies"]) == (30.0, 5, 2)
    assert row.p50_ms == pytest.approx(0.41)


def test_the_picture_has_every_rank() -> None:
    svg = plots.to_svg(draw(SHAPE, [{"forward": PROFILE, "backward": PROFILE}] * 2), "a ring")
    assert all(f"rank {rank} {lane}" in svg for rank in (0, 1) for lane in ("kernels", "copies"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_gpus_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found 0"):
        bench_ring(folder=tmp_path)


@pytest.mark.gpu
def test_the_host_waits_for_nothing_in_a_pass(tmp_path: Path) -> None:
    assert bench_ring(ranks=2, tokens=2048, heads=4, kv_heads=2, head_dim=64, share_gpu=True, folder=tmp_path) == 0
    rows = record.read(tmp_path / "ring.jsonl")
    assert len(rows) == 4
    assert {row.more["host_waits"] for row in rows} == {""}
    assert all(row.more["copies"] for row in rows)
