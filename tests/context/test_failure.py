"""Errors are raised on every rank in time: for different calls before any transfer, for a lost rank at the timeout."""

from __future__ import annotations

import copy
import math
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashspan import attention
from flashspan.context import Placement, context_parallel
from flashspan.kernels.masks import Blocks, Rows
from flashspan.launch import RankError, Ranks
from flashspan.masks.patterns import documents, window
from tests.context.cases import Case, attention_of, group_of

OnRanks = Callable[..., list[Any]]


def disagree(kind: str) -> str | None:
    """On a rank: the error of a call that is different on the group's last rank."""
    attend = attention_of(Case(4), timeout=10.0, backend="cpu" if kind == "backend" else "auto")
    if attend is None:
        return None
    odd = attend.rank == 3
    shape = {"batch": 2, "heads": 4, "kv": 2, "tokens": 6, "D": 8}
    if kind in shape and odd:
        shape[kind] *= 2
    q = torch.randn(shape["batch"], shape["heads"], shape["tokens"], shape["D"])
    k = torch.randn(shape["batch"], shape["kv"], shape["tokens"], shape["D"])
    options: dict[str, Any] = {"causal": True}
    if odd:
        options |= {"causal kind": {"causal": False}, "scale": {"scale": 0.5}, "window": {"window": 3}}.get(kind, {})
    if kind.startswith("seed"):
        options |= {"dropout": 0.5, "seed": {"seed": 8, "seed on one": None, "seed kind": 1.5}[kind] if odd else 7}
    if kind == "mask":
        options["mask"] = documents([10, 14] if odd else [12, 12])
    if kind == "mask shape":
        options["mask"] = torch.ones(3 if odd else 1, 1, 24, 24, dtype=torch.bool)
    if kind == "window kind":
        options["window"] = [[3], [3]] if odd else 3
    if kind == "backend":  # every rank sees its own tokens; only on the last one is the tile a block map
        owner = attend.placement(24).unshard([torch.full((6,), rank) for rank in range(4)], 0)
        seen = (owner[:, None] == owner) & ((owner < 3) | torch.ones(24, 24).tril().bool())
        options = {"mask": Blocks.from_dense(seen)}
    if kind == "dtype" and odd:
        q, k = q.bfloat16(), k.bfloat16()
    if kind == "strategy" and odd:
        attend = attention_of(Case(4, "gather"), timeout=10.0)
        assert attend is not None
    if kind == "scale kind" and odd:
        options["scale"] = "x"
    if kind == "generator":
        options |= {"dropout": 0.5, "generator": 3 if odd else None}
    if kind == "not a tensor" and odd:
        q = q.tolist()
    if kind == "cross" and odd:
        k = k[:, :, :3]
    if kind == "rank" and odd:
        q = q[0]
    try:
        attend(q, k, k, **options)
    except ValueError as error:
        return str(error)
    return "no error"


EXPECTED = {
    "batch": r"agree on batch: got \[2, 2, 2, 4\] on ranks 0 to 3",
    "heads": r"agree on query heads: got \[4, 4, 4, 8\]",
    "kv": r"agree on kv heads: got \[2, 2, 2, 4\]",
    "D": r"agree on head size: got \[8, 8, 8, 16\]",
    "tokens": r"splits 30 tokens into shards of \(7, 8, 8, 7\): got shards of \(6, 6, 6, 12\) tokens; split them with",
    "dtype": r"agree on dtype: got \[float32, float32, float32, bfloat16\] on ranks 0 to 3",
    "strategy": r"agree on strategy, layout or options; every rank must make the same call",
    "causal kind": r"agree on causal, window, mask, scale, dropout or seed",
    "scale": r"agree on causal, window, mask, scale, dropout or seed",
    "window": r"agree on causal, window, mask, scale, dropout or seed",
    "window kind": r"rank 3: a window is an int >= 1 or a pair .* got \(\[3\], \[3\]\)",
    "backend": r"rank 0: backend 'cpu' does not support this call: it supports masks .* use one of: .*tiled",
    "seed": r"agree on causal, window, mask, scale, dropout or seed",
    "scale kind": r"rank 3: scale must be a finite number: got 'x'",
    "generator": r"rank 3: a generator is a torch.Generator: got 3",
    "not a tensor": r"rank 3: q, k and v must be dense tensors: got list, torch.strided, torch.strided",
    "seed on one": r"agree on causal, window, mask, scale, dropout or seed",
    "seed kind": r"rank 3: a seed is a whole number: got 1.5",
    "mask": r"agree on causal, window, mask, scale, dropout or seed",
    "mask shape": r"rank 3: a mask tensor must broadcast to q's batch and heads, \[2, 4, T, S\]: got \(3, 1, 24, 24\)",
    "cross": r"rank 3: across ranks, queries and keys are the same tokens: got 6 and 3; for cross attention",
    "rank": r"rank 3: q, k and v must be \[batch, heads, tokens, head size\]",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", sorted(EXPECTED))
def test_ranks_that_disagree_get_the_same_error(on_ranks: OnRanks, kind: str) -> None:
    on_ranks(os.getpid)  # start the ranks before the clock
    started = time.monotonic()
    messages = on_ranks(disagree, kind)[4:]
    assert len(set(messages)) == 1
    assert re.search(EXPECTED[kind], messages[0]), messages[0]
    assert time.monotonic() - started < 8, "the ranks waited for a timeout"


def hand_over(kind: str) -> tuple[str, float] | None:
    """On a rank: the error of a call with an invalid mask, and the next call's difference from one device."""
    case = Case(2)
    attend = attention_of(case, timeout=10.0)
    if attend is None:
        return None
    visible = torch.ones(case.T, case.T, dtype=torch.bool).tril()
    visible[:, 20] = False
    wrong: Any = {
        "sparse": visible.to_sparse(),
        "meta": visible.to("meta"),
        "rule": lambda b, h, i, j: i >= j,
        "list": visible.tolist(),
        "float": visible.float(),
    }[kind]
    alone = kind in ("sparse", "meta")
    q, k, v, *_ = case.inputs()
    parts = [attend.shard(x, 2) for x in (q, k, v)]
    said = "no error"
    try:
        attend(*parts, mask=wrong if attend.rank == 1 or not alone else visible)
    except ValueError as error:
        said = str(error)
    out = attend.unshard(attend(*parts, mask=visible), 2)
    return said, float((out - attention(q, k, v, mask=visible)).abs().max())


HANDED_OVER = {
    "sparse": r"^rank 1: a mask tensor must be dense, .*: got torch.sparse_coo on cpu; use mask.to_dense",
    "meta": r"^rank 1: a mask tensor must be on q's device, cpu: got meta",
    "rule": r"^rank 0: mask must be a bool tensor or made by flashspan.masks: got function; use masks.Blocks.from_rule",
    "list": r"^rank 0: mask must be .*: got list; use torch.as_tensor",
    "float": r"^rank 0: a mask tensor must be bool, True where visible: got torch.float32",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", HANDED_OVER)
def test_an_invalid_mask_is_refused_on_all_ranks_and_the_next_call_works(on_ranks: OnRanks, kind: str) -> None:
    answers = on_ranks(hand_over, kind)[6:]
    assert len({said for said, _ in answers}) == 1
    assert re.search(HANDED_OVER[kind], answers[0][0]), answers[0][0]
    assert max(error for _, error in answers) < 1e-5


def halves_that_overlap(num_tokens: int, num_ranks: int) -> Placement:
    return Placement(num_tokens, ((range(100),), (range(50, 150),)))


def deal_wrongly() -> str | None:
    """On a rank: the error for a layout with the right number of tokens that assigns some of them twice."""
    attend = attention_of(Case(2, layout=halves_that_overlap), num_tokens=200, timeout=10.0)
    if attend is None:
        return None
    x = torch.randn(1, 2, 100, 8)
    with pytest.raises(ValueError, match="each token to exactly one: got 2 ranks for token 50") as caught:
        attend(x, x, x, causal=True)
    return str(caught.value)


@pytest.mark.timeout(60)
def test_a_layout_that_deals_tokens_twice_is_refused_on_all_ranks(on_ranks: OnRanks) -> None:
    assert len(set(on_ranks(deal_wrongly)[6:])) == 1


def intersect_in_two_ways() -> float | None:
    """On a rank: the difference from one device if ranks build the same mask, with empty rows, in two ways."""
    attend = attention_of(Case(2), timeout=10.0)
    if attend is None:
        return None
    mask = documents([5, 5]) & window(1, 0, offset=-3)
    q, k, v = (torch.randn(1, 2, 10, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mine = Rows(mask.start, mask.end, 10) if attend.rank else mask  # type: ignore[union-attr]
    out = attend.unshard(attend(*(attend.shard(x, 2) for x in (q, k, v)), mask=mine), 2)
    return float((out - attention(q, k, v, mask=mask)).abs().max())


@pytest.mark.timeout(60)
def test_ranks_agree_on_a_mask_however_it_was_made(on_ranks: OnRanks) -> None:
    assert max(on_ranks(intersect_in_two_ways)[6:]) < 1e-5


def calls_of_many_lengths(num_tokens: int | None) -> list[int] | None:
    """On a rank: calls of several lengths. T = 7 and 8 give rank 0 (contiguous, 4 ranks) the same shard size."""
    attend = attention_of(Case(4, layout="contiguous"), num_tokens=num_tokens)
    if attend is None:
        return None
    lengths = []
    for T in (8, 7, 8, 7, 5, 8) if num_tokens is None else (8, 8):
        x = attend.shard(torch.ones(1, 2, T, 4), 2)
        out = attend(x, x, x, causal=True)
        lengths.append(attend.unshard(out, 2).shape[2])
    return lengths


def test_lengths_with_equal_shards_on_one_rank_are_distinguished(on_ranks: OnRanks) -> None:
    assert on_ranks(calls_of_many_lengths, None)[4:] == [[8, 7, 8, 7, 5, 8]] * 4
    assert on_ranks(calls_of_many_lengths, 8)[4:] == [[8, 8]] * 4


def call_with_wrong_length() -> str | None:
    attend = attention_of(Case(4), num_tokens=16)
    if attend is None:
        return None
    x = attend.shard(torch.ones(1, 2, 8, 4), 2)
    with pytest.raises(ValueError, match=r"splits 16 tokens into shards of \(4, 4, 4, 4\): got shards of") as caught:
        attend(x, x, x)
    return str(caught.value)


def test_a_declared_length_is_checked(on_ranks: OnRanks) -> None:
    assert len(set(on_ranks(call_with_wrong_length)[4:])) == 1


def join_what_differs() -> str | None:
    attend = attention_of(Case(4), timeout=10.0)
    if attend is None:
        return None
    with pytest.raises(ValueError, match="agree on the dtype of the shards, and on their shape except in dimension 1"):
        attend.unshard(torch.ones(2, 3, dtype=torch.bfloat16 if attend.rank else torch.float16), 1)
    with pytest.raises(ValueError, match=r"rank \d has torch.float32 and \((2|5), 3\)"):
        attend.unshard(torch.ones(2 if attend.rank else 5, 3), 1)
    return "refused"


def test_parts_that_differ_are_not_joined(on_ranks: OnRanks) -> None:
    assert on_ranks(join_what_differs)[4:] == ["refused"] * 4


def call_from_outside() -> str:
    """On a rank: the error of an attention over a group without this rank, or with a slow group of fewer ranks."""
    few = group_of(4)
    outside = dist.get_rank() < 4
    with pytest.raises(ValueError) as caught:
        context_parallel(few if outside else dist.group.WORLD, slow_group=None if outside else few)
    return str(caught.value)


def test_a_rank_outside_of_a_group_gets_an_error(on_ranks: OnRanks) -> None:
    said = on_ranks(call_from_outside)
    for rank in range(4):
        assert f"rank {rank} is not in the group" in said[rank]
        assert "in the same order: got [4, 5, 6, 7] for the group [0, 1, 2" in said[4 + rank]


def call_without_heads(strategy: str) -> list[int] | None:
    attend = attention_of(Case(2, strategy))
    if attend is None:
        return None
    x = torch.ones(1, 0, 3, 4, requires_grad=True)
    attend(x, x, x).backward(torch.ones(1, 0, 3, 4))
    assert x.grad is not None
    return list(x.grad.shape)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_no_heads_are_an_ordinary_case(on_ranks: OnRanks, strategy: str) -> None:
    assert on_ranks(call_without_heads, strategy)[6:] == [[1, 0, 3, 4]] * 2


def distance(mine: Any, exact: Any) -> float:
    return float((mine - exact).norm() / exact.norm())


def leave_out(what: str, strategy: str) -> list[str]:
    """On a rank: the errors of three steps. In one of them rank 1 skips backward, or fails in the middle of it."""
    attend = context_parallel(dist.group.WORLD, strategy=strategy, num_tokens=36, timeout=1.0)
    said = []
    for number in range(3):
        torch.manual_seed(number)
        *whole, dout = (torch.randn(2, 2, 36, 8) for _ in range(4))
        right = [x.clone().requires_grad_() for x in whole]
        wanted = attention(*right)
        wanted.backward(dout)
        xs = [attend.shard(x, 2).requires_grad_() for x in whole]
        try:
            out = attend(*xs)
            if distance(out, attend.shard(wanted, 2)) > 1e-5:
                said.append("wrong numbers")
            if number == 1 and attend.rank == 1:
                if what == "leaves out":
                    continue
                attend.outer.begin("this")  # without an end
            out.backward(attend.shard(dout, 2))
            if any(distance(x.grad, attend.shard(y.grad, 2)) > 1e-4 for x, y in zip(xs, right, strict=True)):
                said.append("wrong numbers")
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("what", ["leaves out", "breaks off"])
def test_a_rank_that_skips_a_pass_gives_no_rank_wrong_numbers(what: str, strategy: str) -> None:
    """The rank's next pass has the same sizes as the last pass of the others, and must not match it."""
    if (what, strategy) == ("breaks off", "ulysses"):
        pytest.skip("it uses no outer transport")
    with Ranks(2, threads=1, timeout=20) as ranks:
        answers = ranks.run(leave_out, what, strategy, timeout=40)
    assert all(answers)
    assert not any("wrong numbers" in said for said in answers)
    if what == "breaks off":
        assert "an earlier call of rank 1 of 2 failed before its end" in answers[1][0]


def call_otherwise(strategy: str) -> str:
    """On a rank: the error if, after calls with two masks, rank 1 uses the other mask."""
    attend = context_parallel(dist.group.WORLD, layout="contiguous", strategy=strategy, num_tokens=8, timeout=0.5)
    x = torch.randn(1, 2, 4, 8)
    known = [documents([3, 5]), documents([2, 6])]
    for mask in known:
        attend(x, x, x, mask=mask)
    with pytest.raises(RuntimeError) as caught:
        attend(x, x, x, mask=known[attend.rank])
    return str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_ranks_that_call_with_different_known_masks_get_an_error_and_continue(strategy: str) -> None:
    with Ranks(2, threads=1, timeout=20) as ranks:
        for said in ranks.run(call_otherwise, strategy, timeout=40):
            assert "has died, has stalled or makes other calls" in said


def test_an_attention_over_no_group_takes_what_one_device_takes() -> None:
    attend = context_parallel(None)
    assert copy.deepcopy({"attention": attend})["attention"] is attend
    x = torch.randn(1, 2, 9, 4)
    for q, k in ((x, x), (x.bfloat16(), x), (x, x.bfloat16())):  # under autocast each is cast as on one device
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(attend(q, k, k, causal=True), attention(q, k, k, causal=True))
    assert torch.equal(attend(x, x, x, window=[3, 0]), attend(x, x, x, window=(3, 0)))  # type: ignore[arg-type]


def lose_a_rank(how: str, strategy: str) -> tuple[float, str]:
    """On a rank: two calls of attention; before the second, rank 2 dies or stalls. Returns the time and the error."""
    attend = context_parallel(dist.group.WORLD, strategy=strategy, num_tokens=64, timeout=1.5)
    x = attend.shard(torch.randn(1, 4, 64, 8), 2)
    attend(x, x, x, causal=True)
    if attend.rank == 2:
        if how == "dies":
            os._exit(1)
        return 0.0, "stalled"
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        attend(x, x, x, causal=True)
    return time.monotonic() - started, str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["ring", "helper", "ulysses"])
def test_a_rank_that_stalls_is_named_within_the_timeout(strategy: str) -> None:
    with Ranks(4, threads=1, timeout=20) as ranks:
        answers = ranks.run(lose_a_rank, "stalls", strategy, timeout=40)
    survivors = [answer for answer in answers if answer[1] != "stalled"]
    assert len(survivors) == 3
    for seconds, message in survivors:
        assert seconds < 4.5, "1.5 s for the transfer, and some for a busy machine"
        assert re.search(r"rank \d of 4 (waited up to 1.5 s for|could not post) .* from rank \d to rank \d", message), (
            message
        )
        assert "has died, has stalled or makes other calls" in message
        if strategy != "ulysses":
            assert re.search(r"\(step \d of (ring|helper) forward\)", message), message
    # The ranks that receive from rank 2 name it.
    assert any("rank 2 (global rank 2)" in message for _, message in survivors)


@pytest.mark.timeout(60)
def test_a_rank_that_dies_is_named() -> None:
    ranks = Ranks(4, threads=1, timeout=20)
    started = time.monotonic()
    with pytest.raises(RankError, match="the process of rank 2 died"):
        ranks.run(lose_a_rank, "dies", "ring", timeout=40)
    assert time.monotonic() - started < 20
    assert not ranks.pids, "no process is left"


@pytest.mark.parametrize("chunks", [0, -1, 1.5, True])
def test_heads_come_in_whole_chunks(chunks: Any) -> None:
    with pytest.raises(ValueError, match=f"head_chunks must be 1 or more.*: got {chunks}"):
        context_parallel(None, head_chunks=chunks)


def _over(ranks: list[list[int]]) -> str | float:
    """The error of hybrid over a mesh with this order of ranks, or the difference of its output from one rank's."""
    mesh = DeviceMesh("cpu", ranks)
    try:
        attend = context_parallel(mesh, strategy="hybrid", layout="contiguous")
    except ValueError as error:
        return str(error)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 16, 8).unbind(0)
    mine = attend(*(attend.shard(x, 2) for x in (q, k, v)), causal=True)
    return float((mine - attend.shard(attention(q, k, v, causal=True), 2)).abs().max())


def test_a_mesh_whose_rows_disagree_about_places_is_refused() -> None:
    with Ranks(4, threads=1, timeout=20) as ranks:
        for order in ([[1, 0], [2, 3]], [[0, 3], [2, 1]]):
            for said in ranks.run(_over, order):
                assert said == (
                    "hybrid needs a mesh whose rows all sort their ranks in the same way, and whose columns do too: "
                    f"got {order}; number the ranks as init_device_mesh does"
                )
        for order in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 1], [2, 0]]):
            assert max(ranks.run(_over, order)) < 1e-5


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown strategy 'spiral'; choose one of ring"):
        context_parallel(None, strategy="spiral")
    with pytest.raises(ValueError, match="needed by double_ring and only by it"):
        context_parallel(None, strategy="double_ring")
    with pytest.raises(ValueError, match="needed by double_ring and only by it"):
        context_parallel(None, strategy="ring", sizes=(2, 2))
    with pytest.raises(ValueError, match=r"multiply to the number of ranks: got \(2, 2\) for 1 ranks"):
        context_parallel(None, strategy="double_ring", sizes=(2, 2))
    with pytest.raises(ValueError, match="hybrid needs a DeviceMesh of two dimensions"):
        context_parallel(None, strategy="hybrid")
    for sizes in ((-1, -1), 1, (1.0, 1.0), (1, 1, 1)):
        with pytest.raises(ValueError, match=re.escape(f"multiply to the number of ranks: got {sizes} for 1 ranks")):
            context_parallel(None, strategy="double_ring", sizes=sizes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown layout 'zigzg'; choose one of contiguous"):
        context_parallel(None, layout="zigzg")
    with pytest.raises(ValueError, match=r"backend must be one of auto, .*: got 'cuda'"):
        context_parallel(None, backend="cuda")
    attend = context_parallel(None, deterministic=True)
    assert attend.local.deterministic
    for tokens in (-3, 2.5, "9"):
        with pytest.raises(ValueError, match=f"num_tokens must be 0 or more.*: got {tokens!r}"):
            context_parallel(None, num_tokens=tokens)  # type: ignore[arg-type]
    for seconds in (0.0, -1.0, math.nan, math.inf, "9", None):
        with pytest.raises(ValueError, match="timeout must be above 0 seconds and finite"):
            context_parallel(None, timeout=seconds)  # type: ignore[arg-type]
    for across in ("ulysses", ["ring"], None):
        expected = re.escape(f"one of ring, double_ring, gather, helper for hybrid: got {across!r}")
        with pytest.raises(ValueError, match=expected):
            context_parallel(None, strategy="hybrid", across=across)  # type: ignore[arg-type]


def test_without_a_group_it_is_one_rank() -> None:
    attend = context_parallel(None)
    q = torch.randn(1, 4, 9, 8, requires_grad=True)
    out, lse = attend(q, q, q, causal=True, return_lse=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(out, expected)
    assert lse.shape == (1, 4, 9)
    with pytest.raises(ValueError, match="dropout is a probability"):
        attend(q, q, q, dropout=1.5)
    with pytest.raises(ValueError, match="scale must be a finite number"):
        attend(q, q, q, scale=float("nan"))
    with pytest.raises(ValueError, match="this mask covers 4 queries"):
        attend(q, q, q, mask=documents([4]))
    with pytest.raises(ValueError, match="queries and keys are the same tokens: got 9 and 5"):
        attend(q, q[:, :, :5], q[:, :, :5])
    with pytest.raises(ValueError, match=r"splits 8 tokens into shards of \(8,\): got shards of \(9,\)"):
        context_parallel(None, num_tokens=8)(q, q, q)
    with pytest.raises(ValueError, match="a layout assigns 9 tokens to 1 ranks"):
        context_parallel(None, layout=lambda num_tokens, num_ranks: None)(q, q, q)  # type: ignore[arg-type, return-value]


def place_by_rank(num_tokens: int, num_ranks: int) -> Placement:
    """A layout that differs between ranks, with parts of equal size."""
    halves = [(range(num_tokens // 2),), (range(num_tokens // 2, num_tokens),)]
    return Placement(num_tokens, tuple(halves[:: -1 if dist.get_rank() else 1]))


def disagree_on_the_layout(strategy: str) -> str:
    x = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="returned different placements on different ranks") as caught:
        context_parallel(dist.group.WORLD, strategy=strategy, layout=place_by_rank, timeout=5)(x, x, x)
    return str(caught.value)


@pytest.mark.timeout(60)
def test_ranks_that_place_tokens_differently_are_told() -> None:
    with Ranks(2, threads=1, timeout=20) as ranks:
        for strategy in ("ring", "ulysses"):
            assert all(ranks.run(disagree_on_the_layout, strategy, timeout=40))
