"""The forward and the backward pass. Forward accumulates carries, backward accumulates gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from flashspan.context.bundle import Bundle
from flashspan.context.execute import Call, Pass, Plan
from flashspan.context.runs import Runs
from flashspan.context.schedule import Item, Tile, Transfer
from flashspan.context.transport import Transport
from flashspan.kernels.contract import Carry, LocalAttention, Problem
from flashspan.kernels.delta import kept_dtype
from flashspan.kernels.merge import merge


class ForwardPass(Pass):
    """Accumulates this rank's out and lse, and the carries it computes for other ranks."""

    def __init__(self, plan: Plan, transport: Transport, local: LocalAttention, call: Call) -> None:
        super().__init__(plan, plan.forward, transport, local, call)
        self.carries: dict[Item, Carry] = {}
        # Rounding lse to float32 in each step of a long ring is visible: 2.8 times the error of one rank on 64 ranks.
        # CPU implementations continue a carry in its dtype, GPU kernels need float32.
        self.carried = torch.float64 if call.q.device.type == "cpu" else self.exact
        self.kept = kept_dtype(call.q)
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def own(self, kind: str) -> tuple[Tensor, ...]:
        return (self.call.k, self.call.v) if kind == "kv" else (self.call.q,)

    def compute(self, tile: Tile) -> None:
        (q,) = self.hold("q", tile.q, tile.chunk).take(tile.q_rows)
        k, v, keys = self.keys(tile)
        item = ("carry", tile.q, tile.chunk)
        rows = self.rows(item)
        if item not in self.carries and rows != Runs.of(tile.q_rows):
            self.carries[item] = self._blank(item)
        so_far = self.carries.get(item)
        part = None
        if so_far is not None:
            part = Carry(*Bundle(rows, so_far).take(tile.q_rows))
            given = Carry(part.out, part.lse.contiguous())  # kernels index lse by row number
        carry = self.local.forward(
            q,
            k,
            v,
            Problem(self.plan.tile_mask(tile, keys, q.device), self.call.scale, self.dropout_of(tile, keys)),
            carry=None if part is None else given,
            out_dtype=self.kept if part is None and tile.q == self.rank and self.parts[item] == 1 else self.exact,
        )
        if part is None:
            self.carries[item] = Carry(carry.out, carry.lse.to(self.carried))
        else:
            for old, new in zip(part, carry, strict=True):
                if old.data_ptr() != new.data_ptr():  # an implementation may return new tensors
                    old.copy_(new)
        self.add_part(item)

    def add_received(self, transfer: Transfer, bundle: Bundle) -> None:
        item = transfer.item
        if item not in self.carries:
            self.carries[item] = self._blank(item)
        merge(Carry(*Bundle(self.rows(item), self.carries[item]).take(transfer.rows)), Carry(*bundle.fields))
        self.release(bundle)
        self.add_part(item)

    def result(self, transfer: Transfer) -> Bundle:
        return Bundle(transfer.rows, self.carries.pop(transfer.item))

    def finalize(self, item: Item) -> None:
        carry = self.carries.pop(item) if item in self.carries else self._blank(item)
        self.out = self.with_chunk(self.out, carry.out, item[2], self.kept)
        self.lse = self.with_chunk(self.lse, carry.lse, item[2], self.exact)

    def finish(self) -> Carry:
        """out [B, H, T, D] in the dtype that backward needs (`kept_dtype`), lse [B, H, T]."""
        for chunk in range(self.schedule.num_chunks):
            if ("carry", self.rank, chunk) not in self.parts:  # no query here sees any key
                self.finalize(("carry", self.rank, chunk))
        assert self.out is not None
        assert self.lse is not None
        return Carry(self.out, self.lse)

    def _blank(self, item: Item) -> Carry:
        """A carry that has seen no keys: out 0, lse -inf."""
        out, lse = self.make("carry", self.rows(item), item[2]).fields
        return Carry(out.zero_(), lse.fill_(-torch.inf).to(self.carried))


class BackwardPass(Pass):
    """Accumulates the gradients of this rank's tensors, and of other ranks' queries and keys."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        local: LocalAttention,
        call: Call,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
    ) -> None:
        super().__init__(plan, plan.backward, transport, local, call)
        self.dout, self.lse, self.delta = dout, lse.to(self.exact), delta.to(self.exact)
        self.totals: dict[Item, Bundle] = {}
        dtype = self.exact if call.partial else call.q.dtype
        # The gradients of this rank, all heads, in their final dtype.
        self.grads = {
            "dq": (call.q.new_empty(call.q.shape),),
            "dkv": tuple(x.new_empty(x.shape, dtype=dtype) for x in (call.k, call.v)),
        }

    def own(self, kind: str) -> tuple[Tensor, ...]:
        if kind == "kv":
            return self.call.k, self.call.v
        return self.call.q, self.dout, self.lse, self.delta

    def compute(self, tile: Tile) -> None:
        q, dout, lse, delta = self.hold("rows", tile.q, tile.chunk).take(tile.q_rows)
        k, v, keys = self.keys(tile)
        items: list[Item] = [("dq", tile.q, tile.chunk), ("dkv", tile.k, tile.chunk)]
        first = not any(item in self.totals for item in items)
        covers = [self.rows(item) for item in items] == [Runs.of(tile.q_rows), keys]
        # The first tile of a sum is written, not added, if it covers all rows. A sum of one tile needs no float32.
        writes = first and covers
        only = writes and all(self.parts[item] == 1 and item[1] == self.rank for item in items)
        dtype = q.dtype if only and not self.call.partial else self.exact
        for item in items:
            if writes:
                self.totals[item] = self._room_for(item, dtype)
            elif item not in self.totals:
                self.totals[item] = self._zeros(item)
        (dq,) = self.totals[items[0]].take(tile.q_rows)
        # In the gaps of this tile, the copy of the keys and its gradient may have different rows, for other ranks.
        total = self.totals[items[1]]
        room = total if total.rows.within(keys) == keys else self._zeros(items[1], keys)
        dk, dv = room.take(keys)
        self.local.backward(
            dout,
            q,
            k,
            v,
            lse,
            delta,
            Problem(self.plan.tile_mask(tile, keys, q.device), self.call.scale, self.dropout_of(tile, keys)),
            dq=dq,
            dk=dk,
            dv=dv,
            accumulate=not writes,
        )
        if room is not total:
            self._add(total, room, tile.k_rows)
        for item in items:
            self.add_part(item)

    def add_received(self, transfer: Transfer, bundle: Bundle) -> None:
        item = transfer.item
        if item not in self.totals and self.rows(item) == bundle.rows:
            self.totals[item] = bundle
        else:
            if item not in self.totals:
                self.totals[item] = self._zeros(item)
            self._add(self.totals[item], bundle, transfer.rows)
        self.add_part(item)

    def result(self, transfer: Transfer) -> Bundle:
        return self.totals.pop(transfer.item)

    def finalize(self, item: Item) -> None:
        bundle = self.totals.pop(item) if item in self.totals else self._zeros(item)
        for whole, part in zip(self.grads[item[0]], bundle.fields, strict=True):
            place = self.heads(whole, item[2])
            if place.data_ptr() != part.data_ptr():
                place.copy_(part)
        self.release(bundle)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq [B, H, T, D], dk and dv [B, K, T, D], in q's dtype unless they are partial."""
        for chunk in range(self.schedule.num_chunks):
            for kind in ("dq", "dkv"):
                if (kind, self.rank, chunk) not in self.parts:
                    self.finalize((kind, self.rank, chunk))
        (dq,), (dk, dv) = self.grads["dq"], self.grads["dkv"]
        return dq, dk, dv

    def _room_for(self, item: Item, dtype: torch.dtype) -> Bundle:
        """Memory for a sum. If this rank owns the sum and `dtype` is its final dtype, that is its final place."""
        kind, owner, chunk = item
        if owner != self.rank or self.grads[kind][0].dtype != dtype:
            return self.make(kind, self.rows(item), chunk, dtype)
        return Bundle(self.rows(item), tuple(self.heads(x, chunk) for x in self.grads[kind]))

    def _zeros(self, item: Item, rows: Runs | None = None) -> Bundle:
        """Memory for a sum, or for these rows of it, filled with zeros."""
        bundle = self._room_for(item, self.exact) if rows is None else self.make(item[0], rows, item[2])
        bundle.clear()
        return bundle

    def _add(self, total: Bundle, part: Bundle, rows: Runs) -> None:
        """Add these rows of a part to a sum, and release the part."""
        for sums, terms in zip(total.runs(rows), part.runs(rows), strict=True):
            for whole, term in zip(sums, terms, strict=True):
                whole.add_(term)
        self.release(part)
