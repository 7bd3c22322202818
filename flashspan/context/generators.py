"""The strategies: each turns a `Visibility` (which rank needs which keys) into a schedule.

It is pure Python, without processes or tensors.

No strategy computes tiles without visible pairs, or sends rows that no later rank needs. With a window of w tokens, a
ring ends after the ranks that the window reaches, and sends w - 1 tokens instead of the shard. With a block map, only
blocks of keys that a later rank sees are sent. A transfer has as many bytes as rows times `kv` (or its kind's size).

Bytes below are for one forward (then backward) pass over all ranks, full mask, no head chunks, T tokens on N ranks;
kv = 2 * B * K * D * itemsize per token, dkv the same in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flashspan.context.runs import Runs, union
from flashspan.context.schedule import Schedule, Tile, Transfer
from flashspan.context.visibility import Visibility


def ring(visibility: Visibility) -> Schedule:
    """Keys and values move around a ring; in step s a rank computes with the keys of the rank s places before it.

    Bytes: T (N - 1) kv forward; T (N - 1) (kv + dkv) backward. The gradient from a rank's own keys is not sent, so
    gradients make N - 1 hops like the keys: N - 2 one step behind them, and one to their owner.
    """
    return _rings(visibility, (1, visibility.num_ranks), "ring")


def double_ring(visibility: Visibility, sizes: Sequence[int]) -> Schedule:
    """A ring on two levels, `sizes` = (nodes, ranks per node); the ranks of a node are consecutive.

    Keys move around a ring inside each node; during those steps they are also sent to the same place in the next node.
    Gradients are summed inside each node, then sent to their owner once. Bytes: T (N - 1) kv forward and T (N - 1) kv
    backward, as in the ring, but only T (nodes - 1) kv of them between nodes; gradients T (N - 1) dkv, with as many
    hops between nodes as the keys.
    """
    if len(sizes) != 2 or min(sizes) < 1 or sizes[0] * sizes[1] != visibility.num_ranks:
        raise ValueError(
            f"double_ring needs sizes (nodes, ranks per node) whose product is the number of ranks: "
            f"got {tuple(sizes)} for {visibility.num_ranks} ranks"
        )
    return _rings(visibility, (sizes[0], sizes[1]), "double_ring")


def _rings(visibility: Visibility, sizes: tuple[int, int], name: str) -> Schedule:
    nodes, inner = sizes

    def at(owner: int, a: int, b: int) -> int:
        """The rank that receives the owner's keys after they have moved by a nodes and b places."""
        return (owner // inner + a) % nodes * inner + (owner % inner + b) % inner

    ranks = range(visibility.num_ranks)
    # Only distances at which some rank computes are steps. The first one, each rank's own keys, is always a step.
    distances = [(a, b) for a in range(nodes) for b in range(inner)]
    used = [d for d in distances if d == (0, 0) or any(visibility.pairs[at(o, *d), o] for o in ranks)]
    tiles, transfers = [], []
    for owner in ranks:
        branches: list[list[Tile]] = []  # per node that needs these keys: its tiles, in order
        for a in range(nodes):
            branch = []
            for step, (distance, b) in enumerate(used):
                rank = at(owner, a, b)
                if distance == a and visibility.pairs[rank, owner]:
                    branch.append(_tile(visibility, step, rank, rank, owner))
            if branch:
                branches.append(branch)
            tiles += branch
        transfers += _spread(owner, branches, inner)
    return Schedule(name, visibility.num_ranks, tuple(tiles), tuple(transfers))


def _spread(owner: int, branches: list[list[Tile]], inner: int) -> list[Transfer]:
    """The transfers of one rank's keys: from node to node between head ranks, and around each node from its head."""
    transfers = []
    later = Runs()  # rows that later nodes need, computed from the last node backwards
    for i in reversed(range(len(branches))):
        is_local = branches[i][0].rank // inner == owner // inner
        path = [tile for tile in branches[i] if tile.rank != owner]
        head = owner if is_local else path[0].rank
        needed = Runs()
        for j in reversed(range(len(path))):
            tile = path[j]
            is_head = tile.rank == head
            needed = union([needed, tile.k_rows, later if is_head else Runs()])
            next_rank = path[j + 1].rank if j + 1 < len(path) else head
            if is_head:
                # The head's copy is sent by the previous node's head, as soon as that one has it.
                before = branches[i - 1][0] if i else None
                if before is None or before.rank // inner == owner // inner:
                    src, start = owner, 0
                else:
                    src, start = before.rank, before.step
                next_rank = owner
            else:
                src, start = (path[j - 1].rank if j else head), tile.step - 1
            transfers.append(Transfer(start, tile.step, src, tile.rank, "kv", owner, needed, back=next_rank))
        if not is_local:
            later = needed
    return transfers


def gather(visibility: Visibility) -> Schedule:
    """Each rank receives all the keys it needs from their owners at once, while it computes with its own keys.

    Bytes: T (N - 1) kv forward; T (N - 1) (kv + dkv) backward, where every partial gradient is sent directly to its
    owner. A rank holds the keys of all ranks; `in_chunks` bounds the memory.
    """
    tiles, transfers = [], []
    for q in range(visibility.num_ranks):
        for distance in range(visibility.num_ranks):  # each rank's first transfer comes from another peer
            k = (q - distance) % visibility.num_ranks
            if not visibility.pairs[q, k]:
                continue
            tile = _tile(visibility, 0 if q == k else 1, q, q, k)
            tiles.append(tile)
            if q != k:
                transfers.append(Transfer(0, 1, k, q, "kv", k, tile.k_rows, back=k))
    return Schedule("gather", visibility.num_ranks, tuple(tiles), tuple(transfers))


def in_chunks(schedule: Schedule, num_chunks: int) -> Schedule:
    """The same schedule for one chunk of heads after another: buffers are smaller, messages more numerous.

    A chunk's first transfers overlap with the last tiles of the previous chunk, so there is no wait between chunks.
    """
    if num_chunks < 1:
        raise ValueError(f"num_chunks must be 1 or more: got {num_chunks}")
    # Compute steps follow one another without a gap; transfers in flight end in the next chunk's steps.
    stride = max((tile.step for tile in schedule.tiles), default=0)
    tiles, transfers = [], []
    for chunk in range(num_chunks):
        shift = chunk * stride
        tiles += [t._replace(step=t.step + shift, chunk=chunk) for t in schedule.tiles]
        transfers += [t._replace(start=t.start + shift, end=t.end + shift, chunk=chunk) for t in schedule.transfers]
    return replace(schedule, tiles=tuple(tiles), transfers=tuple(transfers), num_chunks=num_chunks)


def helper(visibility: Visibility) -> Schedule:
    """Causal balance without permuting tokens (DistFlashAttn): idle ranks compute for busy ones.

    In step s, for s up to N / 2, rank r receives keys and queries from rank r - s. It computes its own queries with the
    received keys, and the received queries with its own keys. It sends back the carry of the received queries. Under a
    causal mask on contiguous shards exactly one of the two tiles exists, so every rank computes one tile per step. At s
    = N / 2 a pair of ranks would compute the same tile twice; each takes half of the query rows.

    Bytes, causal on equal contiguous shards of n = T / N tokens: with W tiles computed by the owners of their queries
    and M by helpers (W + M = N (N - 1) / 2, a half tile counts one half): n (W kv + M (q + carry)) forward, where half
    tiles send all of kv; n (W (kv + dkv) + M (rows + dq)) backward.
    """
    num = visibility.num_ranks
    tiles, transfers = [], []
    for rank in range(num):
        tiles += [_tile(visibility, 0, rank, rank, rank)] if visibility.pairs[rank, rank] else []
        for step in range(1, num // 2 + 1):
            other = (rank - step) % num
            own = _tile(visibility, step, rank, rank, other, half=0 if 2 * step == num else None)
            if own.pairs:
                tiles.append(own)
                transfers.append(Transfer(step - 1, step, other, rank, "kv", other, own.k_rows, back=other))
            helped = _tile(visibility, step, rank, other, rank, half=1 if 2 * step == num else None)
            if helped.pairs:
                tiles.append(helped)
                rows = Runs.of(helped.q_rows)
                transfers.append(Transfer(step - 1, step, other, rank, "q", other, rows))
                transfers.append(Transfer(step + 1, step + 2, rank, other, "carry", other, rows))
    return Schedule("helper", num, tuple(tiles), tuple(transfers))


GENERATORS: dict[str, Callable[..., Schedule]] = {
    "ring": ring,
    "double_ring": double_ring,
    "gather": gather,
    "helper": helper,
}


def _tile(visibility: Visibility, step: int, rank: int, q: int, k: int, *, half: int | None = None) -> Tile:
    """The visible part of tile (q, k), or of the upper (0) or lower (1) half of its visible rows."""
    box = visibility.box(q, k)
    if half is not None:
        middle = (box.q_rows.start + box.q_rows.stop + 1) // 2
        rows = range(box.q_rows.start, middle) if half == 0 else range(middle, box.q_rows.stop)
        box = visibility.box(q, k, rows)
    return Tile(step, rank, q, k, box.q_rows, box.k_rows, box.pairs)
