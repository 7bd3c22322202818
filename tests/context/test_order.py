"""NCCL can run every strategy. Programs that it cannot run are detected, with the reason."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspan.context import generators
from flashspan.context.layout import LAYOUTS, place
from flashspan.context.order import AllToAllMessage, Batch, Endpoints, Stage, check_order, programs, prove
from flashspan.context.schedule import Schedule, ScheduleError, reverse
from flashspan.context.verify import verify
from flashspan.context.visibility import Visibility
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Mask
from tests.context.cases import make_mask

Programs = list[list[Stage]]


def schedule_of(name: str, num_ranks: int, layout: str = "zigzag", mask: Mask = CAUSAL) -> Schedule:
    visibility = Visibility(place(layout, 16 * num_ranks, num_ranks), mask)
    inner = next(n for n in (8, 4, 2, 1) if num_ranks % n == 0)
    options = {"sizes": (num_ranks // inner, inner)} if name == "double_ring" else {}
    return generators.GENERATORS[name](visibility, **options)


@pytest.mark.parametrize("name", sorted(generators.GENERATORS))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 64])
def test_nccl_can_run_every_strategy(name: str, num_ranks: int) -> None:
    """Forward and backward, with and without a group for slow transfers; 10 s at the most."""
    schedule = schedule_of(name, num_ranks)
    start = time.process_time()
    check_order(schedule)
    check_order(reverse(schedule))
    assert time.process_time() - start < 10


@pytest.mark.parametrize("name", sorted(generators.GENERATORS))
def test_nccl_can_run_chunks_of_heads(name: str) -> None:
    schedule = generators.in_chunks(schedule_of(name, 6), 3)
    check_order(schedule)
    check_order(reverse(schedule))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("name", sorted(generators.GENERATORS))
def test_nccl_can_run_every_strategy_on_any_number_of_ranks(name: str, layout: str, mask: str) -> None:
    for num_ranks in range(1, 65):
        schedule = schedule_of(name, num_ranks, layout, make_mask(mask, 16 * num_ranks))
        check_order(schedule)
        check_order(reverse(schedule))


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("ring", 1, 64), ("double_ring", 8, 8), ("double_ring", 4, 3), ("helper", 4, 3), ("gather", 4, 3)],
)
def test_nccl_can_run_ulysses_and_hybrids(name: str, rows: int, columns: int) -> None:
    schedule = schedule_of(name, rows)
    check_order(schedule, columns)
    check_order(reverse(schedule), columns)
    assert len(programs(schedule, columns)) == rows * columns


def stages(*parts: tuple[Sequence[Endpoints], Sequence[Batch]]) -> list[Stage]:
    return [Stage(waits, batches) for waits, batches in parts]


def on(rank: int, *messages: Endpoints, group: str = "group") -> list[Batch]:
    return [Batch(group, rank, messages)]


def changed(programs: Programs, rank: int, number: int, messages: Sequence[Endpoints], waits: bool = True) -> Programs:
    """The programs, with these messages in the first batch of a rank's step, and no other waits."""
    stage = programs[rank][number]
    program = list(programs[rank])
    program[number] = stage._replace(batches=[replace(stage.batches[0], messages=messages), *stage.batches[1:]])
    lost = set(stage.batches[0].messages) - set(messages)
    if waits:
        program = [stage._replace(waits=[m for m in stage.waits if m not in lost]) for stage in program]
    return [*programs[:rank], program, *programs[rank + 1 :]]


def test_swapped_posts_are_reported() -> None:
    """A helper of two ranks receives keys and queries together: in the other order they are swapped."""
    good = programs(schedule_of("helper", 2, mask=EVERYTHING))
    (batch,) = good[0][0].batches
    first, second, *rest = [m for m in batch.messages if m.dst == 0]
    assert not rest
    others = [m for m in batch.messages if m.dst != 0]
    prove(changed(good, 0, 0, [*others, first, second]))  # the order of sends relative to receives does not matter
    with pytest.raises(ScheduleError) as error:
        prove(changed(good, 0, 0, [*others, second, first]))
    found = f"message 0 from rank 1 to rank 0: rank 1 sends {first}, rank 0 receives {second}"
    assert found in str(error.value)


@pytest.mark.parametrize("name", sorted(generators.GENERATORS))
def test_a_missing_receive_or_send_is_reported(name: str) -> None:
    good = programs(reverse(schedule_of(name, 4)))
    (batch,) = good[3][0].batches
    for lost in batch.messages:
        peer, ends = lost.src + lost.dst - 3, ("sends", "receive") if lost.dst == 3 else ("receives", "send")
        with pytest.raises(ScheduleError, match=f"rank {peer} {ends[0]} {lost}, which rank 3 does not {ends[1]}"):
            prove(changed(good, 3, 0, [m for m in batch.messages if m is not lost]))


def test_a_message_on_another_communicator_is_reported() -> None:
    message = AllToAllMessage(0, 1, "keys")
    with pytest.raises(ScheduleError, match=r"on group, rank 0 sends keys.*, which rank 1 does not receive"):
        prove([stages(((), on(0, message)), ([message], ())), stages(((), on(1, message, group="b")), ([message], ()))])


def test_messages_are_posted_and_awaited_once_by_their_ends() -> None:
    message = AllToAllMessage(0, 1, "keys")
    post, wait = ((), on(0, message)), ([message], ())
    for program, rule in (
        (stages(post), "never waits"),
        (stages(post, wait, wait), "which it does not post"),
        (stages(post, post, wait), "a second time"),
        (stages(((), on(2, message)), wait), "which this rank neither sends nor receives"),
    ):
        with pytest.raises(ScheduleError, match=rule):
            prove([program])


def test_a_cycle_of_ranks_that_wait_before_they_post_is_named() -> None:
    forth, back = AllToAllMessage(0, 1, "forth"), AllToAllMessage(1, 0, "back")
    left = stages(((), on(0, forth)), ([forth], on(0, back)), ([back], ()))
    right = stages(((), on(1, back)), ([back], on(1, forth)), ([forth], ()))
    with pytest.raises(ScheduleError) as error:
        prove([left, right])
    assert "cycle" in str(error.value)
    for part in ("rank 0's step 1", "rank 1's step 1", "rank 0's batch of step 0 on group"):
        assert part in str(error.value)


def test_a_cycle_of_batches_alone_is_found() -> None:
    """Three ranks post everything before they wait, but each in a different order."""
    ring = [AllToAllMessage(rank, (rank + 1) % 3, "keys") for rank in range(3)]
    alone = [
        stages(((), on(rank, ring[rank])), ((), on(rank, ring[rank - 1])), ([ring[rank], ring[rank - 1]], ()))
        for rank in range(3)
    ]
    with pytest.raises(ScheduleError, match="cycle"):
        prove(alone)
    prove([stages(((), on(r, ring[r], ring[r - 1])), ([ring[r], ring[r - 1]], ())) for r in range(3)])


def test_a_cycle_over_two_communicators_is_found() -> None:
    keys, sums = AllToAllMessage(0, 1, "keys"), AllToAllMessage(0, 1, "sums")
    one = [
        stages(((), on(0, keys)), ([keys], on(0, sums, group="slow")), ([sums], ())),
        stages(((), on(1, sums, group="slow")), ([sums], on(1, keys)), ([keys], ())),
    ]
    with pytest.raises(ScheduleError, match="cycle"):
        prove(one)
    # Without the waits in between, batches on two communicators may run in any order, but not those on one.
    for group in ("slow", "group"):
        two = [
            stages(((), on(0, keys)), ((), on(0, sums, group=group)), ([keys, sums], ())),
            stages(((), on(1, sums, group=group)), ((), on(1, keys)), ([keys, sums], ())),
        ]
        if group == "slow":
            prove(two)
        else:
            with pytest.raises(ScheduleError, match=r"rank 0 sends keys.*rank 1 receives sums"):
                prove(two)


def test_the_proof_of_a_schedule_includes_the_order() -> None:
    visibility = Visibility(place("zigzag", 64, 4), EVERYTHING)
    schedule = generators.ring(visibility)
    ranks = list(schedule.programs)
    step = ranks[1][0]
    ranks[1] = (step._replace(posts=step.posts[1:]), *ranks[1][1:])
    vars(schedule)["programs"] = tuple(ranks)
    with pytest.raises(ScheduleError, match="rank 1 waits in step 1 for"):
        verify(schedule, visibility)


def can_run(programs: Programs) -> bool:
    """Whether these programs, whose order matches, end under NCCL's rules. Decided by running them.

    The order in which batches end does not matter, because an event that is possible now stays possible.
    """
    queues: dict[tuple[int, str], list[Batch]] = defaultdict(list)
    places, ended = [0] * len(programs), set()

    def active(message: Endpoints, end: int) -> bool:
        heads = [queue[0] for queue in queues.values() if queue and queue[0].rank == end]
        return (message, end) in ended or any(message in batch.messages for batch in heads)

    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while places[rank] < len(program) and all((m, rank) in ended for m in program[places[rank]].waits):
                for batch in program[places[rank]].batches:
                    queues[rank, batch.communicator].append(batch)
                places[rank] += 1
                progress = True
        for queue in queues.values():
            if queue and all(active(m, m.src) and active(m, m.dst) for m in queue[0].messages):
                batch = queue.pop(0)
                ended.update((m, batch.rank) for m in batch.messages)
                progress = True
    return all(place == len(program) for place, program in zip(places, programs, strict=True))


@st.composite
def any_programs(draw: st.DrawFn) -> Programs:
    """Programs of up to 4 ranks with up to 8 messages in any batches and steps, on two communicators."""
    num_ranks = draw(st.integers(2, 4))
    made: Programs = [[] for _ in range(num_ranks)]
    posted: list[list[Endpoints]] = [[] for _ in range(num_ranks)]
    messages = []
    for number in range(draw(st.integers(1, 8))):
        src, away = draw(st.integers(0, num_ranks - 1)), draw(st.integers(1, num_ranks - 1))
        messages.append(
            (AllToAllMessage(src, (src + away) % num_ranks, f"message {number}"), draw(st.sampled_from("ab")))
        )
    for rank in range(num_ranks):
        mine = [(m, group) for m, group in messages if rank in (m.src, m.dst)]
        mine = draw(st.permutations(mine)) if draw(st.booleans()) else mine
        while mine:
            count = draw(st.integers(1, len(mine)))
            batches = [
                Batch(group, rank, part)
                for group in "ab"
                if (part := [m for m, other in mine[:count] if other == group])
            ]
            waits = [m for m in posted[rank] if draw(st.booleans())]
            posted[rank] = [m for m in posted[rank] if m not in waits] + [m for m, _ in mine[:count]]
            made[rank].append(Stage(waits, batches))
            mine = mine[count:]
        made[rank].append(Stage(posted[rank], ()))
    return made


def fault(made: Programs) -> str:
    """The fault that the proof reports."""
    try:
        prove(made)
    except ScheduleError as error:
        return str(error)
    return ""


@given(any_programs())
@settings(max_examples=200, deadline=None)
def test_the_proof_agrees_with_a_run_of_the_programs(made: Programs) -> None:
    found = fault(made)
    if "cycle" in found:
        assert not can_run(made), found
    elif not found:
        assert can_run(made)
