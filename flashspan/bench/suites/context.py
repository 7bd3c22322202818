"""`flashspan bench context`: a LLaMA under every strategy and layout on 1 to 8 ranks, compared with one device.

flashspan bench context --quick          # two minutes on two cores; then `flashspan report`
flashspan bench context --preset llama-2-7b --ranks 1 2 4 --tokens 8192 --dtype bfloat16      # on four GPUs

Each measurement is of the whole model, forward and forward + backward. Computation and communication are also measured
alone (`context_rank.py`). Communication is hidden to the extent that their sum exceeds the time of the step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flashspan.bench.measure import record, sweep
from flashspan.bench.measure.clock import check_repeats
from flashspan.bench.measure.memory import free_bytes
from flashspan.bench.measure.record import Row
from flashspan.bench.report.tables import Table, make, show_tables
from flashspan.bench.suites.context_rank import ALONE, Entry, Measured, Workload, run_on_rank
from flashspan.context.layout import LAYOUTS
from flashspan.context.strategy import STRATEGIES
from flashspan.launch import RankError, Ranks

ALL_CASES = tuple((strategy, layout) for strategy in STRATEGIES for layout in LAYOUTS)
QUICK_CASES = (
    ("ring", "contiguous"),
    ("ring", "zigzag"),
    ("ring", "striped"),
    ("gather", "zigzag"),
    ("helper", "contiguous"),
    ("ulysses", "contiguous"),
)
HEADS = {"heads": 8, "kv_heads": 2}
FULL: dict[str, Any] = {"ranks": (1, 2, 4, 8), "tokens": 4096, "width": 512, "layers": 4, **HEADS, "repeats": 5}
QUICK: dict[str, Any] = {"ranks": (1, 2), "tokens": 1024, "width": 256, "layers": 2, **HEADS, "repeats": 3}
"""The default measurements, without and with --quick."""
KINDS = ("forward", "forward+backward")


def impl_of(case: tuple[str, str]) -> str:
    """The name of a case in rows: strategy and layout, or one device."""
    return " ".join(case).strip()


def make_row(where: dict[str, Any], work: Workload, case: tuple[str, str], kind: str, ranks: int, **rest: Any) -> Row:
    """A row of this benchmark, with or without times."""
    return record.row(
        where, what="context", shape=str(work), impl=impl_of(case), kind=kind, dtype=work.dtype,
        ranks=1 if case[0] == ALONE else ranks,
        tflop=work.tflop(kind), **rest,
    )  # fmt: skip


def hidden_share(computing: float, communication: float, whole: float) -> float:
    """The share of communication that computation hid; nan without communication, or if noise prevents an answer.

    A step includes its computation. If computation alone took more than 5% longer than the step, the load of the
    machine changed between the two measurements.
    """
    if not communication or computing > 1.05 * whole:
        return float("nan")
    return min(1.0, max(0.0, (computing + communication - whole) / communication))


def join(
    where: dict[str, Any], work: Workload, case: tuple[str, str], kind: str, parts: Sequence[Measured], more: Any
) -> Row:
    """One row from the numbers of all ranks: the longest times, the most memory."""
    parts = parts[:1] if case[0] == ALONE else parts
    steps = [max(times) for times in zip(*(part.steps for part in parts), strict=True)]
    computing, communication = max(p.computing for p in parts), max(p.communication for p in parts)
    whole = median(steps)
    speed = work.tflop(kind) * 1e15 / whole  # operations per second
    return make_row(
        where, work, case, kind, len(parts), samples_ms=steps, peak_mib=max(p.peak_mib for p in parts),
        bytes=max(p.sent for p in parts),
        more={
            **more, "tokens": work.tokens, "tokens_per_second": 1e3 * work.tokens / whole,
            "mfu": speed / parts[0].peak_flops, "product_share": parts[0].product_share, "computing_ms": computing,
            "wire_ms": communication, "wire_to_computing": communication / computing,
            "hidden": hidden_share(computing, communication, whole),
            "transport": parts[0].transport, "imbalance": computing * len(parts) / sum(p.computing for p in parts),
            "peak_mib_by_rank": [round(p.peak_mib, 1) for p in parts], "bytes_by_rank": [p.sent for p in parts],
        },
    )  # fmt: skip


class Pool:
    """Ranks that are started when first needed, and kept while their number stays the same.

    On a CPU each rank has the same number of threads for any number of ranks. Otherwise a single rank would use all
    cores, and scaling would be relative to a larger device.
    """

    def __init__(self, device_type: str, most_ranks: int = 1) -> None:
        self.device_type = device_type
        self.threads = max(1, (os.cpu_count() or 1) // most_ranks)
        self.ranks: Ranks | None = None

    def get(self, num: int) -> Ranks:
        if self.ranks is not None and (self.ranks.num_ranks != num or not self.ranks.pids):
            self.close()
        if self.ranks is None:
            backend = "nccl" if self.device_type == "cuda" else "gloo"
            self.ranks = Ranks(num, backend=backend, threads=self.threads, timeout=120)
        return self.ranks

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        self.ranks = None


def jobs_of(
    work: Workload, cases: Sequence[tuple[str, str]], world_sizes: Sequence[int], repeats: int, pool: Pool
) -> list[sweep.Job]:
    """Jobs for strong scaling with every case, and for weak scaling (tokens grow with the ranks) with the zigzag ring.

    A job has all cases on one number of ranks; they take turns. The job with the most ranks also has the case of one
    device, with the whole sequence and with one rank's part of it.
    """
    where = record.environment(torch.device(pool.device_type))
    settings = {"repeats": repeats, "threads": pool.threads}  # a row with other settings is measured again
    jobs = []
    most = max(world_sizes)
    for num in sorted(world_sizes, reverse=True):  # the whole sequence first: reports find the command in it
        entries: list[Entry] = [(work, case) for case in cases if num > 1]
        if num == most and 1 in world_sizes:
            entries = [(work, (ALONE, "")), *entries]
            if most > 1:
                entries.append((replace(work, tokens=work.tokens // most), (ALONE, "")))
        elif 1 < num < most:
            entries.append((replace(work, tokens=work.tokens // most * num), ("ring", "zigzag")))
        if entries:
            jobs.append(_job(pool, where, work, entries, num, settings))
    return jobs


def _job(
    pool: Pool, where: dict[str, Any], whole: Workload, entries: Sequence[Entry], num: int, settings: dict[str, int]
) -> sweep.Job:
    """Entries that take turns. If they fail, each half is measured alone, so that one failure costs few rows."""

    def some(chosen: Sequence[Entry]) -> sweep.Job:
        return _job(pool, where, whole, chosen, num, settings)

    def part(rows: Sequence[Row]) -> sweep.Job:
        named = {(row.shape, row.impl) for row in rows}
        return some([(work, case) for work, case in entries if (str(work), impl_of(case)) in named])

    def measure() -> list[Row]:
        given = (tuple(entries), KINDS, settings["repeats"], pool.device_type)
        try:
            results = pool.get(num).run(run_on_rank, *given, timeout=600 * len(entries))
        except (RankError, TimeoutError):
            if len(entries) == 1:
                raise
            half = len(entries) // 2
            return [row for group in (entries[:half], entries[half:]) for row in sweep.attempt_here(some(group))]
        rows = []
        for work, case in entries:
            more = {**settings, "scaling": "strong" if work == whole else "weak"}
            for kind in KINDS:
                rows.append(join(where, work, case, kind, [result[work, case][kind] for result in results], more))
        return rows

    expected = tuple(make_row(where, *entry, kind, num, more=settings) for entry in entries for kind in KINDS)
    return sweep.Job(expected, measure, part=part)


def table(rows: Sequence[Row], of_what: str = "") -> Table:
    """A table with a line per case and pass of one model and dtype, compared with one device on the same tokens."""
    alone = {(row.shape, row.kind): row.p50_ms for row in rows if row.impl == ALONE and row.ok}

    def speedup(row: Row) -> object:
        base = alone.get((row.shape, row.kind))
        return f"{base / row.p50_ms:.2f}x" if base and row.ok else ""

    def known(value: float | None) -> bool:
        return value is not None and value == value

    def percent(name: str) -> Callable[[Row], object]:
        return lambda row: f"{100 * row.more[name]:.0f}%" if row.ok and known(row.more.get(name)) else ""

    return make(
        f"one device against every strategy{of_what}",
        rows,
        {
            "strategy": lambda row: row.impl,
            "ranks": lambda row: row.ranks,
            "pass": lambda row: row.kind,
            "tokens": lambda row: row.more.get("tokens", ""),
            "ms": lambda row: row.p50_ms if row.ok else row.status,
            "tokens/s": lambda row: f"{row.more.get('tokens_per_second', 0):,.0f}" if row.ok else "",
            "speed-up": speedup,
            "MFU": percent("mfu"),
            "in matmuls": percent("product_share"),
            "comm/compute": lambda row: row.more.get("wire_to_computing"),
            "hidden": percent("hidden"),
            "sent MiB": lambda row: row.bytes / 2**20,
            "peak MiB": lambda row: row.peak_mib,
        },
        num_names=3,
    )


def refuse_large_model(work: Workload, ranks: int, device_type: str) -> None:
    """ValueError for invalid sizes, or if the models of all ranks exceed memory, before any rank is started.

    Every rank has the whole model, since only attention is split. CPU ranks share the machine's memory.
    """
    needed = 8.0 * work.config().num_parameters * (1 if device_type == "cuda" else ranks)
    free = free_bytes(device_type)
    if free is not None and needed > free:
        name = str(work).rsplit(", ", 1)[0]
        raise ValueError(
            f"every rank has the whole model: {name} on {ranks} ranks needs {needed / 2**30:.1f} GiB for its weights "
            f"and gradients, but {free / 2**30:.1f} are available; use fewer --ranks, a smaller model or a GPU per rank"
        )


def bench_context(
    *,
    quick: bool = False,
    ranks: tuple[int, ...] | None = None,
    tokens: int | None = None,
    preset: str | None = None,
    width: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    dtype: str = "float32",
    repeats: int | None = None,
    folder: Path = record.FOLDER,
    again: bool = False,
) -> int:
    """Every strategy and layout compared with one device: latency, tokens/s, MFU, communication, memory, scaling.

    Runs a LLaMA on 1 to 8 ranks (GPUs if there are enough, CPU processes otherwise) and appends a row for each
    strategy, layout, number of ranks and pass to FOLDER/context.jsonl. Cases with the same number of ranks are measured
    in turns. A repeated command measures only what is missing. `flashspan report` makes a page of the rows.

    Args:
        quick: Only six pairs of strategy and layout, and smaller defaults: model, 1 and 2 ranks. Takes two
            minutes on two cores.
        ranks: Numbers of ranks, each 1 to 8; by default 1 2 4 8, with --quick 1 2.
        tokens: Number of tokens in the whole sequence; by default 4096, with --quick 1024.
        preset: Name of a model, such as llama-2-7b or llama-3.2-1b, instead of the four sizes below.
        width: Hidden size; by default 512, with --quick 256.
        layers: Number of layers; by default 4, with --quick 2.
        heads: Number of query heads; by default 8.
        kv_heads: Number of key and value heads; by default 2.
        dtype: Dtype: float32, or bfloat16 or float16 for autocast.
        repeats: Number of timed steps; by default 5, with --quick 3.
        folder: Folder for the rows.
        again: Repetition of measurements that the folder already has.
    """
    usual = QUICK if quick else FULL
    ranks = usual["ranks"] if ranks is None else ranks
    tokens = usual["tokens"] if tokens is None else tokens
    repeats = usual["repeats"] if repeats is None else repeats
    if not ranks or not all(1 <= num <= 8 for num in ranks):
        raise ValueError(f"bench context runs on 1 to 8 ranks: got {' '.join(map(str, ranks)) or 'none'}")
    if tokens < 2 * max(ranks):
        raise ValueError(f"bench context needs 2 tokens per rank: got {tokens} tokens on {max(ranks)} ranks")
    check_repeats(1, repeats=repeats)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be float32, bfloat16 or float16: got {dtype!r}")
    sizes = {"width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads}
    given = {name: value for name, value in sizes.items() if value is not None}
    if preset is None:
        chosen = usual | given
        work = Workload(chosen["width"], chosen["layers"], chosen["heads"], chosen["kv_heads"], tokens, dtype)
    elif not given:
        work = Workload.of_preset(preset, tokens, dtype)
    else:
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
        raise ValueError(f"--preset {preset} sets all sizes of the model: leave out {options}, or --preset")
    device_type = "cuda" if torch.cuda.device_count() >= max(ranks) else "cpu"
    refuse_large_model(work, max(ranks), device_type)
    pool = Pool(device_type, max(ranks))
    path = folder / "context.jsonl"
    try:
        jobs = jobs_of(work, QUICK_CASES if quick else ALL_CASES, sorted(set(ranks)), repeats, pool)
        outcome = sweep.run(jobs, path, again=again, title="context")
    finally:
        pool.close()
    note = f"{outcome.note(path)}, {len(KINDS)} rows per measurement; `flashspan report {folder}` makes a page of them"
    show_tables([table(outcome.rows)], note)
    return 0
