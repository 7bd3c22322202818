"""A schedule is data: which rank computes which tile in which step, and the transfers between ranks.

In a step, every rank waits for the transfers that end in the step, posts those that start in it, and computes its
tiles. A transfer that starts in step s and ends in step s + 1 therefore overlaps with the computation of step s. One
object describes both ends of a transfer, so one rank sends what the other expects, in the same order.

`generators` makes schedules, and `reverse` derives the backward pass. The executor runs a schedule, `verify` proves
that it is correct, the planner simulates it, and `draw` draws it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from flashspan.context.runs import Runs, union

Kind: TypeAlias = Literal["kv", "q", "carry", "rows", "dkv", "dq"]
"""The kinds of transfers. Each kind sends these tensors for the tokens of the transfer's owner:

kv      keys and values, in their dtype
q       queries, sent to a helper
carry   the helper's float32 out and lse of those queries, sent back to be merged
rows    queries, dout, lse and delta, sent to a helper in backward
dkv     float32 gradients of keys and values, sent towards their owner
dq      a helper's float32 gradient of the queries, sent back
"""

Item: TypeAlias = tuple[str, int, int]
"""The key by which a rank stores tensors: (kind, owner, chunk)."""


class ScheduleError(AssertionError):
    """A schedule that does not compute attention, or that the transports cannot run."""


class Tile(NamedTuple):
    """In `step`, `rank` computes attention of q's queries (`q_rows`) over k's keys; `pairs` pairs are visible.

    `k_rows` are the keys it needs. Keys in the gaps between them may be present too; the mask hides them.
    """

    step: int
    rank: int
    q: int
    k: int
    q_rows: range
    k_rows: Runs
    pairs: int
    chunk: int = 0


class Transfer(NamedTuple):
    """Send local rows of `owner`'s tokens from `src` to `dst`: posted in step `start`, awaited in step `end`.

    `back`, for keys and values, is the rank to which the gradient of this copy is sent.
    """

    start: int
    end: int
    src: int
    dst: int
    kind: Kind
    owner: int
    rows: Runs
    chunk: int = 0
    back: int = -1

    @property
    def item(self) -> Item:
        """The key of the transfer's tensors on the receiving rank."""
        return self.kind, self.owner, self.chunk

    @property
    def slow(self) -> bool:
        """Whether the transfer has several steps to arrive, so that later ones may overtake it."""
        return self.end - self.start > 1

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.owner} from rank {self.src} to rank {self.dst}"


class Step(NamedTuple):
    """One rank's part of a step: `waits` are the transfers that end in it, `posts` those that start in it. Both have
    the same order on all ranks."""

    waits: tuple[Transfer, ...]
    posts: tuple[Transfer, ...]
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Tiles and transfers of all ranks. Heads are split into `num_chunks` chunks; a tile or transfer is for one
    chunk."""

    name: str
    num_ranks: int
    tiles: tuple[Tile, ...]
    transfers: tuple[Transfer, ...]
    num_chunks: int = 1
    is_backward: bool = False

    @cached_property
    def num_steps(self) -> int:
        return 1 + max([t.step for t in self.tiles] + [t.end for t in self.transfers], default=0)

    def program(self, rank: int) -> tuple[Step, ...]:
        """The steps of one rank."""
        return self.programs[rank]

    @cached_property
    def programs(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of every rank."""
        waits, posts, tiles = (_grid(self.num_ranks, self.num_steps) for _ in range(3))
        for transfer in self.transfers:
            for rank in (transfer.src, transfer.dst):
                posts[rank][transfer.start].append(transfer)
                waits[rank][transfer.end].append(transfer)
        for tile in self.tiles:
            tiles[tile.rank][tile.step].append(tile)
        return tuple(
            tuple(Step(tuple(w), tuple(p), tuple(t)) for w, p, t in zip(*parts, strict=True))
            for parts in zip(waits, posts, tiles, strict=True)
        )

    def work(self) -> list[int]:
        """The visible pairs that each rank computes, counted once per chunk of heads."""
        work = [0] * self.num_ranks
        for tile in self.tiles:
            work[tile.rank] += tile.pairs
        return work

    @property
    def balance(self) -> float:
        """The busiest rank's work divided by the mean work."""
        work = self.work()
        return max(work) * len(work) / sum(work) if any(work) else 1.0


def _grid(num_ranks: int, num_steps: int) -> list[list[list]]:
    return [[[] for _ in range(num_steps)] for _ in range(num_ranks)]


@dataclass(frozen=True)
class Shape:
    """The sizes that turn a schedule's rows into bytes."""

    num_batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int

    def bytes(self, transfer: Transfer, num_chunks: int = 1) -> int:
        """The bytes a transfer sends: per row and head, D elements for each matrix and one for lse or delta."""
        kv_heads = len(head_chunk(self.num_kv_heads, transfer.chunk, num_chunks))
        heads = kv_heads * (self.num_heads // max(1, self.num_kv_heads))
        exact = max(4, self.itemsize)  # sums, lse and delta are float32, or float64 for float64 inputs
        element, row = self.head_dim * self.itemsize, self.head_dim * exact
        per_row = {
            "kv": kv_heads * 2 * element,
            "dkv": kv_heads * 2 * row,
            "q": heads * element,
            "dq": heads * row,
            "carry": heads * (row + exact),
            "rows": heads * (2 * element + 2 * exact),
        }
        return self.num_batch * len(transfer.rows) * per_row[transfer.kind]


def bytes_sent(schedule: Schedule, shape: Shape) -> list[int]:
    """The bytes that each rank sends in one pass of the schedule."""
    sent = [0] * schedule.num_ranks
    for transfer in schedule.transfers:
        sent[transfer.src] += shape.bytes(transfer, schedule.num_chunks)
    return sent


def head_chunk(num_kv_heads: int, chunk: int, num_chunks: int) -> range:
    """The kv heads of a chunk; sizes differ by one at most."""
    return range(chunk * num_kv_heads // num_chunks, (chunk + 1) * num_kv_heads // num_chunks)


def reverse(schedule: Schedule) -> Schedule:
    """The schedule of the backward pass: the same tiles in the same steps, the same copies of keys and values, and
    transfers of gradients to their owners.

    Keys and values are sent a second time. A copy's gradient is sent to `back` when the copy's last tile is computed
    and all gradients that arrive on this rank have been added. In a ring it follows one hop behind the copy, and its
    last hop is to the owner. It has as many steps to arrive as its copy had. A helper receives dout, lse and delta with
    the queries, and sends dq back in place of the carry.
    """
    transfers = []
    for transfer in schedule.transfers:
        if transfer.kind == "q":
            transfer = transfer._replace(kind="rows")
        elif transfer.kind == "carry":
            transfer = transfer._replace(kind="dq")
        transfers.append(transfer)

    last_tile: dict[tuple[int, int, int], Tile] = {}
    for tile in schedule.tiles:
        key = (tile.rank, tile.k, tile.chunk)
        if key not in last_tile or last_tile[key].step < tile.step:
            last_tile[key] = tile
    needed: dict[tuple[int, int, int], list[Runs]] = defaultdict(list)
    for tile in schedule.tiles:
        needed[tile.rank, tile.k, tile.chunk].append(tile.k_rows)

    # A gradient is sent after the gradients that are added to it, so copies are visited in the order of their
    # gradients.
    copies = {(t.dst, t.owner, t.chunk): t for t in schedule.transfers if t.kind == "kv"}
    sources: dict[tuple[int, int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for key, copy in copies.items():
        if copy.back != copy.owner:
            sources[copy.back, copy.owner, copy.chunk].append(key)
    sent: dict[tuple[int, int, int], Transfer | None] = {}

    def send(key: tuple[int, int, int]) -> None:
        rank, owner, chunk = key
        copy = copies[key]
        incoming = [sent[source] for source in sources[key]]
        arrived = [t for t in incoming if t is not None]
        rows = union([*needed[key], *(t.rows for t in arrived)])
        if not len(rows):
            sent[key] = None
            return
        start = max([last_tile[key].step + 1 if key in last_tile else 0] + [t.end for t in arrived])
        sent[key] = Transfer(start, start + copy.end - copy.start, rank, copy.back, "dkv", owner, rows, chunk)

    pending = {key: len(sources[key]) for key in copies}
    ready = [key for key, count in pending.items() if not count]
    for key in ready:  # the loop appends to it
        send(key)
        next_key = (copies[key].back, key[1], key[2])
        if next_key in pending:
            pending[next_key] -= 1
            if not pending[next_key]:
                ready.append(next_key)
    assert len(ready) == len(copies), "gradients run in a circle"
    transfers += [transfer for transfer in sent.values() if transfer is not None]
    return replace(schedule, transfers=tuple(transfers), is_backward=True)
