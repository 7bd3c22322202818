"""Block maps across ranks: only visible tiles are computed, only visible keys are sent, and work can be balanced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flashspan import attention
from flashspan.context import balanced, context_parallel
from flashspan.context.generators import GENERATORS, gather, in_chunks, ring
from flashspan.context.layout import LAYOUTS, place
from flashspan.context.runs import Runs, union
from flashspan.context.schedule import Shape, bytes_sent, reverse
from flashspan.context.verify import ScheduleError, verify
from flashspan.context.visibility import Visibility
from flashspan.kernels.masks import CAUSAL, Band, Blocks, Mask, dense
from flashspan.masks import patterns
from tests.context.cases import group_of
from tests.context.test_execute import make, one_device, run_all

T = 150
LONG = 700


def holes(*shape: int) -> Blocks:
    """Random pairs with a range of hidden keys; `shape` is the number of maps of the batch and of the heads."""
    visible = torch.rand(*shape, T, T, generator=torch.Generator().manual_seed(5)) < 0.1
    visible[..., 60:90] = False
    visible[..., 100:120, :] = False
    return Blocks.from_dense(visible, block=64)


def squares() -> Blocks:
    """A few blocks of keys for each block of queries: ranks need scattered blocks of each shard."""
    coarse = torch.rand(11, 11, generator=torch.Generator().manual_seed(3)) < 0.15
    return Blocks.from_coarse(coarse, LONG, LONG, size=64, block=64)


SMALL: dict[str, Callable[[], Blocks]] = {
    "holes": holes,
    "for each head": lambda: holes(4),
    "for each sequence and head": lambda: holes(2, 4),
    "squares": squares,
    "sinks": lambda: patterns.streaming(3, 20, T),
    "nothing": lambda: Blocks.of(Band(0, -1), T, T),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make_mask", [lambda: holes(2, 1), squares], ids=["holes", "squares"])
def test_visibility_counts_and_frames_what_is_visible(layout: str, make_mask: Callable[[], Blocks]) -> None:
    mask = make_mask()
    placement = place(layout, mask.num_keys, 5)
    visibility = Visibility(placement, mask)
    drawn = mask.dense().view(-1, mask.num_keys, mask.num_keys).numpy()
    for q in range(5):
        for k in range(5):
            tile = drawn[:, placement.index(q)][:, :, placement.index(k)]
            box = visibility.box(q, k)
            (rows,) = tile.any((0, 2)).nonzero()
            assert box.pairs == tile.sum()
            assert box.k_rows == seen_rows(tile, placement.index(k) // 64)
            if not box.pairs:
                assert box.q_rows == range(0)
                continue
            assert box.q_rows == range(rows[0], rows[-1] + 1)
            half = visibility.box(q, k, range(5, 17))
            assert half.pairs == tile[:, 5:17].sum()
            assert half.k_rows == seen_rows(tile[:, 5:17], placement.index(k) // 64)
            assert not half.pairs or set(half.q_rows) <= set(range(5, 17))


def seen_rows(tile: np.ndarray, blocks: np.ndarray) -> Runs:
    """From the first to the last visible key of a dense tile, without blocks that have no visible key."""
    columns = np.flatnonzero(tile.any((0, 1)))
    rows = [row for row in range(len(blocks)) if blocks[row] in blocks[columns]]
    return Runs.of(*(range(row, row + 1) for row in rows if columns[0] <= row <= columns[-1]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_key_block_is_sent_only_to_ranks_that_see_it(layout: str) -> None:
    """`gather` sends each rank the blocks it needs, a ring the blocks that it and later ranks need."""
    mask, num = squares(), 4
    placement = place(layout, LONG, num)
    visibility, drawn = Visibility(placement, mask), mask.dense().numpy()
    wanted = {
        (q, k): seen_rows(drawn[np.ix_(placement.index(q), placement.index(k))][None], placement.index(k) // 64)
        for q in range(num)
        for k in range(num)
    }
    sent = {(t.dst, t.owner): t.rows for t in gather(visibility).transfers}
    assert sent == {(q, k): rows for (q, k), rows in wanted.items() if q != k and len(rows)}
    assert any(len(rows.parts) > 1 for rows in sent.values())
    for t in ring(visibility).transfers:
        behind = [wanted[(t.owner + d) % num, t.owner] for d in range((t.dst - t.owner) % num, num)]
        assert t.rows == union(behind)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("strategy", ["ring", "gather", "helper"])
def test_the_proof_notices_a_gap_that_is_sent_and_a_block_that_is_not(strategy: str, backward: bool) -> None:
    visibility = Visibility(place("zigzag", LONG, 4), squares())
    schedule = GENERATORS[strategy](visibility)
    schedule = reverse(schedule) if backward else schedule
    verify(schedule, visibility)
    transfers = list(schedule.transfers)
    for kind in ("kv", "dkv") if backward else ("kv",):
        number = next(i for i, t in enumerate(transfers) if t.kind == kind and len(t.rows.parts) > 1)
        one = transfers[number]
        for rows in (Runs.of(range(one.rows.start, one.rows.stop)), Runs(one.rows.parts[1:])):
            wrong = [*transfers[:number], one._replace(rows=rows), *transfers[number + 1 :]]
            with pytest.raises(ScheduleError):
                verify(replace(schedule, transfers=tuple(wrong)), visibility)


def test_halves_count_every_map() -> None:
    """A part that is visible in all maps counts once for each map, so the two halves of helper add up."""
    mask = Blocks.from_dense(torch.ones(3, 20, 20, dtype=torch.bool))
    visibility = Visibility(place("contiguous", 20, 2), mask)
    assert visibility.box(1, 0, range(4)).pairs == 3 * 4 * 10
    assert visibility.box(1, 0, range(0)).pairs == 0
    verify(GENERATORS["helper"](visibility), visibility)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("strategy", sorted(GENERATORS))
def test_any_map_over_simulated_ranks(name: str, strategy: str) -> None:
    """Equal to one device, and the bytes sent are those of the schedule."""
    mask = SMALL[name]()
    xs = make(mask.num_keys)
    exact = one_device(mask, xs)
    whole_blocks = strategy in ("gather", "double_ring")
    layout = "zigzag" if name == "squares" else balanced(mask) if whole_blocks else "striped"
    visibility = Visibility(place(layout, mask.num_keys, 4), mask)
    sizes = {"sizes": (2, 2)} if strategy == "double_ring" else {}
    schedule = in_chunks(GENERATORS[strategy](visibility, **sizes), 2)
    verify(schedule, visibility)
    verify(reverse(schedule), visibility)
    mine, sent = run_all(schedule, visibility, xs)
    for a, b in zip(mine, exact, strict=True):
        assert float((a - b).norm()) <= 2e-6 * float(b.norm())
    shape = Shape(num_batch=2, num_heads=4, num_kv_heads=2, head_dim=8, itemsize=4)
    there, back = bytes_sent(schedule, shape), bytes_sent(reverse(schedule), shape)
    assert sent == [a + b for a, b in zip(there, back, strict=True)]


PATTERNS: dict[str, Callable[[int], Mask]] = {
    "window": lambda n: Band(-900, 900),
    "causal window": lambda n: Band(-1500, 0),
    "causal": lambda n: CAUSAL,
    "dilated": lambda n: patterns.dilated(100, 8, n),
    "documents": lambda n: patterns.documents([n // 3, n // 5, n - n // 3 - n // 5]),
    "random": lambda n: patterns.random_blocks(n, 0.2),
    "longformer": lambda n: patterns.longformer(n, window=400, num_global=64),
    "bigbird": lambda n: patterns.bigbird(n, window=400, num_global=64, num_random=3),
    "prefix": lambda n: patterns.prefix(n // 4, n),
    "streaming": lambda n: patterns.streaming(16, 1000, n),
    "top blocks": lambda n: patterns.top_blocks(*torch.randn(2, 1, 2, n, 8).unbind(), 9, causal=True),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_layout_made_from_the_mask_balances_the_work(name: str) -> None:
    """8 ranks: the busiest has at most 1.15 times the mean number of tiles, and of pairs."""
    n = 8000
    mask = Blocks.of(PATTERNS[name](n), n, n)
    placement = place(balanced(mask), n, 8)
    assert sorted(np.concatenate([placement.index(rank) for rank in range(8)])) == list(range(n))
    work = mask.rows.visits().sum((0, 1)).numpy()
    owned = [{run.start // 128 + i for run in part for i in range(-(-len(run) // 128))} for part in placement.ranges]
    visits = [sum(work[b] for b in part) for part in owned]
    assert max(visits) <= 1.15 * sum(visits) / 8
    schedule = gather(visibility := Visibility(placement, mask))
    verify(schedule, visibility)
    assert schedule.balance <= 1.15


def test_bytes_fall_with_the_mask() -> None:
    n, shape = 8192, Shape(1, 8, 8, 64, 2)
    sent = {}
    for name, mask in {
        "everything": Blocks.of(Band(), n, n),
        "streaming": patterns.streaming(4, 512, n),
        "documents": Blocks.of(patterns.documents([1024] * 8), n, n),
    }.items():
        for strategy in (ring, gather):
            visibility = Visibility(place("contiguous", n, 8), mask)
            sent[name, strategy.__name__] = sum(bytes_sent(strategy(visibility), shape))
    for strategy in ("ring", "gather"):
        assert sent["documents", strategy] == 0  # every document is on one rank
        assert sent["streaming", strategy] < 0.15 * sent["everything", strategy]
    # Each rank without the 4 sinks receives them, and each but the first rank receives 511 keys. The second rank
    # receives both from the first: the rows from the first to the last, except the three blocks of 128 between them.
    assert sent["streaming", "gather"] == 2 * 8 * 64 * 2 * (6 * 511 + 6 * 4 + 1024 - 3 * 128)
    # Each block of queries sees 3 of 64 blocks of keys. A rank receives those that other ranks have, 7/8 of them.
    chosen = dense(mask := patterns.random_blocks(n, 3 / 64), n, n)[::128, ::128].view(8, 8, 8, 8).any(1)
    blocks = sum(int(chosen[q, k].sum()) for q in range(8) for k in range(8) if q != k)
    visibility = Visibility(place("contiguous", n, 8), mask)
    assert sum(bytes_sent(gather(visibility), shape)) == 2 * 8 * 64 * 2 * 128 * blocks
    assert blocks < 0.35 * 7 * 64


def run_on_four(cases: list[tuple[str, str, str]]) -> list[Any]:
    """On a rank: each case's (out, dq, dk, dv) and bytes sent, or None elsewhere."""
    import torch.distributed as dist

    group = group_of(4)
    if dist.get_rank() < dist.get_world_size() - 4:
        return [None] * len(cases)
    answers: list[Any] = []
    for name, layout, strategy in cases:
        mask = SMALL[name]()
        chosen = balanced(mask) if layout == "balanced" else layout
        attend = context_parallel(group, layout=chosen, strategy=strategy, timeout=30.0)
        q, k, v, dout = (attend.shard(x, 2) for x in make(mask.num_keys))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, mask=mask.dense() if layout == "striped" else mask, scale=0.3)
        grads = torch.autograd.grad(out, leaves, dout)
        whole = [attend.unshard(x, 2).double().numpy() for x in (out, *grads)]
        answers.append((whole, attend.bytes_sent))
    return answers


CASES = [
    *[("holes", "balanced", strategy) for strategy in ("ring", "gather", "helper", "ulysses")],
    ("holes", "striped", "ring"),
    ("for each head", "zigzag", "ulysses"),
    ("for each sequence and head", "zigzag", "ring"),
    *[("squares", layout, strategy) for layout, strategy in (("zigzag", "ring"), ("contiguous", "helper"))],
    ("nothing", "contiguous", "ring"),
]


def test_four_ranks_equal_one(on_ranks: Callable[..., list[Any]]) -> None:
    answers = on_ranks(run_on_four, CASES)
    for number, (name, _, _) in enumerate(CASES):
        mask = SMALL[name]()
        exact = one_device(mask, make(mask.num_keys))
        for part in [answer[number] for answer in answers if answer[number] is not None]:
            for index, (mine, want) in enumerate(zip(part[0], exact, strict=True)):
                error = float((torch.from_numpy(mine) - want).norm()) / max(float(want.norm()), 1e-30)
                assert error <= (1e-6 if index == 0 else 1e-5)


def drop_on_four(strategy: str) -> Any:
    """On a rank: the largest difference from one device's dropout, for keys with gaps."""
    import torch.distributed as dist

    group = group_of(4)
    if dist.get_rank() < dist.get_world_size() - 4:
        return None
    mask, options = squares(), {"dropout": 0.3, "seed": 7, "scale": 0.3}
    attend = context_parallel(group, layout="zigzag", strategy=strategy, backend="tiled", timeout=30.0)
    q, k, v, _ = make(LONG)
    mine = attend.unshard(attend(*(attend.shard(x, 2) for x in (q, k, v)), mask=mask, **options), 2)
    return float((mine - attention(q, k, v, mask=mask, backend="tiled", **options)).abs().max())


@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_dropout_uses_the_positions_of_received_keys(on_ranks: Callable[..., list[Any]], strategy: str) -> None:
    assert max(on_ranks(drop_on_four, strategy)[4:]) < 1e-5
