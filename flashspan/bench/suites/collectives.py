"""`flashspan bench collectives`: each primitive's time by size, and the latency and bandwidth that fit it best.

flashspan bench collectives --ranks 2 4
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.bench.measure import record, sweep
from flashspan.bench.measure.clock import check_repeats, here, timed
from flashspan.bench.measure.record import Row
from flashspan.bench.report.tables import Table, make, show_tables
from flashspan.bench.suites.context import Pool
from flashspan.plan.calibrate import fit_link

SIZES = tuple(4**power for power in range(5, 13))  # 1 KiB to 16 MiB
PRIMITIVES = ("send-receive", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")


def operation(name: str, buffer: Tensor) -> Callable[[], None]:
    """A function that runs the primitive on a float32 buffer; the size of a collective is that of a rank's input."""
    num, rank = dist.get_world_size(), dist.get_rank()
    other = torch.empty_like(buffer)
    whole = buffer.new_empty(num * buffer.numel())
    part = buffer.new_empty(max(1, buffer.numel() // num))
    even = buffer[: num * part.numel()]
    traded = torch.empty_like(even)

    def exchange() -> None:
        ops = [
            dist.P2POp(dist.isend, buffer, (rank + 1) % num),
            dist.P2POp(dist.irecv, other, (rank - 1) % num),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    calls: dict[str, Callable[[], Any]] = {
        "send-receive": exchange,
        "all-reduce": lambda: dist.all_reduce(buffer),
        "all-gather": lambda: _newer("all_gather_single", dist.all_gather_into_tensor)(whole, buffer),
        "reduce-scatter": lambda: _newer("reduce_scatter_single", dist.reduce_scatter_tensor)(part, even),
        "all-to-all": lambda: dist.all_to_all_single(traded, even),
        "broadcast": lambda: dist.broadcast(buffer, 0),
    }
    return calls[name]


def _newer(name: str, older: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the new name if this PyTorch has it (its old name would warn), else `older`."""
    found: Callable[..., Any] = getattr(dist, name, older)
    return found


def run_on_rank(name: str, sizes: Sequence[int], repeats: int, device_type: str) -> dict[int, list[float]]:
    """Run on each rank: milliseconds of every run, by size."""
    device = here(device_type)
    found = {}
    for size in sizes:
        call = operation(name, torch.zeros(size // 4, device=device))
        call()
        found[size] = [timed(call, device, together=True)[0] for _ in range(repeats)]
    return found


def make_row(
    where: dict[str, Any], name: str, size: int, ranks: int, samples: Sequence[float] = (), **more: Any
) -> Row:
    return record.row(
        where, what="collective", shape=f"{size} bytes", impl=name, kind="collective", dtype="float32", ranks=ranks,
        samples_ms=samples, bytes=float(size), more=more,
    )  # fmt: skip


def job(where: dict[str, Any], name: str, sizes: Sequence[int], ranks: int, repeats: int, pool: Pool) -> sweep.Job:
    """A job for all sizes of a primitive, and their fit."""

    def measure() -> list[Row]:
        results = pool.get(ranks).run(run_on_rank, name, tuple(sizes), repeats, pool.device_type, timeout=300)
        slowest = {size: [max(t) for t in zip(*(r[size] for r in results), strict=True)] for size in sizes}
        medians = {size: record.summarise(times)["p50_ms"] / 1e3 for size, times in slowest.items()}
        link = fit_link(name, list(medians), list(medians.values()))
        fit = {"alpha_us": 1e6 * link.latency, "gb_per_s": link.bandwidth / 1e9}
        return [
            make_row(
                where, name, size, ranks, times, repeats=repeats, **fit, gb_per_s_measured=size / medians[size] / 1e9
            )
            for size, times in slowest.items()
        ]

    return sweep.Job(tuple(make_row(where, name, size, ranks, repeats=repeats) for size in sizes), measure)


def table(rows: Sequence[Row]) -> Table:
    """A table of the fit of every primitive, with the times of its smallest and largest message."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.impl, row.ranks), []).append(row)
    last = [max(group, key=lambda row: row.bytes) for group in groups.values()]
    first = {key: min(group, key=lambda row: row.bytes) for key, group in groups.items()}
    return make(
        "time = latency + bytes / bandwidth",
        last,
        {
            "primitive": lambda row: row.impl,
            "ranks": lambda row: row.ranks,
            "smallest, ms": lambda row: first[row.impl, row.ranks].p50_ms,
            "largest, ms": lambda row: row.p50_ms if row.ok else row.status,
            "largest, MiB": lambda row: row.bytes / 2**20,
            "latency, µs": lambda row: row.more.get("alpha_us"),
            "bandwidth, GB/s": lambda row: row.more.get("gb_per_s"),
        },
        num_names=2,
    )


def bench_collectives(
    *,
    ranks: tuple[int, ...] = (2,),
    sizes: tuple[int, ...] = SIZES,
    repeats: int = 20,
    folder: Path = record.FOLDER,
    again: bool = False,
) -> int:
    """Latency and bandwidth of each primitive by size, and the fit that the planner uses.

    Args:
        ranks: Numbers of ranks.
        sizes: Bytes that each rank contributes; multiples of 4.
        repeats: Number of timed runs.
        folder: Folder for the rows.
        again: Repetition of measurements that the folder already has.
    """
    if not ranks or min(ranks) < 2 or max(ranks) > 64:
        raise ValueError(f"collectives need 2 to 64 ranks: got {' '.join(map(str, ranks)) or 'none'}")
    if len(sizes) < 2 or any(size < 4 * max(ranks) or size % 4 for size in sizes):
        raise ValueError(
            "--sizes must be two or more multiples of 4, each at least 4 bytes per rank: "
            f"got {' '.join(map(str, sizes)) or 'none'} on {max(ranks)} ranks; for example --sizes 1024 65536"
        )
    check_repeats(1, repeats=repeats)
    pool = Pool("cuda" if torch.cuda.device_count() >= max(ranks) else "cpu", max(ranks))
    where = record.environment(torch.device(pool.device_type))
    path = folder / "collectives.jsonl"
    jobs = [job(where, name, sizes, num, repeats, pool) for num in ranks for name in PRIMITIVES]
    try:
        outcome = sweep.run(jobs, path, again=again, title="collectives")
    finally:
        pool.close()
    show_tables([table(outcome.rows)], outcome.note(path))
    return 0
