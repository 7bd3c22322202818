"""Every strategy runs on a process group with NCCL's rules, and posts the batches that the proof assumes."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashspan.context import LAYOUTS, STRATEGIES
from flashspan.context import transport as transports
from flashspan.context.core import Scheduled
from flashspan.context.order import programs
from flashspan.context.strategy import context_parallel
from flashspan.generate import Sampling, Split, decode
from flashspan.launch import Ranks
from tests.context.cases import MASKS, Case, attention_of, errors, group_of, new_group, run_cases
from tests.context.nccl_like import NAME, NcclLike
from tests.generate.test_generate import CONFIGS, draw_prompt, make

OnRanks = Callable[..., list[Any]]
TWO_GROUPS = {"two_groups": True}


@pytest.fixture(scope="module")
def on_four() -> Iterator[OnRanks]:
    with Ranks(4, threads=1, timeout=45) as pool:
        yield pool.run


def run_delayed(cases: list[Case], seed: int) -> list[Any]:
    NcclLike.seed = seed
    return run_cases(cases)


def check(on_ranks: OnRanks, cases: list[Case], seed: int) -> None:
    answers = on_ranks(run_delayed, cases, seed, timeout=110.0)
    for index, case in enumerate(cases):
        found = errors(case, [answer[index] for answer in answers])
        assert max(found[:2]) <= 1e-5, (seed, case, found)
        assert max(found[2:]) <= 1e-4, (seed, case, found)


def nccl(ranks: int, strategy: str, layout: str = "zigzag", mask: str = "causal", **rest: Any) -> list[Case]:
    """The case with one group and, if the strategy may use a second group, with two."""
    options = rest.pop("options", {})
    made = [Case(ranks, strategy, layout, mask, network=NAME, options=options, **rest)]
    if strategy == "double_ring":
        made.append(Case(ranks, strategy, layout, mask, network=NAME, options={**options, **TWO_GROUPS}, **rest))
    return made


def test_every_strategy_matches_one_device(on_four: OnRanks) -> None:
    """Forward and backward, with random delays, each strategy with one layout."""
    layouts = itertools.cycle(LAYOUTS)
    check(on_four, [case for strategy in STRATEGIES for case in nccl(4, strategy, next(layouts))], seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_strategy_layout_and_mask_matches_one_device(on_ranks: OnRanks, strategy: str, ranks: int) -> None:
    if strategy == "hybrid" and ranks % 2:
        pytest.skip("a 2-D mesh with 2 columns has an even number of ranks")
    for layout in LAYOUTS:
        check(on_ranks, [case for mask in MASKS for case in nccl(ranks, strategy, layout, mask)], seed=ranks)


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(20))
def test_random_calls_match_one_device(on_ranks: OnRanks, seed: int) -> None:
    """Any strategy, layout, mask, length, heads and chunks of heads, with random delays."""
    chance = random.Random(seed)
    for _ in range(5):
        strategy = chance.choice(STRATEGIES)
        ranks = chance.choice([2, 4, 8] if strategy == "hybrid" else [2, 3, 4, 5, 8])
        kv_heads = chance.choice([1, 2, 3])
        rest: dict[str, Any] = {
            "T": chance.randint(0, 90),
            "kv_heads": kv_heads,
            "heads": kv_heads * chance.choice([1, 2]),
        }
        if strategy != "ulysses":
            rest["options"] = {"head_chunks": chance.choice([1, 2, 3])}
        cases = nccl(ranks, strategy, chance.choice(sorted(LAYOUTS)), chance.choice(MASKS), **rest)
        check(on_ranks, cases, seed=chance.randrange(10**6))


SCHEDULED = [case for strategy in ("ring", "double_ring", "gather", "helper", "hybrid") for case in nccl(4, strategy)]


def compare_posts(cases: list[Case]) -> list[str]:
    """On a rank: the cases whose batches differ from those that the proof assumes."""
    wrong = []
    for case in cases:
        attend = attention_of(case)
        assert attend is not None
        groups = {"group": attend.outer.group}
        if case.options.get("two_groups"):
            groups["slow group"] = attend.outer.by_group._slow
        began = {name: len(group.batches) for name, group in groups.items()}
        q, k, v, dout, _ = (attend.shard(x, 2) for x in case.inputs())
        attend(q.requires_grad_(), k, v, causal=True).backward(dout)
        (core,) = attend._cores.values()
        core = core if isinstance(core, Scheduled) else core.inner
        passes = [programs(s, slow_group=len(groups) > 1) for s in (core.plan.forward, core.plan.backward)]
        batches = [batch for pass_ in passes for stage in pass_[attend.outer.rank] for batch in stage.batches]
        for name, group in groups.items():
            posted = [[(m.src, m.dst) for m in batch] for batch in group.batches[began[name] :]]
            proved = [[(m.src, m.dst) for m in batch.messages] for batch in batches if batch.communicator == name]
            if posted != proved or not proved:
                wrong.append(f"{case.id} on {name}: {posted} and not {proved}")
    return wrong


def test_what_is_posted_is_what_is_proved(on_four: OnRanks) -> None:
    assert on_four(compare_posts, SCHEDULED) == [[]] * 4


def continue_prompt(length: int) -> bool:
    """On a rank: whether a split context continues a prompt as one device does."""
    group = group_of(4, "", NAME)
    model, prompt = make(CONFIGS["llama-3"]), draw_prompt(2, length)
    contexts = None, Split(context_parallel(group, timeout=20), group)
    want, got = (list(decode(model, prompt, 8, sampling=Sampling(0), context=context)) for context in contexts)
    return all(map(torch.equal, want, got))


def test_a_split_context_gives_the_tokens_of_one_device(on_four: OnRanks) -> None:
    assert on_four(continue_prompt, 21) == [True] * 4


def post_in_another_order(me: int) -> str:
    """The error of a rank of `helper` if rank 1 posts a step's messages in reverse order."""
    group = fresh(num_ranks=2)
    if group is None:
        return ""
    attend = context_parallel(group, strategy="helper")
    q, k, v = (attend.shard(x, 2) for x in Case(2).inputs()[:3])
    right = transports.in_batches
    if me == 1:
        transports.in_batches = lambda messages: tuple(part[::-1] for part in right(messages))
    try:
        attend(q, k, v)
    except transports.ExchangeError as error:
        return str(error)
    finally:
        transports.in_batches = right
    return ""


def test_a_rank_that_posts_in_another_order_is_found(on_four: OnRanks) -> None:
    """The keys and queries of a step would be swapped on one rank."""
    said = on_four(call, post_in_another_order)
    assert all(f"bytes on rank {rank} and" in said[rank] for rank in range(2)), said


# The process group itself: if it did not enforce NCCL's rules, the tests above would prove little.


def fresh(timeout: float = 20.0, num_ranks: int = 4) -> Any:
    """A connected group of the first ranks with this timeout; None on other ranks."""
    NcclLike.seed = None
    group = new_group(list(range(num_ranks)), NAME)
    if dist.get_rank() >= num_ranks:
        return None
    dist.all_reduce(torch.zeros(1), group=group)
    group.timeout = timedelta(seconds=timeout)
    return group


def batch(group: Any, *messages: tuple[int, int, torch.Tensor], tag: int = 0) -> list[dist.Work]:
    me = dist.get_rank()
    return dist.batch_isend_irecv(
        [
            dist.P2POp(*((dist.isend, x, dst) if src == me else (dist.irecv, x, src)), group, tag)
            for src, dst, x in messages
        ]
    )


def outcome(works: list[dist.Work]) -> str:
    """The text of the first error; empty if there is none."""
    try:
        for work in works:
            work.wait(timedelta(seconds=20))
    except RuntimeError as error:
        return str(error)
    return ""


def full(value: int, size: int = 4) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def pair_in_order(me: int) -> Any:
    """Rank 0 sends 1, then 2 to rank 1, with tags in the opposite order."""
    group = fresh()
    if me > 1:
        return [], "", []
    xs = [full(1), full(2)] if me == 0 else [full(0), full(0)]
    works = [batch(group, (0, 1, x), tag=tag) for x, tag in zip(xs, (5, 6) if me == 0 else (6, 5), strict=True)]
    held = [int(x[0]) for x in xs] if me == 0 else []
    return [len(work) for work in works], outcome([*works[0], *works[1]]), held or [int(x[0]) for x in xs]


def one_work_for_all(me: int) -> Any:
    group = fresh()
    peers = [rank for rank in range(4) if rank != me]
    xs = [(me, peer, full(me)) for peer in peers] + [(peer, me, full(0)) for peer in peers]
    works = batch(group, *xs)
    return len(works), outcome(works), [int(x[0]) for _, _, x in xs[len(peers) :]] == peers


def other_sizes(me: int) -> Any:
    group = fresh()
    return outcome(batch(group, (0, 1, full(0, 4 + me)))) if me < 2 else ""


def no_receive(me: int) -> Any:
    group = fresh(0.5)
    return outcome(batch(group, (0, 1, full(0)))) if me == 0 else ""


def a_circle(me: int) -> Any:
    """Ranks in a ring whose batches wait for each other in a circle."""
    group = fresh(0.5)
    works = batch(group, (me, (me + 1) % 4, full(0))) + batch(group, ((me - 1) % 4, me, full(0)))
    return outcome(works)


def late_batch(me: int) -> Any:
    """Rank 0's second batch, for which rank 1 is ready, ends after its first, for which rank 2 is late."""
    group = fresh()
    if me == 2:
        time.sleep(0.5)
        return outcome(batch(group, (0, 2, full(0))))
    if me == 1:
        return outcome(batch(group, (0, 1, full(0))))
    if me == 3:
        return ""
    first, second = batch(group, (0, 2, full(0))), batch(group, (0, 1, full(0)))
    start = time.monotonic()
    return outcome(second), first[0].is_completed(), time.monotonic() - start > 0.3


def early_write(me: int) -> Any:
    """A send buffer that is written to before its wait."""
    group = fresh(20.0 if me == 0 else 0.5)
    x = full(7)
    if me == 1:
        time.sleep(0.3)
    works = batch(group, (0, 1, x)) if me < 2 else []
    if me == 0:
        x.zero_()
    return outcome(works) if me == 0 else ""


def out_of_place(me: int) -> Any:
    """A message outside of a batch, and a batch before the group is connected."""
    group, unconnected = fresh(), new_group([0, 1, 2, 3], NAME)
    said = []
    peer = (me + 1) % 4
    for attempt in (lambda: dist.isend(full(0), peer, group), lambda: batch(unconnected, (me, peer, full(0)))):
        try:
            attempt()
        except RuntimeError as error:
            said.append(str(error))
    return said


def serves_small_collectives(me: int) -> Any:
    return transports.GroupTransport(fresh()).agree([me])


def call(fn: Callable[[int], Any]) -> Any:
    return fn(dist.get_rank())


def test_messages_match_in_order_and_not_by_tag(on_four: OnRanks) -> None:
    sent, received, *_ = on_four(call, pair_in_order)
    assert sent == received == ([1, 1], "", [1, 2])


def test_a_batch_has_one_work(on_four: OnRanks) -> None:
    assert on_four(call, one_work_for_all) == [(1, "", True)] * 4


def test_a_batch_ends_after_those_before_it(on_four: OnRanks) -> None:
    assert on_four(call, late_batch) == [("", True, True), "", "", ""]


def test_an_order_that_hangs_or_fails_on_nccl_is_an_error(on_four: OnRanks) -> None:
    first, second, *_ = on_four(call, other_sizes)
    assert "has 4 bytes on rank 0 and 5 on the other" in first
    assert "has 5 bytes on rank 1 and 4 on the other" in second
    assert "within 0.5 s rank 1 began no batch with the other end" in on_four(call, no_receive)[0]
    for said in on_four(call, a_circle):
        assert "message 0 from rank" in said or "the group is broken" in said, said
    assert "was written to on rank 0 before its wait" in on_four(call, early_write)[0]
    for said in on_four(call, out_of_place):
        assert "posted in a batch" in said[0]
        assert "first call on a group is a collective" in said[1]


def test_small_collectives_live_where_the_group_serves(on_four: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device comes from the group's config: without a chosen backend, the backend is "undefined", even on GPUs."""
    assert on_four(call, serves_small_collectives) == [[[0], [1], [2], [3]]] * 4
    transport = transports.GroupTransport(None)
    assert transport.device.type == "cpu"
    transport.group = object()  # type: ignore[assignment]
    for served, device in (("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo", "cpu")):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, served=served: served)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        assert transport.device.type == device
