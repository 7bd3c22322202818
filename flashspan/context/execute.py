"""The executor: runs any schedule, forward and backward, over any transport, with any implementation of attention.

`Pass.steps` is a generator that yields after each step. A process of a group runs its own pass to the end; `simulate`
runs the passes of all ranks, step by step, in one process. All sums (carries and gradients) stay float32, or float64
for float64 inputs, until they are complete.
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
from flashspan.kernels.contract import LocalAttention
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import Blocks, Mask


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule with its placement and mask: all parts of a call that do not depend on its tensors."""

    placement: Placement
    mask: Mask
    forward: Schedule
    num_kv_heads: int = 1  # the call's kv heads; used only if the mask differs between heads
    call: int = 0  # equal on all ranks that make the same call

    @cached_property
    def backward(self) -> Schedule:
        return reverse(self.forward)

    @cached_property
    def _slots(self) -> dict[tuple[bool, Shape], SlotPlan]:
        return {}

    def slots(self, schedule: Schedule, shape: Shape) -> SlotPlan:
        """The receive slots of the schedule's transfers, forward or backward, computed once."""
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
        """The mask of a tile's query rows and these rows of keys, sliced once and cached."""
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
        """The global positions of these rows of the owner's tokens, int32."""
        if (owner, device) not in self._positions:
            self._positions[owner, device] = self.placement.positions(owner).int().to(device)
        whole = self._positions[owner, device]
        parts = [whole[part.start : part.stop] for part in rows.parts]
        return parts[0] if len(parts) == 1 else torch.cat([whole[:0], *parts])


class Call(NamedTuple):
    """One rank's arguments of a call: q [B, H, T, D], k and v [B, K, T, D] of its own T tokens.

    partial: the gradients of k and v are added to other ranks' later, so they stay float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    dropout: Dropout | None = None
    partial: bool = False


class Pass(ABC):
    """One rank's pass over a schedule. Subclasses define its tensors, its tiles, and how received results are added."""

    def __init__(self, plan: Plan, schedule: Schedule, transport: Transport, local: LocalAttention, call: Call) -> None:
        self.plan, self.schedule, self.transport, self.local, self.call = plan, schedule, transport, local, call
        self.rank = transport.rank
        self.name = f"{schedule.name} {'backward' if schedule.is_backward else 'forward'}"
        self.all_rows = Runs.of(range(call.q.shape[2]))
        self.exact = torch.promote_types(call.q.dtype, torch.float32)
        self.pool = BufferPool(call.q.device)
        self.copies: dict[Item, Bundle] = {}
        self.in_flight: dict[Transfer, tuple[Message, Bundle]] = {}
        self.parts: dict[Item, int] = defaultdict(int)  # tiles and received parts still to be added to each result
        self.forwarded: dict[Item, Runs] = {}  # the rows of results that this rank sends
        for step in schedule.program(self.rank):
            for tile in step.tiles:
                for kind, owner in (("carry", tile.q), ("dq", tile.q), ("dkv", tile.k)):
                    self.parts[kind, owner, tile.chunk] += 1
            for t in step.posts:
                if t.dst == self.rank:
                    self.parts[t.item] += 1
                else:
                    self.forwarded[t.item] = t.rows

    @abstractmethod
    def own(self, kind: str) -> tuple[Tensor, ...]:
        """This rank's own tensors of a kind, all heads and rows."""

    @abstractmethod
    def add_received(self, transfer: Transfer, bundle: Bundle) -> None:
        """Add a received result (a carry or a gradient)."""

    @abstractmethod
    def result(self, transfer: Transfer) -> Bundle:
        """Return a result that is complete on this rank and that it sends to the next rank."""

    @abstractmethod
    def compute(self, tile: Tile) -> None:
        """Compute a tile from the copies on this rank, and add it to its results."""

    @abstractmethod
    def finalize(self, item: Item) -> None:
        """Write a complete result of this rank in its final dtype and place."""

    @abstractmethod
    def finish(self) -> Any:
        """The results of this rank, after all steps."""

    def add_part(self, item: Item) -> None:
        """Record that a tile or a received part has been added to a result."""
        self.parts[item] -= 1
        if not self.parts[item] and item[1] == self.rank:
            self.finalize(item)

    def with_chunk(self, whole: Tensor | None, part: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
        """Write a chunk's heads to `whole` (all heads; allocated for the first chunk), and return `whole`."""
        if self.schedule.num_chunks == 1:
            return part.to(dtype)
        if whole is None:
            chosen = head_chunk(self.call.k.shape[1], chunk, self.schedule.num_chunks)
            heads = part.shape[1] // len(chosen) * self.call.k.shape[1]
            whole = part.new_empty((len(part), heads, *part.shape[2:]), dtype=dtype)
        self.heads(whole, chunk).copy_(part)
        return whole

    def rows(self, item: Item) -> Runs:
        """The local rows of a result: all rows if this rank owns it, otherwise the rows that are sent."""
        return self.all_rows if item[1] == self.rank else self.forwarded[item]

    def steps(self) -> Iterator[None]:
        """Run the pass: each step waits, posts, computes and releases buffers."""
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
                    self.add_received(transfer, bundle)
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
        """For each step, the copies that are used in it for the last time."""
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
        """The bundle to send: the one that this rank holds, or a packed copy of the transfer's rows."""
        if transfer.kind in ("carry", "dkv", "dq"):
            held = self.result(transfer)
        else:
            held = self.hold(*transfer.item)
        if held.buffer is not None and held.rows == transfer.rows:
            return held
        packed = self.make(transfer.kind, transfer.rows, transfer.chunk)
        for targets, sources in zip(packed.runs(transfer.rows), held.runs(transfer.rows), strict=True):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        return packed

    def _incoming(self, transfer: Transfer) -> Bundle:
        """The bundle to receive a transfer into; its buffer is the transfer's slot if the transport has one."""
        return self.make(transfer.kind, transfer.rows, transfer.chunk, source=self.transport.receive_buffer(transfer))

    @property
    def shape(self) -> Shape:
        """The sizes that turn this call's rows into bytes."""
        B, H, _, D = self.call.q.shape
        return Shape(B, H, self.call.k.shape[1], D, self.call.q.element_size())

    def hold(self, kind: str, owner: int, chunk: int) -> Bundle:
        """An owner's tensors as held on this rank: its own, or a copy."""
        if owner != self.rank:
            return self.copies[kind, owner, chunk]
        return Bundle(self.all_rows, tuple(self.heads(x, chunk) for x in self.own(kind)))

    def keys(self, tile: Tile) -> tuple[Tensor, Tensor, Runs]:
        """Return k and v from the tile's first key to its last, as far as this rank holds them, and their rows."""
        held = self.hold("kv", tile.k, tile.chunk)
        k, v = held.take(tile.k_rows)
        return k, v, held.rows.within(tile.k_rows)

    def make(
        self, kind: str, rows: Runs, chunk: int, sums: torch.dtype | None = None, source: Tensor | None = None
    ) -> Bundle:
        """Uninitialised tensors of a kind for these rows. sums: the dtype of carries and gradients, by default float32
        (float64 for float64 inputs); source: the buffer, by default one from the pool."""
        B, H, _, D = self.call.q.shape
        K = len(head_chunk(self.call.k.shape[1], chunk, self.schedule.num_chunks))
        H = H // max(1, self.call.k.shape[1]) * K
        dtypes = self.call.q.dtype, sums or self.exact
        return allocate(kind, (B, H, K, D), rows, *dtypes, self.pool if source is None else source)

    def heads(self, x: Tensor, chunk: int) -> Tensor:
        """A view of a chunk's heads of x, which has H or K heads."""
        chosen = head_chunk(self.call.k.shape[1], chunk, self.schedule.num_chunks)
        group = x.shape[1] // max(1, self.call.k.shape[1])
        return x[:, chosen.start * group : chosen.stop * group]

    def dropout_of(self, tile: Tile, keys: Runs) -> Dropout | None:
        """The dropout of a tile and these rows of keys, with their global positions and heads."""
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
    """Run one rank's pass to its end, and return its results."""
    slots = partial(pass_.plan.slots, pass_.schedule, pass_.shape)
    pass_.transport.begin(pass_.name, pass_.plan.call, device=pass_.call.q.device, slots=slots)
    for _ in pass_.steps():
        pass
    results = pass_.finish()
    pass_.transport.end()
    return results


def simulate(passes: Sequence[Pass]) -> list[Any]:
    """All ranks' passes in one process, over LocalTransports: every rank runs a step before any rank runs the next."""
    for _ in zip(*(pass_.steps() for pass_ in passes), strict=True):
        pass
    return [pass_.finish() for pass_ in passes]
