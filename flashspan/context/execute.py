"""The one executor: runs any schedule, forward and backward, over any transport, with any implementation of attention.

A pass is a generator that yields after each step. One process of a group runs its own to the end; a simulation steps
the passes of all ranks in turn (`simulate`). Everything that is summed, carries and gradients, stays float32 (float64
where the inputs are) until it is complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashspan.context.bundle import BufferPool, Bundle, allocate
from flashspan.context.layout import Placement, cut
from flashspan.context.runs import Runs
from flashspan.context.schedule import Item, Schedule, Shape, Tile, Transfer, head_chunk, reverse
from flashspan.context.slots import SlotPlan, assign_slots, receives
from flashspan.context.transport import Message, Transport
from flashspan.kernels.blocks import Blocks
from flashspan.kernels.contract import Dropout, LocalAttention
from flashspan.kernels.masks import Mask


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule bound to a placement and a mask: all of a call that does not depend on its tensors."""

    placement: Placement
    mask: Mask
    forward: Schedule
    num_kv_heads: int = 1  # of a call; only a mask that differs from head to head needs to know
    call: int = 0  # the same on all ranks that make the same call

    @cached_property
    def backward(self) -> Schedule:
        return reverse(self.forward)

    @cached_property
    def _slots(self) -> dict[tuple[bool, Shape], SlotPlan]:
        return {}

    def slots(self, schedule: Schedule, shape: Shape) -> SlotPlan:
        """Where this plan's transfers land, forward or backward, worked out once."""
        key = (schedule.is_backward, shape)
        if key not in self._slots:
            self._slots[key] = assign_slots(receives(schedule, lambda t: shape.bytes(t, schedule.num_chunks)))
        return self._slots[key]

    @cached_property
    def _masks(self) -> dict[tuple[object, ...], Mask]:
        return {}

    @cached_property
    def _positions(self) -> dict[tuple[int, torch.device], Tensor]:
        return {}

    def tile_mask(self, tile: Tile, keys: Runs, device: torch.device) -> Mask:
        """The mask in the coordinates of a tile that is given these rows of keys, sliced once."""
        mask = self.mask
        by_head = isinstance(mask, Blocks) and mask.num_heads > 1
        key = (tile.q, tile.k, tile.q_rows, keys, tile.chunk if by_head else 0, device)
        if key not in self._masks:
            if isinstance(mask, Blocks) and by_head:
                group = mask.num_heads // self.num_kv_heads
                heads = head_chunk(self.num_kv_heads, tile.chunk, self.forward.num_chunks)
                mask = mask.heads(range(heads.start * group, heads.stop * group))
            q, k = cut(self.placement.ranges[tile.q], Runs.of(tile.q_rows)), cut(self.placement.ranges[tile.k], keys)
            self._masks[key] = mask.slice(q, k).to(device)
        return self._masks[key]

    def positions(self, owner: int, rows: Runs, device: torch.device) -> Tensor:
        """Global positions of some of a rank's tokens, int32."""
        if (owner, device) not in self._positions:
            self._positions[owner, device] = self.placement.positions(owner).int().to(device)
        whole = self._positions[owner, device]
        parts = [whole[part.start : part.stop] for part in rows.parts]
        return parts[0] if len(parts) == 1 else torch.cat([whole[:0], *parts])


class Call(NamedTuple):
    """One rank's side of a call: q [B, H, T, D], k and v [B, K, T, D] of its own T tokens.

    `partial` says that these gradients of k and v are to be summed with others: then they stay float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    dropout: Dropout | None = None
    partial: bool = False


class Pass(ABC):
    """One rank's way through a schedule. Subclasses say what they own, what they compute, and what arrivals mean."""

    def __init__(self, plan: Plan, schedule: Schedule, transport: Transport, local: LocalAttention, call: Call) -> None:
        self.plan, self.schedule, self.transport, self.local, self.call = plan, schedule, transport, local, call
        self.rank = transport.rank
        self.name = f"{schedule.name} {'backward' if schedule.is_backward else 'forward'}"
        self.all_rows = Runs.of(range(call.q.shape[2]))
        self.exact = torch.promote_types(call.q.dtype, torch.float32)
        self.pool = BufferPool(call.q.device)
        self.copies: dict[Item, Bundle] = {}
        self.in_flight: dict[Transfer, tuple[Message, Bundle]] = {}
        self.parts: dict[Item, int] = defaultdict(int)  # tiles and arrivals that are still to come, of each result
        self.onward: dict[Item, Runs] = {}  # the rows of results that leave this rank
        for step in schedule.program(self.rank):
            for tile in step.tiles:
                for kind, owner in (("carry", tile.q), ("dq", tile.q), ("dkv", tile.k)):
                    self.parts[kind, owner, tile.chunk] += 1
            for t in step.posts:
                if t.dst == self.rank:
                    self.parts[t.item] += 1
                else:
                    self.onward[t.item] = t.rows

    @abstractmethod
    def own(self, kind: str) -> tuple[Tensor, ...]:
        """This rank's own tensors of a kind, all heads and rows."""

    @abstractmethod
    def arrive(self, transfer: Transfer, bundle: Bundle) -> None:
        """Take in a result (a carry or a gradient) that came."""

    @abstractmethod
    def result(self, transfer: Transfer) -> Bundle:
        """Give out a result that is complete here and goes on."""

    @abstractmethod
    def compute(self, tile: Tile) -> None:
        """Compute a tile from the copies that are here, and add what it gives to its results."""

    @abstractmethod
    def settle(self, item: Item) -> None:
        """Bring a complete result of this rank's own into its final dtype and place."""

    @abstractmethod
    def finish(self) -> Any:
        """What is this rank's own when all steps are done."""

    def add_part(self, item: Item) -> None:
        """Note that a tile or an arrival has been added to a result."""
        self.parts[item] -= 1
        if not self.parts[item] and item[1] == self.rank:
            self.settle(item)

    def settled(self, whole: Tensor | None, part: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
        """`whole` (all heads; made here the first time) with a chunk's part in it."""
        if self.schedule.num_chunks == 1:
            return part.to(dtype)
        if whole is None:
            chosen = head_chunk(self.call.k.shape[1], chunk, self.schedule.num_chunks)
            heads = part.shape[1] // len(chosen) * self.call.k.shape[1]
            whole = part.new_empty((len(part), heads, *part.shape[2:]), dtype=dtype)
        self.heads(whole, chunk).copy_(part)
        return whole

    def rows(self, item: Item) -> Runs:
        """The local rows a result covers here: all of one's own, what goes on of others'."""
        return self.all_rows if item[1] == self.rank else self.onward[item]

    def steps(self) -> Iterator[None]:
        """Run the pass: in each step wait, post, compute, let go."""
        last_use = self._last_uses()
        for number, step in enumerate(self.schedule.program(self.rank)):
            arrived = []
            for transfer in step.waits:
                message, bundle = self.in_flight.pop(transfer)
                self.transport.wait(message)
                if transfer.dst == self.rank:
                    arrived.append((transfer, bundle))
                else:
                    self.release(bundle)
            for transfer, bundle in arrived:
                if transfer.kind in ("kv", "q", "rows"):
                    self.copies[transfer.item] = bundle
                else:
                    self.arrive(transfer, bundle)
            del arrived
            messages = []
            for transfer in step.posts:
                bundle = self._outgoing(transfer) if transfer.src == self.rank else self._incoming(transfer)
                assert bundle.buffer is not None
                label = f"{transfer} (step {number} of {self.name})"
                messages.append(Message(transfer.src, transfer.dst, transfer, bundle.buffer, label, transfer.slow))
                self.in_flight[transfer] = messages[-1], bundle
            self.transport.post(messages)
            for tile in step.tiles:
                self.compute(tile)
            for item in last_use.get(number, ()):
                if item in self.copies:
                    self.release(self.copies.pop(item))
            yield

    def release(self, bundle: Bundle) -> None:
        """Return a bundle's buffer to the pool, unless it belongs to the transport, is in flight or is used later."""
        held = [*self.copies.values(), *(other for _, other in self.in_flight.values())]
        if bundle.buffer is None or any(other.buffer is bundle.buffer for other in held):
            return
        if not bundle.borrowed:
            self.pool.put(bundle.buffer)

    def _last_uses(self) -> dict[int, list[Item]]:
        """Which copies are used for the last time in each step."""
        last: dict[Item, int] = {}
        for number, step in enumerate(self.schedule.program(self.rank)):
            for tile in step.tiles:
                for kind, owner in (("kv", tile.k), ("q", tile.q), ("rows", tile.q)):
                    last[kind, owner, tile.chunk] = number
            for t in step.posts:
                if t.src == self.rank:
                    last[t.item] = number
        uses: dict[int, list[Item]] = defaultdict(list)
        for item, number in last.items():
            uses[number].append(item)
        return uses

    def _outgoing(self, transfer: Transfer) -> Bundle:
        """What a transfer sends, in one buffer: the held one as it is, or a packed part."""
        if transfer.kind in ("carry", "dkv", "dq"):
            held = self.result(transfer)
        else:
            held = self.hold(*transfer.item)
        if held.buffer is not None and held.rows == transfer.rows:
            return held
        packed = self.make(transfer.kind, transfer.rows, transfer.chunk)
        for places, sources in zip(packed.runs(transfer.rows), held.runs(transfer.rows), strict=True):
            for place, source in zip(places, sources, strict=True):
                place.copy_(source)
        return packed

    def _incoming(self, transfer: Transfer) -> Bundle:
        """Room for what a transfer brings, where the transport wants it."""
        return self.make(transfer.kind, transfer.rows, transfer.chunk, source=self.transport.receive_buffer(transfer))

    @property
    def shape(self) -> Shape:
        """What turns this call's rows into bytes."""
        B, H, _, D = self.call.q.shape
        return Shape(B, H, self.call.k.shape[1], D, self.call.q.element_size())

    def hold(self, kind: str, owner: int, chunk: int) -> Bundle:
        """The bundle this rank has of an owner's tensors: its own, or a copy."""
        if owner != self.rank:
            return self.copies[kind, owner, chunk]
        return Bundle(self.all_rows, tuple(self.heads(x, chunk) for x in self.own(kind)))

    def keys(self, tile: Tile) -> tuple[Tensor, Tensor, Runs]:
        """k and v for a tile, as they are held from its first key to its last, and the rows that these are."""
        held = self.hold("kv", tile.k, tile.chunk)
        k, v = held.take(tile.k_rows)
        return k, v, held.rows.within(tile.k_rows)

    def make(
        self, kind: str, rows: Runs, chunk: int, sums: torch.dtype | None = None, source: Tensor | None = None
    ) -> Bundle:
        """Uninitialised room for some rows of a kind; `sums` is the dtype of what is summed, if not float32, and
        `source` the buffer, if not one from the pool."""
        B, H, _, D = self.call.q.shape
        K = len(head_chunk(self.call.k.shape[1], chunk, self.schedule.num_chunks))
        H = H // max(1, self.call.k.shape[1]) * K
        dtypes = self.call.q.dtype, sums or self.exact
        return allocate(kind, (B, H, K, D), rows, *dtypes, self.pool if source is None else source)

    def heads(self, x: Tensor, chunk: int) -> Tensor:
        """The heads of a chunk, of a tensor with H or K heads."""
        chosen = head_chunk(self.call.k.shape[1], chunk, self.schedule.num_chunks)
        group = x.shape[1] // max(1, self.call.k.shape[1])
        return x[:, chosen.start * group : chosen.stop * group]

    def drop(self, tile: Tile, keys: Runs) -> Dropout | None:
        """Dropout told where in the whole a tile lies that is given these rows of keys."""
        if self.call.dropout is None:
            return None
        num_heads, num_kv_heads = self.call.q.shape[1], self.call.k.shape[1]
        chosen = head_chunk(num_kv_heads, tile.chunk, self.schedule.num_chunks)
        stride = self.call.dropout.batch_stride
        return replace(
            self.call.dropout,
            q_positions=self.plan.positions(tile.q, Runs.of(tile.q_rows), self.call.q.device),
            k_positions=self.plan.positions(tile.k, keys, self.call.q.device),
            first=self.call.dropout.first + chosen.start * (num_heads // max(1, num_kv_heads)),
            batch_stride=num_heads if stride is None else stride,
        )


def run(pass_: Pass) -> Any:
    """One rank's pass, to its end: what its `finish` returns."""
    slots = partial(pass_.plan.slots, pass_.schedule, pass_.shape)
    pass_.transport.begin(pass_.name, pass_.plan.call, device=pass_.call.q.device, slots=slots)
    for _ in pass_.steps():
        pass
    made = pass_.finish()
    pass_.transport.end()
    return made


def simulate(passes: Sequence[Pass]) -> list[Any]:
    """All ranks' passes in one process, over LocalTransports: every rank runs a step before any runs the next."""
    for _ in zip(*(pass_.steps() for pass_ in passes), strict=True):
        pass
    return [pass_.finish() for pass_ in passes]
