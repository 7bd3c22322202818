"""Layouts deal out every token once, in order, for any length on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspan.context.layout import LAYOUTS, balanced, contiguous, cut, deal, place
from flashspan.context.runs import Runs
from flashspan.kernels.masks import CAUSAL

ranks_and_tokens = st.tuples(st.integers(1, 9), st.integers(0, 60))


@given(st.sampled_from(sorted(LAYOUTS)), ranks_and_tokens)
@settings(max_examples=200, deadline=None)
def test_every_token_has_one_owner_and_shards_ascend(layout: str, sizes: tuple[int, int]) -> None:
    num_ranks, num_tokens = sizes
    placement = place(layout, num_tokens, num_ranks)
    positions = [placement.positions(rank).tolist() for rank in range(num_ranks)]
    assert sorted(p for part in positions for p in part) == list(range(num_tokens))
    assert all(part == sorted(part) for part in positions)
    assert [len(part) for part in positions] == list(placement.sizes)
    assert max(placement.sizes) - min(placement.sizes) <= 2


@given(st.sampled_from(sorted(LAYOUTS)), ranks_and_tokens, st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_unshard_undoes_shard(layout: str, sizes: tuple[int, int], dim: int) -> None:
    num_ranks, num_tokens = sizes
    placement = place(layout, num_tokens, num_ranks)
    shape = [2, 3, 4]
    shape[dim] = num_tokens
    x = torch.randn(shape)
    parts = [placement.shard(x, dim, rank) for rank in range(num_ranks)]
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(placement.unshard(parts, dim), x)
    for rank, part in enumerate(parts):
        assert torch.equal(part, x.index_select(dim, placement.positions(rank)))


def test_zigzag_pairs_an_early_with_a_late_run() -> None:
    assert place("zigzag", 16, 4).ranges == (
        (range(2), range(14, 16)),
        (range(2, 4), range(12, 14)),
        (range(4, 6), range(10, 12)),
        (range(6, 10),),  # the two runs in the middle touch
    )


def test_dealing_splits_each_shard_in_order() -> None:
    dealt = deal(place("zigzag", 16, 2), 2)
    assert dealt.ranges == ((range(4),), (range(12, 16),), (range(4, 8),), (range(8, 12),))
    assert deal(contiguous(7, 1), 3).sizes == (2, 2, 3)


@given(st.sampled_from(sorted(LAYOUTS)), ranks_and_tokens, st.data())
@settings(max_examples=100, deadline=None)
def test_cutting_local_rows_gives_their_positions(layout: str, sizes: tuple[int, int], data: st.DataObject) -> None:
    num_ranks, num_tokens = sizes
    placement = place(layout, num_tokens, num_ranks)
    size = placement.sizes[0]
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    positions = [p for run in cut(placement.ranges[0], Runs.of(range(start, stop))) for p in run]
    assert positions == placement.positions(0).tolist()[start:stop]


def test_wrong_lengths_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"made from a block map: got Band; use Blocks.of"):
        balanced(CAUSAL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown layout 'diagonal'; choose one of contiguous, zigzag, striped"):
        place("diagonal", 8, 2)
    with pytest.raises(ValueError, match="splits a dimension of 8 tokens: got 9"):
        place("zigzag", 8, 2).shard(torch.zeros(9), 0, 0)
    with pytest.raises(ValueError, match=r"joins 2 parts of \(4, 4\) tokens: got \(5, 3\)"):
        place("zigzag", 8, 2).unshard([torch.zeros(5), torch.zeros(3)], 0)
