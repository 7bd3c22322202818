"""Random shapes are the same for the same seed, within the limits, and cover every class."""

from __future__ import annotations

from collections import Counter

import pytest

from flashspan.bench.suites.random_shapes import (
    CLASSES,
    FEW_QUERIES,
    HEAD_SIZES,
    MOST_BYTES,
    MOST_HEADS,
    MOST_MS,
    SCENARIOS,
    RandomShape,
    draw,
)
from flashspan.kernels.masks import dense

SEEDS = (0, 1, 7, 2**40)


def test_a_seed_gives_the_same_shapes_and_another_seed_gives_others() -> None:
    assert draw(50, 7) == draw(50, 7) == draw(200, 7)[:50]
    assert not set(draw(50, 7)) & set(draw(50, 8))


def test_the_shapes_of_a_seed_do_not_change() -> None:
    """Rows contain the seed, so a change of the distribution needs a new seed name and new rows."""
    assert [str(shape) for shape in draw(5, 7)] == [
        "1x40/5x1x189177x64 full",
        "16x8/1x3x3508x64 causal",
        "4x8/8x25x61x128 full",
        "4x16/8x1x2347x64 full",
        "128x12/12x25x25x256 full",
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_shape_lies_within_the_limits(seed: int) -> None:
    shapes = draw(400, seed)
    assert len(set(shapes)) == 400
    for shape in shapes:
        assert shape.H % shape.K == 0
        assert shape.H <= MOST_HEADS
        assert shape.D in HEAD_SIZES
        assert shape.bytes() <= MOST_BYTES
        assert shape.expected_ms() <= MOST_MS
        assert 1 <= shape.S <= 262144
        assert shape.pattern != "causal" or 1 < shape.T <= shape.S
        assert not shape.pattern.startswith("window") or (shape.T == shape.S and 1 < shape.size < shape.T)
        assert shape.trains == (shape.T > FEW_QUERIES)
        assert set(shape.classes()) <= set(CLASSES)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_hundred_shapes_are_of_every_class_scenario_and_head_size(seed: int) -> None:
    shapes = draw(200, seed)
    counts = Counter(name for shape in shapes for name in shape.classes())
    assert counts.keys() == set(CLASSES)
    assert min(counts.values()) >= 6
    assert {shape.D for shape in shapes} == set(HEAD_SIZES)
    assert max(shape.S for shape in shapes if shape.T == 1) > 100_000
    assert counts["decode"] == 200 // sum(each.share for each in SCENARIOS.values()) * SCENARIOS["decode"].share


def test_two_hundred_shapes_take_seconds_of_a_gpu() -> None:
    """One run of each takes half a second at the assumed speed; a measurement repeats it dozens of times."""
    for seed in SEEDS:
        assert sum(shape.expected_ms() for shape in draw(200, seed)) < 1000


@pytest.mark.parametrize(
    ("words", "classes"),
    [
        ((1, 32, 8, 1, 100_000, 128, "full"), ("decode", "long", "GQA", "odd length")),
        ((1, 8, 8, 16, 4096, 128, "causal"), ("few queries",)),
        ((1, 8, 8, 100, 4096, 96, "causal"), ("continued", "few tiles", "odd head size", "odd length")),
        ((16, 16, 16, 128, 1024, 64, "full"), ("cross",)),
        ((64, 16, 16, 128, 256, 64, "full"), ("short",)),
        ((1, 16, 16, 16384, 16384, 32, "causal"), ("self",)),
        ((1, 16, 16, 16384, 16384, 160, "window 100"), ("window", "odd head size")),
        ((1, 1, 1, 65536, 65536, 256, "causal"), ("self", "long")),
    ],
)
def test_classes_follow_from_the_shape(
    words: tuple[int, int, int, int, int, int, str], classes: tuple[str, ...]
) -> None:
    assert RandomShape(*words).classes() == classes


def test_masks_show_what_their_names_say() -> None:
    causal, window = RandomShape(1, 1, 1, 3, 7, 64, "causal"), RandomShape(1, 1, 1, 6, 6, 64, "window 2")
    assert dense(causal.mask(), 3, 7).sum(-1).tolist() == [5, 6, 7]
    assert dense(window.mask(), 6, 6).sum(-1).tolist() == [1, 2, 2, 2, 2, 2]
    assert causal.flops() == 4 * 64 * 18
    assert not causal.sees_all
    assert RandomShape(1, 1, 1, 1, 7, 64, "causal").sees_all


def test_bytes_are_those_of_all_tensors() -> None:
    trained, decoded = RandomShape(2, 6, 3, 100, 200, 64, "full"), RandomShape(2, 6, 3, 1, 200, 64, "full")
    q, k = 2 * 6 * 100 * 64, 2 * 3 * 200 * 64
    assert trained.bytes() == 2 * (4 * q + 4 * k)  # q, out, dout, dq; k, v, dk, dv
    assert decoded.bytes() == 2 * (2 * q // 100 + 2 * k)


@pytest.mark.parametrize(("number", "seed", "fault"), [(0, 0, "1 to 10,000: got 0"), (3, -1, "0 or more: got -1")])
def test_other_numbers_and_seeds_are_refused(number: int, seed: int, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        draw(number, seed)
