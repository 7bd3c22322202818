"""A schedule is data: which rank computes which tile in which step, and what travels between ranks meanwhile.

A step, on every rank, is: wait for the transfers that end here; post those that start here; compute the tiles. A
transfer that starts in step s and ends in step s + 1 therefore travels under step s's computation. Both of its ends are
one object, so what one rank sends is what the other expects, in the same order.

The same object is walked by the executor, proved by `verify`, costed by a planner and drawn. `generators` makes it;
`reverse` derives the backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from flashspan.context.runs import Runs, union

Kind: TypeAlias = Literal["kv", "q", "carry", "rows", "dkv", "dq"]
"""What a transfer holds of its owner's tokens:

kv      keys and values, in their dtype
q       queries, to be helped with
carry   the helper's float32 out and lse of those queries, going home to be merged
rows    queries, dout, lse and delta: what a helper needs in backward
dkv     float32 gradients of keys and values, on their way home
dq      a helper's float32 gradient of the queries, going home
"""

Item: TypeAlias = tuple[str, int, int]
"""What a rank can hold: (kind, owner, chunk)."""


class ScheduleError(AssertionError):
    """A schedule that does not compute attention, or that a network cannot run."""


class Tile(NamedTuple):
    """In `step`, `rank` lets the queries of `q` (these local rows) attend to the keys of `k`; `pairs` are visible.

    `k_rows` are the keys it needs. It may be given those in their gaps too, which the mask hides.
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
    """Local rows of `owner`'s tokens go from `src` to `dst`: posted in step `start`, there when step `end` begins.

    `back` is for copies of keys and values: the rank to which the gradient gathered with this copy goes on.
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
        """What it brings."""
        return self.kind, self.owner, self.chunk

    @property
    def slow(self) -> bool:
        """Whether it has several steps to travel, and may be overtaken."""
        return self.end - self.start > 1

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.owner} from rank {self.src} to rank {self.dst}"


class Step(NamedTuple):
    """One rank's part of a step: `waits` end here, `posts` start here (both in an order all ranks share)."""

    waits: tuple[Transfer, ...]
    posts: tuple[Transfer, ...]
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Tiles and transfers of all ranks. Heads are split into `num_chunks` chunks, each tile and transfer for one."""

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
        """Visible pairs each rank computes (times chunks, which split heads evenly)."""
        work = [0] * self.num_ranks
        for tile in self.tiles:
            work[tile.rank] += tile.pairs
        return work

    @property
    def balance(self) -> float:
        """The busiest rank's work over the mean."""
        work = self.work()
        return max(work) * len(work) / sum(work) if any(work) else 1.0


def _grid(num_ranks: int, num_steps: int) -> list[list[list]]:
    return [[[] for _ in range(num_steps)] for _ in range(num_ranks)]


@dataclass(frozen=True)
class Shape:
    """What turns a schedule's rows into bytes."""

    num_batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int

    def bytes(self, transfer: Transfer, num_chunks: int = 1) -> int:
        """The bytes a transfer sends: per row and head, D elements per field (float32 for sums), 4 per lse."""
        kv_heads = len(head_chunk(self.num_kv_heads, transfer.chunk, num_chunks))
        heads = kv_heads * (self.num_heads // max(1, self.num_kv_heads))
        exact = max(4, self.itemsize)  # sums travel in float32, or float64 where the inputs are
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
    """The bytes each rank sends in one pass of the schedule."""
    sent = [0] * schedule.num_ranks
    for transfer in schedule.transfers:
        sent[transfer.src] += shape.bytes(transfer, schedule.num_chunks)
    return sent


def head_chunk(num_kv_heads: int, chunk: int, num_chunks: int) -> range:
    """The kv heads of a chunk; sizes differ by one at most."""
    return range(chunk * num_kv_heads // num_chunks, (chunk + 1) * num_kv_heads // num_chunks)


def reverse(schedule: Schedule) -> Schedule:
    """The backward pass: the same tiles in the same steps, the same copies, and gradients on their way home.

    Keys and values travel again. A copy's gradient leaves for `back` when the copy's last tile is done and everything
    that comes through this rank has arrived: in a ring, one hop behind the copy, and one last hop home. It is given as
    many steps to travel as its copy was. A helper's queries bring dout, lse and delta; in place of its carry, dq goes
    home.
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

    # A copy's gradient waits for those that come through it, so copies are taken in the order gradients reach them.
    copies = {(t.dst, t.owner, t.chunk): t for t in schedule.transfers if t.kind == "kv"}
    feeders: dict[tuple[int, int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for key, copy in copies.items():
        if copy.back != copy.owner:
            feeders[copy.back, copy.owner, copy.chunk].append(key)
    sent: dict[tuple[int, int, int], Transfer | None] = {}

    def send(key: tuple[int, int, int]) -> None:
        rank, owner, chunk = key
        copy = copies[key]
        incoming = [sent[feeder] for feeder in feeders[key]]
        arrived = [t for t in incoming if t is not None]
        rows = union([*needed[key], *(t.rows for t in arrived)])
        if not len(rows):
            sent[key] = None
            return
        start = max([last_tile[key].step + 1 if key in last_tile else 0] + [t.end for t in arrived])
        sent[key] = Transfer(start, start + copy.end - copy.start, rank, copy.back, "dkv", owner, rows, chunk)

    pending = {key: len(feeders[key]) for key in copies}
    ready = [key for key, count in pending.items() if not count]
    for key in ready:  # grows as it goes
        send(key)
        onward = (copies[key].back, key[1], key[2])
        if onward in pending:
            pending[onward] -= 1
            if not pending[onward]:
                ready.append(onward)
    assert len(ready) == len(copies), "gradients run in a circle"
    transfers += [transfer for transfer in sent.values() if transfer is not None]
    return replace(schedule, transfers=tuple(transfers), is_backward=True)
