"""The time of a schedule, simulated: the same object that the executor runs, but with clocks instead of tensors.

Every rank has one compute queue and one port per direction: a rank sends one transfer at a time, and receives one at a
time. A step waits for the transfers that end in it, posts those that start in it, and computes its tiles; a transfer
begins when both ends have posted it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashspan.context.schedule import Schedule, Shape, Tile

from .devices import Cluster, Device

BLOCK = 128
"""Query rows in a block of a kernel. At a mask's edge, whole blocks are computed, although only a part is visible."""


@dataclass(frozen=True)
class Simulation:
    """Times in seconds: until the last rank is done, and for each rank, of computing and of waiting for transfers."""

    seconds: float
    computing: tuple[float, ...]
    waiting: tuple[float, ...]
    spans: tuple[tuple[int, int, float, float], ...]  # rank, step, begin, end of computing

    def delayed(self, seconds: float) -> Simulation:
        """The same simulation after a wait of this many seconds on every rank."""
        waiting = tuple(wait + seconds for wait in self.waiting)
        return replace(self, seconds=self.seconds + seconds, waiting=waiting)


def simulate(
    schedule: Schedule,
    shape: Shape,
    cluster: Cluster,
    *,
    stride: int = 1,
    scale: float = 1.0,
    num_batch: float = 1.0,
    merges: bool = False,
) -> Simulation:
    """Run all ranks' programs. Rank r of the schedule is device r * stride of the cluster.

    Every row of the schedule represents `scale` tokens, and every call `num_batch` samples. With `merges`, each partial
    result adds a pass over memory, as with kernels that cannot continue a carry (ours can).
    """
    num, device = schedule.num_ranks, cluster.device
    clock = [0.0] * num
    computing, waiting = [0.0] * num, [0.0] * num
    out_free, in_free = [0.0] * num, [0.0] * num
    arrival: dict[int, float] = {}
    spans = []
    parts = [0] * num  # tiles of each rank's queries: a single one needs no float32 partial result
    for tile in schedule.tiles:
        parts[tile.q] += 1
    for step in range(schedule.num_steps):
        for rank in range(num):
            ready = max((arrival[id(t)] for t in schedule.programs[rank][step].waits), default=0.0)
            waiting[rank] += max(0.0, ready - clock[rank])
            clock[rank] = max(clock[rank], ready)
        # All ranks have reached this step: transfers that they post can start.
        for rank in range(num):
            for transfer in schedule.programs[rank][step].posts:
                if transfer.src != rank:
                    continue
                link = cluster.link(transfer.src * stride, transfer.dst * stride)
                size = shape.bytes(transfer, schedule.num_chunks) * scale * num_batch
                begin = max(clock[transfer.src], clock[transfer.dst], out_free[transfer.src], in_free[transfer.dst])
                end = begin + size / link.bandwidth
                out_free[transfer.src] = in_free[transfer.dst] = end
                arrival[id(transfer)] = end + link.latency
        for rank in range(num):
            begin = clock[rank]
            for tile in schedule.programs[rank][step].tiles:
                partial = parts[tile.q] > schedule.num_chunks
                taken = tile_seconds(tile, shape, schedule, device, scale, num_batch, partial=partial, merges=merges)
                busy = max(out_free[rank], in_free[rank]) - clock[rank]
                taken += device.interference * min(taken, max(0.0, busy))
                clock[rank] += taken
                computing[rank] += taken
            if clock[rank] > begin:
                spans.append((rank, step, begin, clock[rank]))
    return Simulation(max(clock), tuple(computing), tuple(waiting), tuple(spans))


def tile_seconds(
    tile: Tile,
    shape: Shape,
    schedule: Schedule,
    device: Device,
    scale: float = 1.0,
    num_batch: float = 1.0,
    *,
    partial: bool,
    merges: bool = False,
) -> float:
    """One tile on one device: its matmuls, the loads and stores of each block of rows, and a launch."""
    rows, columns, pairs = scale * len(tile.q_rows), scale * len(tile.k_rows), scale**2 * tile.pairs
    heads = num_batch * shape.num_batch * shape.num_heads / schedule.num_chunks
    kv_heads = num_batch * shape.num_batch * shape.num_kv_heads / schedule.num_chunks
    # A mask's edge crosses the tile once. In the blocks that it crosses, half of the pairs are computed but hidden.
    edge = min(rows, columns) * BLOCK / 2 if pairs < rows * columns else 0
    work = 4.0 * heads * shape.head_dim * min(pairs + edge, rows * columns)
    low, wide = shape.head_dim * shape.itemsize, shape.head_dim * max(4, shape.itemsize)
    if schedule.is_backward:
        work *= 2.5
        share = device.backward_share
        gradient = 2 * wide if partial else low  # read and written in float32, or only written
        moved = heads * rows * (2 * low + gradient) + kv_heads * columns * (2 * low + 2 * gradient)
        merged = heads * rows * (low + 2 * wide) + kv_heads * columns * 2 * (low + 2 * wide)
    else:
        share = device.forward_share
        moved = heads * rows * (low + (2 * wide if partial else low)) + kv_heads * columns * 2 * low
        merged = heads * rows * (low + 2 * wide)
    if not (merges and partial):
        merged = 0.0
    matmuls = work / (device.peak(shape.itemsize) * share)
    return matmuls + (moved + merged) / (device.bandwidth * device.traffic_share) + device.launch
