"""The executor without processes: the passes of all ranks, taken in turn over transports in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flashspan.context import generators
from flashspan.context.bundle import BufferPool
from flashspan.context.execute import Call, Plan, simulate
from flashspan.context.layout import LAYOUTS, place
from flashspan.context.passes import BackwardPass, ForwardPass
from flashspan.context.schedule import Schedule, Shape, bytes_sent
from flashspan.context.transport import LocalTransport, LocalTransports, Message
from flashspan.context.visibility import Visibility
from flashspan.kernels import reference, tiled
from flashspan.kernels.contract import Carry, LocalAttention, Problem
from flashspan.kernels.delta import row_delta
from flashspan.kernels.masks import CAUSAL, Mask
from flashspan.kernels.merge import merge
from tests.context.cases import MASKS, make_mask

SCALE = 0.3


def run_all(
    schedule: Schedule, visibility: Visibility, xs: list[Tensor], local: LocalAttention = reference
) -> tuple[list[Tensor], list[int]]:
    """out, dq, dk, dv of all ranks joined, and the bytes that each rank sent."""
    placement, num = visibility.placement, visibility.num_ranks
    plan = Plan(placement, visibility.mask, schedule, xs[1].shape[1])
    transports = LocalTransports(num).transports
    q, k, v, dout = ([placement.shard(x, 2, rank) for rank in range(num)] for x in xs)
    calls = [Call(*parts, SCALE) for parts in zip(q, k, v, strict=True)]
    ranks = range(num)
    carries = simulate([ForwardPass(plan, transports[r], local, calls[r]) for r in ranks])
    deltas = [row_delta(dout[r], carries[r].out) for r in ranks]
    passes = [BackwardPass(plan, transports[r], local, calls[r], dout[r], carries[r].lse, deltas[r]) for r in ranks]
    grads = simulate(passes)
    assert not any(pass_.copies or pass_.totals for pass_ in passes), "a pass keeps what it is done with"
    parts = zip(*((carry.out, *grad) for carry, grad in zip(carries, grads, strict=True)), strict=True)
    return [placement.unshard(part, 2) for part in parts], [transport.bytes_sent for transport in transports]


def one_device(mask: Mask, xs: list[Tensor]) -> list[Tensor]:
    q, k, v, dout = (x.double() for x in xs)
    out, lse = reference.forward(q, k, v, Problem(mask, SCALE))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    reference.backward(
        dout, q, k, v, lse, row_delta(dout, out), Problem(mask, SCALE), dq=dq, dk=dk, dv=dv, accumulate=False
    )
    return [out, dq, dk, dv]


def make(T: int, heads: int = 4, kv_heads: int = 2, D: int = 8, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, h, T, D, generator=generator) for h in (heads, kv_heads, kv_heads, heads)]


def relative(mine: Tensor, exact: Tensor) -> float:
    return float((mine - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("name", "many_ranks"),
    [
        ("ring", 16),
        ("helper", 16),
        *(pytest.param(name, num, marks=pytest.mark.slow) for name, num in (("ring", 64), ("helper", 24))),
    ],
)
def test_many_ranks_are_as_exact_as_one(name: str, many_ranks: int) -> None:
    """In float32: forward <= 1e-5 and gradients <= 1e-4, and within 1.5x of one rank's error."""
    xs, mask = make(300), CAUSAL
    exact = one_device(mask, xs)
    found = {}
    for num in (1, many_ranks):
        visibility = Visibility(place("zigzag", 300, num), mask)
        mine, _ = run_all(generators.GENERATORS[name](visibility), visibility, xs)
        found[num] = [relative(a, b) for a, b in zip(mine, exact, strict=True)]
    assert found[many_ranks][0] <= 1e-5
    assert max(found[many_ranks][1:]) <= 1e-4
    for one, many in zip(found[1], found[many_ranks], strict=True):
        assert many <= 1.5 * one


@pytest.mark.parametrize(
    ("name", "mask"),
    [  # in CI: strategies with their own order of tiles, and the most used of the others
        pytest.param(name, mask, marks=() if name in ("ring", "helper") or "causal" in mask else pytest.mark.slow)
        for name in sorted(generators.GENERATORS)
        for mask in MASKS
    ],
)
def test_any_mask_over_simulated_ranks(name: str, mask: str) -> None:
    """Also, the bytes sent are those of the schedule."""
    xs = make(53)
    for layout in LAYOUTS:
        visibility = Visibility(place(layout, 53, 6), make_mask(mask, 53))
        sizes = {"sizes": (2, 3)} if name == "double_ring" else {}
        schedule = generators.in_chunks(generators.GENERATORS[name](visibility, **sizes), 2)
        mine, sent = run_all(schedule, visibility, xs)
        for a, b in zip(mine, one_device(visibility.mask, xs), strict=True):
            assert relative(a, b) <= 2e-6, (layout, mask)
        shape = Shape(num_batch=2, num_heads=4, num_kv_heads=2, head_dim=8, itemsize=4)
        plan = Plan(visibility.placement, visibility.mask, schedule)
        totals = zip(bytes_sent(plan.forward, shape), bytes_sent(plan.backward, shape), strict=True)
        assert sent == [forward + backward for forward, backward in totals]


def test_buffers_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of chunks of heads, a rank allocates a few buffers and then reuses them."""
    made: list[int] = []
    take = BufferPool.take

    def count(pool: BufferPool, size: int) -> Tensor:
        kept = len(pool._free)
        buffer = take(pool, size)
        if len(pool._free) == kept:
            made.append(size)
        return buffer

    monkeypatch.setattr(BufferPool, "take", count)
    visibility = Visibility(place("zigzag", 64, 8), CAUSAL)
    run_all(generators.in_chunks(generators.ring(visibility), 4), visibility, make(64, 8, 4))
    chunk = 2 * 2 * 8 * 8 * 4  # B, keys and values, a shard's tokens, D, float32; of one head
    assert max(made) == chunk
    # Forward: two copies of keys and a packed buffer. Backward: the same, and the gradients of three copies.
    assert sum(made) <= 8 * 10 * chunk


@pytest.mark.parametrize("name", sorted(generators.GENERATORS))
def test_a_buffer_in_the_pool_is_not_in_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So overwriting it in the pool changes no result."""
    put = BufferPool.put

    def ruin(pool: BufferPool, buffer: Tensor) -> None:
        put(pool, buffer)
        pointers = [storage.data_ptr() for storage in pool._free]
        assert len(set(pointers)) == len(pointers), "a buffer was put back twice"
        torch.empty(0, dtype=torch.uint8).set_(pool._free[-1]).fill_(255)  # NaN, in every dtype

    monkeypatch.setattr(BufferPool, "put", ruin)
    xs = make(53)
    for layout in LAYOUTS:
        visibility = Visibility(place(layout, 53, 4), CAUSAL)
        sizes = {"sizes": (2, 2)} if name == "double_ring" else {}
        schedule = generators.in_chunks(generators.GENERATORS[name](visibility, **sizes), 2)
        mine, _ = run_all(schedule, visibility, xs)
        for a, b in zip(mine, one_device(CAUSAL, xs), strict=True):
            assert relative(a, b) <= 2e-6, layout


def test_one_rank_is_one_call() -> None:
    """World size 1 uses the same code: one tile, no transfer, and gradients written in their final dtype."""
    visibility = Visibility(place("zigzag", 40, 1), CAUSAL)
    schedule = generators.ring(visibility)
    assert len(schedule.tiles) == 1
    assert not schedule.transfers
    plan = Plan(visibility.placement, visibility.mask, schedule)
    (transport,) = LocalTransports(1).transports
    q, k, v, dout = (x.bfloat16() for x in make(40))
    call = Call(q, k, v, SCALE)
    (carry,) = simulate([ForwardPass(plan, transport, tiled, call)])
    (grads,) = simulate([BackwardPass(plan, transport, tiled, call, dout, carry.lse, row_delta(dout, carry.out))])
    assert all(x.dtype == torch.bfloat16 for x in grads)
    alone = tiled.forward(q, k, v, Problem(CAUSAL, SCALE))
    assert torch.equal(carry.out, alone.out)


def test_one_launch_per_step_whatever_the_layout() -> None:
    """A rank computes each step's tile in one call. Off the diagonal of a zigzag ring, nothing is masked."""
    visibility = Visibility(place("zigzag", 64, 4), CAUSAL)
    schedule = generators.ring(visibility)
    plan = Plan(visibility.placement, visibility.mask, schedule)
    for rank in range(4):
        steps = schedule.program(rank)
        assert [len(step.tiles) for step in steps] == [1] * 4
        masks = [plan.tile_mask(step.tiles[0], step.tiles[0].k_rows, torch.device("cpu")) for step in steps]
        assert [str(mask) for mask in masks] == ["Band(lo=None, hi=0)"] + ["Band(lo=None, hi=None)"] * 3


def test_transfers_are_in_flight_while_a_step_computes() -> None:
    """The next step's transfers are posted before this step's tile, and awaited after it."""
    events: list[str] = []

    class Transport(LocalTransport):
        def post(self, messages: Sequence[Message]) -> None:
            events.extend(f"post {p.key.owner}" for p in messages if p.dst == self.rank)
            super().post(messages)

        def wait(self, message: Message) -> None:
            if message.dst == self.rank:
                events.append(f"wait {message.key.owner}")
            super().wait(message)

    class Local:
        backward = staticmethod(reference.backward)

        def forward(self, *args: Any, **rest: Any) -> Carry:
            events.append("compute")
            return reference.forward(*args, **rest)

    visibility = Visibility(place("zigzag", 24, 3), CAUSAL)
    plan = Plan(visibility.placement, CAUSAL, generators.ring(visibility))
    shared = LocalTransports(3)
    transports: list[LocalTransport] = [Transport(shared, 0, 3), *shared.transports[1:]]
    parts = [[visibility.placement.shard(x, 2, rank) for x in make(24)[:3]] for rank in range(3)]
    locals_: list[LocalAttention] = [Local(), reference, reference]
    simulate([ForwardPass(plan, transports[r], locals_[r], Call(*parts[r], SCALE)) for r in range(3)])
    assert events == ["post 2", "compute", "wait 2", "post 1", "compute", "wait 1", "compute"]


def test_views_of_a_fused_projection_need_no_copy_by_the_caller() -> None:
    fused = torch.randn(2, 53, 3, 4, 8)  # [B, T, qkv, H, D]
    q, k, v = fused.permute(2, 0, 3, 1, 4)
    visibility = Visibility(place("contiguous", 53, 4), CAUSAL)
    plan = Plan(visibility.placement, CAUSAL, generators.ring(visibility))
    transports = LocalTransports(4).transports
    runs = [run for (run,) in visibility.placement.ranges]
    calls = [Call(*(x[:, :, run.start : run.stop] for x in (q, k, v)), SCALE) for run in runs]
    assert not calls[0].q.is_contiguous()
    carries = simulate([ForwardPass(plan, transports[r], reference, calls[r]) for r in range(4)])
    exact = reference.forward(q.double(), k.double(), v.double(), Problem(CAUSAL, SCALE)).out
    assert relative(torch.cat([carry.out for carry in carries], 2), exact) < 1e-6


def test_nan_in_hidden_keys_reaches_no_result() -> None:
    xs = make(48)
    xs[1][:, :, 40:], xs[2][:, :, 40:] = torch.nan, torch.nan  # keys that only the last 8 queries see
    visibility = Visibility(place("zigzag", 48, 4), CAUSAL)
    (out, *_), _ = run_all(generators.ring(visibility), visibility, xs)
    assert out[:, :, :40].isfinite().all()
    assert out[:, :, 40:].isnan().all()


def test_merging_is_exact_and_survives_empty_rows() -> None:
    """For rows with keys in neither part, in one part, and in both."""
    T, D = 4, 8
    q, k, v = (torch.randn(1, 1, n, D, dtype=torch.float64) for n in (T, 6, 6))
    blank = Carry(torch.zeros(1, 1, T, D).double(), torch.full((1, 1, T), -torch.inf).double())
    halves = []
    for part in (slice(0, 3), slice(3, 6)):
        out, lse = reference.forward(q, k[:, :, part], v[:, :, part], Problem(make_mask("full", T), SCALE))
        halves.append(Carry(out.clone(), lse.clone()))
    whole = reference.forward(q, k, v, Problem(make_mask("full", T), SCALE))
    total = Carry(blank.out.clone(), blank.lse.clone())
    merge(total, blank)
    assert torch.equal(total.out, blank.out)
    assert torch.equal(total.lse, blank.lse)
    for half in halves:
        merge(total, half)
        merge(total, blank)
    assert relative(total.out, whole.out) < 1e-15
    assert relative(total.lse, whole.lse) < 1e-15
