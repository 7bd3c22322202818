"""Every schedule is proved, forward and backward, and the proof fails for broken schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspan.context import generators
from flashspan.context.layout import LAYOUTS, place
from flashspan.context.runs import Runs, union
from flashspan.context.schedule import Schedule, Shape, bytes_sent, reverse
from flashspan.context.verify import ScheduleError, verify
from flashspan.context.visibility import Visibility
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Mask, dense
from flashspan.masks.patterns import documents, prefix, window

Generator = Callable[[Visibility], Schedule]


def prove(schedule: Schedule, visibility: Visibility) -> None:
    verify(schedule, visibility)
    verify(reverse(schedule), visibility)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Visibility, Schedule]:
    """A schedule of any generator, with any layout, mask and number of ranks."""
    num_ranks, num_tokens = draw(st.integers(1, 9)), draw(st.integers(0, 40))
    low, high = draw(st.one_of(st.none(), st.integers(-30, 30))), draw(st.one_of(st.none(), st.integers(-30, 30)))
    mask: Mask = Band(low, high)
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, num_tokens), max_size=4)))
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, num_tokens], strict=True)]
        mask = documents(lengths) & mask
    visibility = Visibility(place(draw(st.sampled_from(sorted(LAYOUTS))), num_tokens, num_ranks), mask)
    name = draw(st.sampled_from(sorted(generators.GENERATORS)))
    if name == "double_ring":
        nodes = draw(st.sampled_from([n for n in range(1, num_ranks + 1) if num_ranks % n == 0]))
        schedule = generators.double_ring(visibility, (nodes, num_ranks // nodes))
    else:
        schedule = generators.GENERATORS[name](visibility)
    return visibility, generators.in_chunks(schedule, draw(st.integers(1, 3)))


@pytest.mark.parametrize("num_examples", [400, pytest.param(4000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_any_schedule_computes_attention(num_examples: int) -> None:
    @given(problems())
    @settings(max_examples=num_examples, deadline=None)
    def check(problem: tuple[Visibility, Schedule]) -> None:
        visibility, schedule = problem
        prove(schedule, visibility)
        assert sum(schedule.work()) == visibility.pairs.sum() * schedule.num_chunks

    check()


@given(problems())
@settings(max_examples=90, deadline=None)
def test_visibility_counts_what_the_drawn_mask_shows(problem: tuple[Visibility, Schedule]) -> None:
    visibility, _ = problem
    placement, num = visibility.placement, visibility.placement.num_tokens
    drawn = dense(visibility.mask, num, num).numpy()
    for q in range(visibility.num_ranks):
        for k in range(visibility.num_ranks):
            tile = drawn[np.ix_(placement.index(q), placement.index(k))]
            box = visibility.box(q, k)
            assert box.pairs == tile.sum()
            if box.pairs:
                rows = np.nonzero(tile.any(1))[0]
                assert (box.q_rows, box.k_rows) == (range(rows[0], rows[-1] + 1), Runs.where(tile.any(0)))
            half = visibility.box(q, k, range(len(tile) // 2, len(tile)))
            assert half.pairs == tile[len(tile) // 2 :].sum()


LARGE: list[tuple[str, int, str, Mask, Generator]] = [
    ("ring", 64, "contiguous", CAUSAL, generators.ring),
    ("helper", 64, "contiguous", CAUSAL, generators.helper),
    ("gather", 96, "zigzag", documents([3000, 5000, 100, 4700]) & CAUSAL, generators.gather),
    ("ring", 256, "zigzag", window(70), generators.ring),
    ("double_ring", 48, "striped", window(200), lambda visibility: generators.double_ring(visibility, (6, 8))),
    ("ring", 64, "zigzag", CAUSAL, generators.ring),
]


@pytest.mark.parametrize(("name", "num_ranks", "layout", "mask", "generate"), LARGE)
def test_many_ranks(name: str, num_ranks: int, layout: str, mask: Mask, generate: Generator) -> None:
    visibility = Visibility(place(layout, 12800, num_ranks), mask)
    schedule = generate(visibility)
    assert schedule.name == name
    prove(schedule, visibility)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mask", [EVERYTHING, CAUSAL, window(200), documents([3000, 9800])], ids=str)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("name", sorted(generators.GENERATORS))
def test_all_of_256_ranks(name: str, layout: str, mask: Mask) -> None:
    visibility = Visibility(place(layout, 12800, 256), mask)
    sizes = {"sizes": (32, 8)} if name == "double_ring" else {}
    prove(generators.GENERATORS[name](visibility, **sizes), visibility)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 9, 16, 33, 64, 100, 256])
def test_causal_work_is_balanced(num_ranks: int) -> None:
    """Zigzag and striped are within 2% of the mean; helper on contiguous shards is within 10% for 8 or more ranks."""
    num_tokens = 64 * num_ranks
    for layout, generate, bound in (
        ("zigzag", generators.ring, 1.02),
        ("striped", generators.ring, 1.02),
        ("contiguous", generators.helper, 1.10 if num_ranks >= 8 else 1.5),
    ):
        visibility = Visibility(place(layout, num_tokens, num_ranks), CAUSAL)
        work = generate(visibility).work() if layout == "contiguous" else visibility.pairs.sum(1).tolist()
        assert max(work) <= bound * sum(work) / num_ranks, layout


def test_a_window_stops_the_ring_and_sends_only_its_tokens() -> None:
    visibility = Visibility(place("contiguous", 8 * 64, 8), Band(-9, 0))
    schedule = generators.ring(visibility)
    prove(schedule, visibility)
    assert schedule.num_steps == 2
    assert [len(t.rows) for t in schedule.transfers] == [9] * 7


@given(st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=4), st.integers(0, 31), st.integers(0, 31))
@settings(max_examples=200, deadline=None)
def test_runs_are_sets_of_rows(sets: list[set[int]], first: int, last: int) -> None:
    def runs(rows: set[int]) -> Runs:
        return Runs.where(np.isin(np.arange(31), list(rows)))

    one, whole = sets[0], set().union(*sets)
    assert union(map(runs, sets)) == runs(whole) == Runs.of(*(range(row, row + 1) for row in whole))
    assert len(runs(one)) == len(one)
    assert runs(one).below(first) == sum(row < first for row in one)
    assert runs(one).within(range(first, last)) == runs({row for row in one if first <= row < last})
    assert runs(one).covers(runs(sets[-1])) == (one >= sets[-1])


def test_a_window_in_a_zigzag_sends_both_edges_of_a_shard_and_nothing_between() -> None:
    """The neighbour in a zigzag sees one end of a rank's first run and one of its second."""
    visibility = Visibility(place("zigzag", 8 * 64, 8), Band(-9, 9))
    schedule = generators.gather(visibility)
    prove(schedule, visibility)
    (one,) = [t.rows for t in schedule.transfers if (t.src, t.dst) == (5, 4)]
    assert one == Runs.of(range(9), range(55, 64))


def test_a_causal_ring_sends_no_key_to_those_before_it() -> None:
    visibility = Visibility(place("contiguous", 64, 8), CAUSAL)
    assert all(t.dst > t.owner for t in generators.ring(visibility).transfers)


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_bytes_are_those_of_the_docstrings(num_ranks: int) -> None:
    """With a full mask, every token's keys reach all other ranks once, and as many gradients return."""
    n, shape = 16, Shape(num_batch=2, num_heads=6, num_kv_heads=3, head_dim=8, itemsize=2)
    visibility = Visibility(place("zigzag", n * num_ranks, num_ranks), EVERYTHING)
    kv, dkv = 2 * 2 * 3 * 8 * 2, 2 * 2 * 3 * 8 * 4
    tokens = n * num_ranks * (num_ranks - 1)
    sizes = (num_ranks // 2, 2) if num_ranks % 2 == 0 else (num_ranks, 1)
    for schedule in (
        generators.ring(visibility),
        generators.gather(visibility),
        generators.double_ring(visibility, sizes),
        generators.in_chunks(generators.ring(visibility), 3),
    ):
        assert sum(bytes_sent(schedule, shape)) == tokens * kv
        assert sum(bytes_sent(reverse(schedule), shape)) == tokens * (kv + dkv)
    double = generators.double_ring(visibility, sizes)
    between = [t for t in double.transfers if t.src // sizes[1] != t.dst // sizes[1]]
    assert sum(len(t.rows) for t in between) == n * num_ranks * (sizes[0] - 1)
    back = [t for t in reverse(double).transfers if t.kind == "dkv" and t.src // sizes[1] != t.dst // sizes[1]]
    assert sum(len(t.rows) for t in back) == n * num_ranks * (sizes[0] - 1)


@pytest.mark.parametrize("num_ranks", [2, 5, 8])
def test_helper_bytes_are_those_of_the_docstring(num_ranks: int) -> None:
    n, shape = 16, Shape(num_batch=2, num_heads=6, num_kv_heads=3, head_dim=8, itemsize=2)
    schedule = generators.helper(Visibility(place("contiguous", n * num_ranks, num_ranks), CAUSAL))
    kv, dkv = 2 * 2 * 3 * 8 * 2, 2 * 2 * 3 * 8 * 4
    q, carry, rows, dq = 2 * 6 * 8 * 2, 2 * 6 * (8 + 1) * 4, 2 * 6 * (2 * 8 * 2 + 2 * 4), 2 * 6 * 8 * 4
    pairs = num_ranks * (num_ranks - 1) // 2
    halved = num_ranks // 2 if num_ranks % 2 == 0 else 0
    far = sum(num_ranks - d for d in range(num_ranks // 2 + 1, num_ranks))  # whole tiles computed by helpers
    own, helped = pairs - far, far + halved / 2
    assert sum(bytes_sent(schedule, shape)) == n * (own * kv + helped * (q + carry))
    assert sum(bytes_sent(reverse(schedule), shape)) == n * (own * (kv + dkv) + helped * (rows + dq))


def broken(schedule: Schedule, which: str) -> Schedule:
    """A schedule with one fault."""
    tiles, transfers = list(schedule.tiles), list(schedule.transfers)
    last = max(range(len(transfers)), key=lambda i: transfers[i].start)
    if which == "a tile is missing":
        tiles.pop()
    elif which == "a tile twice":
        tiles.append(tiles[-1])
    elif which == "a tile too early":
        late = max(range(len(tiles)), key=lambda i: tiles[i].step)
        tiles[late] = tiles[late]._replace(step=0)
    elif which == "a tile too small":
        tiles[0] = tiles[0]._replace(k_rows=Runs.of(tiles[0].k_rows.parts[0][1:]))
    elif which == "a transfer is missing":
        transfers.pop(last)
    elif which == "a transfer twice":
        transfers.append(transfers[last])
    elif which == "a transfer to oneself":
        transfers[last] = transfers[last]._replace(dst=transfers[last].src)
    elif which == "a transfer from a rank without the data":
        transfers[last] = transfers[last]._replace(src=(transfers[last].src + 1) % schedule.num_ranks)
    elif which == "a transfer of too much":
        transfers[last] = transfers[last]._replace(rows=Runs.of(range(transfers[last].rows.stop + 1)))
    elif which == "a transfer that ends as it starts":
        transfers[last] = transfers[last]._replace(end=transfers[last].start)
    return replace(schedule, tiles=tuple(tiles), transfers=tuple(transfers))


DEFECTS = (
    "a tile is missing",
    "a tile twice",
    "a tile too early",
    "a tile too small",
    "a transfer is missing",
    "a transfer twice",
    "a transfer to oneself",
    "a transfer from a rank without the data",
    "a transfer of too much",
    "a transfer that ends as it starts",
)


@pytest.mark.parametrize("which", DEFECTS)
@pytest.mark.parametrize("name", ["ring", "gather", "helper"])
@pytest.mark.parametrize("backward", [False, True])
def test_the_proof_fails_for_broken_schedules(which: str, name: str, backward: bool) -> None:
    visibility = Visibility(place("contiguous", 40, 5), CAUSAL)
    schedule = generators.GENERATORS[name](visibility)
    schedule = reverse(schedule) if backward else schedule
    verify(schedule, visibility)
    with pytest.raises(ScheduleError):
        verify(broken(schedule, which), visibility)


def test_a_gradient_that_does_not_reach_its_owner_is_reported() -> None:
    visibility = Visibility(place("zigzag", 40, 4), CAUSAL)
    schedule = reverse(generators.ring(visibility))
    transfers = [t for t in schedule.transfers if not (t.kind == "dkv" and t.dst == t.owner == 2)]
    with pytest.raises(ScheduleError, match="at the end"):
        verify(replace(schedule, transfers=tuple(transfers)), visibility)


def test_prefix_masks_are_pruned_too() -> None:
    visibility = Visibility(place("contiguous", 64, 8), prefix(16, 64))
    prove(generators.ring(visibility), visibility)
    assert all(t.dst > t.owner or t.owner < 2 for t in generators.ring(visibility).transfers)


def test_bad_sizes_are_refused() -> None:
    visibility = Visibility(place("contiguous", 64, 8), CAUSAL)
    with pytest.raises(ValueError, match=r"product is the number of ranks: got \(3, 2\) for 8 ranks"):
        generators.double_ring(visibility, (3, 2))
    with pytest.raises(ValueError, match=r"num_chunks .* got 0"):
        generators.in_chunks(generators.ring(visibility), 0)
