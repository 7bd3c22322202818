"""Masks are the same as a dense tensor, sliced, composed, tiled, transposed and packed."""

import random
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashspan.kernels.masks import (
    EMPTY,
    EVERYTHING,
    FULL,
    NOTHING,
    Band,
    Mask,
    Positions,
    Rows,
    count,
    dense,
    unpack,
)
from flashspan.kernels.masks.build import interval_kinds
from flashspan.kernels.masks.mask import DERIVED_KEPT
from flashspan.masks.patterns import causal, documents, prefix, ragged, window
from tests.kernels.cases import examples, masks, positions

num_tokens = st.integers(0, 40)


@st.composite
def sized_masks(draw: st.DrawFn) -> tuple[Mask, int, int]:
    num_queries, num_keys = draw(num_tokens), draw(num_tokens)
    return draw(masks(2, num_queries, num_keys)), num_queries, num_keys


def draw_band(band: Band, q: Positions, k: Positions) -> Tensor:
    """A band by its definition, at global positions."""
    i, j = ([x for part in ([p] if isinstance(p, range) else p) for x in part] for p in (q, k))
    rows = [[(band.lo is None or band.lo <= b - a) and (band.hi is None or b - a <= band.hi) for b in j] for a in i]
    return torch.tensor(rows, dtype=torch.bool).view(len(i), len(j))


@examples(80)
@given(st.data())
def test_a_slice_of_a_band_is_what_its_definition_says(data: st.DataObject) -> None:
    num_queries, num_keys = data.draw(num_tokens), data.draw(num_tokens)
    q, k = data.draw(positions(num_queries)), data.draw(positions(num_keys))
    bound = st.none() | st.integers(-150, 150) | st.sampled_from((-(2**63), sys.maxsize, 2**80))
    band = Band(data.draw(bound), data.draw(bound))
    sliced = band.slice(q, k)
    assert torch.equal(dense(sliced, num_queries, num_keys), draw_band(band, q, k))
    if isinstance(q, range) and isinstance(k, range) and q.step == k.step:
        assert isinstance(sliced, Band)


@examples(80)
@given(st.data())
def test_a_slice_is_the_slice_of_the_drawn_mask(data: st.DataObject) -> None:
    mask, num_queries, num_keys = data.draw(sized_masks())
    picks = []
    for length in (num_queries, num_keys):
        at = sorted(data.draw(st.lists(st.integers(0, length), min_size=4, max_size=4)))
        picks.append([range(at[0], at[1], data.draw(st.integers(1, 3))), range(at[2], at[3])])
    q, k = picks
    rows, columns = ([x for part in parts for x in part] for parts in picks)
    drawn = dense(mask, num_queries, num_keys)[..., rows, :][..., columns]
    assert torch.equal(dense(mask.slice(q, k), len(rows), len(columns)), drawn)


@examples(80)
@given(st.data())
def test_and_sees_what_both_see(data: st.DataObject) -> None:
    num_queries, num_keys = data.draw(num_tokens), data.draw(num_tokens)
    a, b = data.draw(masks(2, num_queries, num_keys)), data.draw(masks(2, num_queries, num_keys))
    together = dense(a & b, num_queries, num_keys)
    drawn = dense(a, num_queries, num_keys) & dense(b, num_queries, num_keys)
    assert torch.equal(together.expand_as(drawn), drawn)
    check_transpose(a & b, num_queries, num_keys)


@examples(80)
@given(sized_masks(), st.integers(1, 17), st.integers(1, 17))
def test_tiles_and_counts_agree_with_the_drawn_mask(case: tuple[Mask, int, int], block_q: int, block_k: int) -> None:
    mask, num_queries, num_keys = case
    drawn = dense(mask, num_queries, num_keys)
    assert count(mask, num_queries, num_keys) == int(drawn.sum())
    start, end = (torch.atleast_2d(x) for x in mask.intervals(num_queries, num_keys))
    kinds = interval_kinds(start, end, num_keys, block_q, block_k)
    drawn = drawn if drawn.dim() == 3 else drawn[None]
    assert kinds.shape == (len(drawn), -(-num_queries // block_q), -(-num_keys // block_k))
    for i in range(kinds.shape[-2]):
        for j in range(kinds.shape[-1]):
            tile = drawn[..., i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k].flatten(-2)
            assert torch.equal(kinds[..., i, j] == FULL, tile.all(-1))
            assert not (kinds[..., i, j] == EMPTY)[tile.any(-1)].any(), "what is left out is empty"


def check_transpose(mask: Mask, num_queries: int, num_keys: int) -> None:
    """Check that the rows that see a key are within [first, last), and for a convex mask that they are all of these."""
    if isinstance(mask, Band):
        return
    rows = torch.arange(num_queries)[:, None]
    may = (mask.first[..., None, :] <= rows) & (rows < mask.last[..., None, :])
    drawn = dense(mask, num_queries, num_keys)
    assert not bool((drawn & ~may).any())
    if mask.convex:
        assert torch.equal(drawn, may)


@examples(80)
@given(sized_masks())
def test_columns_find_every_query_of_a_key(case: tuple[Mask, int, int]) -> None:
    check_transpose(*case)


@examples(60)
@given(sized_masks())
def test_a_mask_survives_packing_simplifying_and_slicing_to_itself(case: tuple[Mask, int, int]) -> None:
    mask, num_queries, num_keys = case
    drawn = dense(mask, num_queries, num_keys)
    again = unpack(*mask.pack())
    assert again == mask
    assert hash(again) == hash(mask)
    assert torch.equal(dense(again, num_queries, num_keys), drawn)
    simple = mask.simplify(num_queries, num_keys) if isinstance(mask, Band) else mask.simplify()
    assert torch.equal(dense(simple, num_queries, num_keys).expand_as(drawn), drawn)
    whole = mask.slice(range(num_queries), range(num_keys))
    assert torch.equal(dense(whole, num_queries, num_keys).expand_as(drawn), drawn)
    mask.check(2, num_queries, num_keys)


def test_a_table_knows_how_many_keys_a_query_sees_about_and_tells_its_copies() -> None:
    for lengths, reach in (([64] * 4, 64), ([1, 63, 192], 128), ([0, 0], 0), ([1], 1)):
        assert documents(lengths).reach == reach
    mask = documents([256, 256]) & causal()
    assert mask.reach == 128
    assert ragged([512, 0], 256, 512).reach == 256
    assert mask.to("meta").reach == unpack(*mask.to("meta").pack()).reach == 128
    assert (mask.to("meta") & window(9, 0)).reach == 0  # a meta tensor has no values


def test_patterns_draw_what_they_are_named_for() -> None:
    i, j = torch.arange(7)[:, None], torch.arange(9)
    assert torch.equal(dense(causal(), 7, 9), j <= i)
    assert torch.equal(dense(causal(2), 7, 9), j <= i + 2)
    assert torch.equal(dense(window(2, 1), 7, 9), (i - 2 <= j) & (j <= i + 1))
    assert torch.equal(dense(window(1, offset=2), 7, 9), (i + 1 <= j) & (j <= i + 3))
    document = torch.tensor([0, 0, 0, 2, 2, 2, 2])
    assert torch.equal(dense(documents([3, 0, 4]), 7, 7), document[:, None] == document)
    assert torch.equal(dense(prefix(3, 7), 7, 7), (j[:7] <= i) | (j[:7] < 3))
    batch = dense(ragged([9, 0, 4], 7, 9, query_lengths=[7, 7, 2]), 7, 9)
    assert torch.equal(
        batch, (j < torch.tensor([9, 0, 4])[:, None, None]) & (i < torch.tensor([7, 7, 2])[:, None, None])
    )


@examples(80)
@given(st.data())
def test_equal_masks_are_equal_however_they_were_made(data: st.DataObject) -> None:
    num_queries, num_keys = data.draw(num_tokens), data.draw(num_tokens)
    a, b = data.draw(masks(2, num_queries, num_keys)), data.draw(masks(2, num_queries, num_keys))
    both = a & b
    if isinstance(both, Rows):
        again = Rows(both.start, both.end, num_keys)
        assert again == both
        assert hash(again) == hash(both)


def test_an_intersection_says_empty_rows_as_the_constructor_does() -> None:
    both = documents([5, 5]) & window(1, 0, offset=-3)
    assert isinstance(both, Rows)
    again = Rows(both.start, both.end, 10)
    assert again == both
    assert hash(again) == hash(both)
    assert both.convex
    assert again.convex


def test_slices_simplify_to_the_cheapest_band() -> None:
    assert causal().slice(range(8, 16), range(8)) is EVERYTHING
    assert causal().slice(range(8), range(8, 16)) is NOTHING
    assert causal().slice(range(1, 16, 2), range(0, 16, 2)) == Band(None, 0)
    assert causal().slice(range(0, 16, 2), range(1, 16, 2)) == Band(None, -1)
    zigzag = causal().slice([range(4), range(12, 16)], [range(4, 8), range(8, 12)])
    assert torch.equal(dense(zigzag, 8, 8), (torch.arange(8) >= 4)[:, None].expand(8, 8))
    assert documents([8]).simplify() is EVERYTHING


@pytest.mark.parametrize(
    "make",
    [
        lambda: Band(0.5, 1),  # type: ignore[arg-type]
        lambda: Band(True, None),
        lambda: Rows(torch.zeros(3), torch.ones(3), 4),
        lambda: Rows(torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), 4),
        lambda: Rows(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), -1),
        lambda: Rows(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), 2.5),  # type: ignore[arg-type]
        lambda: window(-1),
        lambda: window("a"),  # type: ignore[arg-type]
        lambda: window(None),  # type: ignore[arg-type]
        lambda: window(2, 1.5),  # type: ignore[arg-type]
        lambda: window(2, offset="a"),  # type: ignore[arg-type]
        lambda: prefix(3.0, 10),  # type: ignore[arg-type]
        lambda: prefix(3, None),  # type: ignore[arg-type]
        lambda: documents(None),  # type: ignore[arg-type]
        lambda: documents([1, None]),  # type: ignore[list-item]
        lambda: documents([[1], [2, 3]]),  # type: ignore[list-item]
        lambda: ragged([5], 3.5, 8),  # type: ignore[arg-type]
        lambda: ragged([5], 8, "8"),  # type: ignore[arg-type]
        lambda: documents([3, -1]),
        lambda: documents([3], [1, 2]),
        lambda: prefix(8, 7),
        lambda: ragged([3, 4], 7, 9, query_lengths=[1]),
        lambda: causal().slice([range(4, 8), range(4)], range(8)),
        lambda: documents([3, 4]) & documents([3, 5]),
        lambda: documents([3, 4]).check(1, 7, 8),
        lambda: ragged([3, 4], 7, 9).check(3, 7, 9),
    ],
)
def test_what_is_not_a_mask_is_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r": got |this mask covers"):
        make()


def test_threads_may_share_a_mask() -> None:
    """Threads may derive masks, and drop derived masks from the cache, in any order."""
    mask, interval = documents([30, 50]), sys.getswitchinterval()
    wrong: list[Exception] = []

    def use(seed: int) -> None:
        choice = random.Random(seed)
        try:
            for _ in range(400):
                width = choice.randint(1, 4 * DERIVED_KEPT)
                made = mask & Band(-width, 0)
                assert isinstance(made, Rows)
                assert made.start[79] == max(30, 79 - width)
        except Exception as error:  # an exception in a thread would not fail the test
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


BOUNDS = [(None, None), (0, -1), (None, 0), (2, None), (-3, 1), (1, 4), (2, 2), (-6, -2)]


@pytest.mark.parametrize("second", BOUNDS)
@pytest.mark.parametrize("first", BOUNDS)
def test_bands_that_meet_are_joined_and_what_lies_around_one_is_known(
    first: tuple[int | None, int | None], second: tuple[int | None, int | None]
) -> None:
    """A slice may be a band in which a query sees no key, or every key. It composes like any other band."""
    one, two = Band(*first), Band(*second)
    try:
        joined = one | two
    except ValueError:
        assert first != (0, -1) != second
        gaps = [(a[1], b[0]) for a, b in ((first, second), (second, first))]
        assert any(end is not None and begin is not None and end + 1 < begin for end, begin in gaps)
    else:
        assert torch.equal(dense(joined, 7, 9), dense(one, 7, 9) | dense(two, 7, 9))
    if None in first or first == (0, -1):
        assert torch.equal(dense(~one, 7, 9), ~dense(one, 7, 9))
