"""`flashspan bench context`: one device against every strategy and layout, on 1 to 8 ranks, with a LLaMA around them.

flashspan bench context --quick          # two minutes on two cores; then `flashspan report`

Each measurement is of the whole model, forward and forward + backward. What the wire costs is measured, not guessed:
the same step with the wire switched off is the computing, the same attention calls with the computing switched off are
the communication, and what the two sum to beyond the step itself was hidden. What is compared takes turns, step by
step, so that whatever else the machine does hits all of it alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.attention import attention
from flashspan.bench import memory, record, sweep, trace
from flashspan.bench.check import over_all_ranks
from flashspan.bench.clock import in_turns, timed
from flashspan.bench.record import Row
from flashspan.bench.tables import Table, make, show_tables
from flashspan.context.layout import LAYOUTS
from flashspan.context.strategy import STRATEGIES, ContextAttention
from flashspan.kernels.contract import Carry, LocalAttention
from flashspan.launch import RankError, Ranks
from flashspan.model import Llama, LlamaConfig
from flashspan.train.metrics import peak_flops

ALL_CASES = tuple((strategy, layout) for strategy in STRATEGIES for layout in LAYOUTS)
QUICK_CASES = (
    ("ring", "contiguous"),
    ("ring", "zigzag"),
    ("ring", "striped"),
    ("gather", "zigzag"),
    ("helper", "contiguous"),
    ("ulysses", "contiguous"),
)
FULL: dict[str, Any] = {"ranks": (1, 2, 4, 8), "tokens": 4096, "width": 512, "layers": 4, "repeats": 5}
QUICK: dict[str, Any] = {"ranks": (1, 2), "tokens": 1024, "width": 256, "layers": 2, "repeats": 3}
"""What is measured unless told otherwise, without --quick and with it."""
ALONE = "one device"
KINDS = ("forward", "forward+backward")


@dataclass(frozen=True)
class Workload:
    """A model and the tokens it sees, all ranks together."""

    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tokens: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.num_layers}x{self.width}, {self.num_heads}/{self.num_kv_heads} heads, {self.tokens} tokens"

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            512, self.width, self.num_layers, self.num_heads, self.num_kv_heads, 64 * ((8 * self.width // 3 + 63) // 64)
        )

    def tflop(self, kind: str) -> float:
        whole = self.config().flops_per_token(self.tokens) * self.tokens / 1e12
        return whole / 3 if kind == "forward" else whole


class Switch:
    """LocalAttention and wires that can be switched off: then they return at once, with room and nothing in it."""

    def __init__(self, attend: ContextAttention) -> None:
        self.computes = self.sends = True
        self.local: LocalAttention = attend.local
        attend.local = self
        for wire in {id(w): w for w in (attend.outer, attend.inner)}.values():
            setattr(wire, "post", self._gate(wire.post))  # noqa: B010 - a method of one object
            setattr(wire, "wait", self._gate(wire.wait))  # noqa: B010

    def _gate(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda argument: call(argument) if self.sends else None

    def without(self, which: Literal["computes", "sends"], call: Callable[[], None]) -> None:
        """A call with one of the two switched off."""
        setattr(self, which, False)
        try:
            call()
        finally:
            setattr(self, which, True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Carry:
        if self.computes:
            return self.local.forward(q, k, v, **rest)
        carry = rest.get("carry")
        exact = torch.promote_types(q.dtype, torch.float32)
        return carry or Carry(q.new_empty(q.shape, dtype=rest["out_dtype"]), q.new_empty(q.shape[:-1], dtype=exact))

    def backward(self, *args: Any, **rest: Any) -> None:
        if self.computes:
            self.local.backward(*args, **rest)


@dataclass(frozen=True)
class Measured:
    """One rank's numbers of one case and pass, in milliseconds; what only rank 0 knows is nan on others."""

    steps: list[float]
    computing: float
    wire: float
    peak_mib: float
    sent: float
    product_share: float
    peak_flops: float


class Contender:
    """A case on this rank: its attention, its part of the tokens, and steps of a model that all cases share."""

    def __init__(self, case: tuple[str, str], work: Workload, model: Llama, tokens: Tensor) -> None:
        self.work, self.model, self.device = work, model, tokens.device
        self.attend = self.switch = None
        self.num_ranks = 1 if case[0] == ALONE else dist.get_world_size()
        self.waits = case[0] == ALONE and dist.get_rank() > 0  # one device is rank 0's
        self.tokens, self.targets = tokens, tokens.roll(-1, 1)
        self.positions = torch.arange(work.tokens, device=self.device)
        if case[0] != ALONE:
            self.attend = over_all_ranks(*case, self.device.type, num_tokens=work.tokens)
            self.switch = Switch(self.attend)
            self.tokens, self.targets = (self.attend.shard(x, 1) for x in (self.tokens, self.targets))
            self.positions = self.attend.positions(work.tokens, self.device)

    def step(self, kind: str) -> None:
        if self.waits:
            return
        model, dtype = self.model, self.work.dtype
        model.attend = self.attend or attention
        cast = torch.autocast(self.device.type, getattr(torch, dtype), enabled=dtype != "float32")
        with torch.set_grad_enabled(kind != "forward"), cast:
            loss = model.loss(model(self.tokens, self.positions), self.targets)
        if kind != "forward":
            loss.backward()
            model.zero_grad()

    def turns(self, kind: str) -> dict[str, Callable[[], None]]:
        """What is timed: the step, the step without its wire, its attention without computing."""
        step = partial(self.step, kind)
        if self.attend is None or self.switch is None:
            return {"step": step}
        calls = _attention_calls(self.attend, kind, self.work, self.device)
        return {
            "step": step,
            "computing": partial(self.switch.without, "sends", step),
            "wire": partial(self.switch.without, "computes", calls),
        }

    def watch(self, kind: str) -> tuple[float, float, float]:
        """Of a step, after one that warms up and shakes hands: peak MiB, bytes sent, the share of its products."""
        self.step(kind)
        timeline = memory.Timeline(held=sum(p.nbytes for p in self.model.parameters()) + 3 * self.tokens.nbytes)
        before = self.attend.bytes_sent if self.attend else 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with trace.profiled(self.device, memory=True) as profiler:
            self.step(kind)
        memory.fill(timeline, profiler, self.device)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else timeline.peak
        share = trace.share(trace.kernels(profiler, self.device), "product", "attention")
        return peak / 2**20, (self.attend.bytes_sent if self.attend else 0) - before, share


def run_on_rank(
    work: Workload, cases: Sequence[tuple[str, str]], kinds: Sequence[str], repeats: int, device_type: str
) -> dict[tuple[str, str], dict[str, Measured]]:
    """On a rank: the measurements of cases, by pass. All of it takes turns: passes, their computing and their wire."""
    device = torch.device(device_type, torch.cuda.current_device() if device_type == "cuda" else 0)
    torch.manual_seed(0)
    tokens = torch.randint(work.config().vocab_size, (1, work.tokens), device=device)
    with device:
        model = Llama(work.config(), attention=attention)
    contenders, watched = {}, {}
    for case in cases:  # before the next one is there: a GPU's peak counts all that is held
        contenders[case] = Contender(case, work, model, tokens)
        watched[case] = {kind: contenders[case].watch(kind) for kind in kinds}
        dist.barrier()
    nums = {contender.num_ranks for contender in contenders.values()}
    flops = {num: peak_flops(device, num) if dist.get_rank() == 0 else float("nan") for num in nums}
    clocks = {
        (case, kind, name): partial(timed, call, device, together=True)
        for case in cases
        for kind in kinds
        for name, call in contenders[case].turns(kind).items()
    }
    times = {key: [ms for ms, _ in results] for key, results in in_turns(clocks, repeats).items()}

    def measured(case: tuple[str, str], kind: str) -> Measured:
        steps = times[case, kind, "step"]
        computing = median(times.get((case, kind, "computing"), steps))
        wire = median(times.get((case, kind, "wire"), [0.0]))
        return Measured(steps, computing, wire, *watched[case][kind], flops[contenders[case].num_ranks])

    return {case: {kind: measured(case, kind) for kind in kinds} for case in cases}


def _attention_calls(attend: ContextAttention, kind: str, work: Workload, device: torch.device) -> Callable[[], None]:
    """The attention of every layer, called as the model calls it."""
    config, dtype = work.config(), getattr(torch, work.dtype)
    mine = attend.placement(work.tokens).sizes[attend.rank]
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    q, k, v = (torch.randn(1, n, mine, config.head_dim, device=device, dtype=dtype) for n in heads)
    for x in (q, k, v):
        x.requires_grad_(kind != "forward")

    def calls() -> None:
        for _ in range(config.num_layers):
            out = attend(q, k, v, causal=True)
            if kind != "forward":
                out.backward(out.detach())

    return calls


def impl_of(case: tuple[str, str]) -> str:
    """What a row calls a case: strategy and layout, or one device."""
    return " ".join(case).strip()


def make_row(where: dict[str, Any], work: Workload, case: tuple[str, str], kind: str, ranks: int, **rest: Any) -> Row:
    """A row of this bench, with or without times."""
    return record.row(
        where, what="context", shape=str(work), impl=impl_of(case), kind=kind, dtype=work.dtype,
        ranks=1 if case[0] == ALONE else ranks,
        tflop=work.tflop(kind), **rest,
    )  # fmt: skip


def hidden_share(computing: float, wire: float, whole: float) -> float:
    """The share of the wire's time that computing hid; nan without a wire, or where noise would be told as a share.

    The step contains its computing: if the computing alone took longer, by more than a little, the two were measured
    on a machine that was not equally busy.
    """
    if not wire or computing > 1.05 * whole:
        return float("nan")
    return min(1.0, max(0.0, (computing + wire - whole) / wire))


def join(
    where: dict[str, Any], work: Workload, case: tuple[str, str], kind: str, parts: Sequence[Measured], more: Any
) -> Row:
    """One row from every rank's numbers: the slowest rank's times, the largest rank's memory."""
    parts = parts[:1] if case[0] == ALONE else parts
    steps = [max(times) for times in zip(*(part.steps for part in parts), strict=True)]
    computing, wire = max(p.computing for p in parts), max(p.wire for p in parts)
    whole = median(steps)
    speed = work.tflop(kind) * 1e15 / whole  # operations per second
    return make_row(
        where, work, case, kind, len(parts), samples_ms=steps, peak_mib=max(p.peak_mib for p in parts),
        bytes=max(p.sent for p in parts),
        more={
            **more, "tokens": work.tokens, "tokens_per_second": 1e3 * work.tokens / whole,
            "mfu": speed / parts[0].peak_flops, "product_share": parts[0].product_share, "computing_ms": computing,
            "wire_ms": wire, "wire_to_computing": wire / computing,
            "hidden": hidden_share(computing, wire, whole),
            "imbalance": computing * len(parts) / sum(p.computing for p in parts),
            "peak_mib_by_rank": [round(p.peak_mib, 1) for p in parts], "bytes_by_rank": [p.sent for p in parts],
        },
    )  # fmt: skip


class Pool:
    """Ranks that are started when first needed and kept while their number stays the same.

    On the CPU a device is so many threads, whatever the number of ranks: else one rank would get all cores, and
    scaling would be measured against a larger device.
    """

    def __init__(self, device_type: str, most_ranks: int = 1) -> None:
        self.device_type = device_type
        self.threads = max(1, (os.cpu_count() or 1) // most_ranks)
        self.ranks: Ranks | None = None

    def get(self, num: int) -> Ranks:
        if self.ranks is not None and (self.ranks.num_ranks != num or not self.ranks._processes):
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
    """Strong scaling with every case, weak scaling (tokens grow with the ranks) with the zigzag ring.

    A job is all cases of one number of ranks, which take turns; one device takes them with those of the most ranks.
    """
    where = record.environment(torch.device(pool.device_type))
    settings = {"repeats": repeats, "threads": pool.threads}  # a row with others is measured again
    jobs = []
    most = max(world_sizes)
    for num in sorted(world_sizes, reverse=True):  # the whole sequence first: a page reads its command there
        small = Workload(**{**work.__dict__, "tokens": work.tokens // most * num})
        alone = [(ALONE, "")] if num == most and 1 in world_sizes else []
        sets = [("strong", work, [*alone, *(cases if num > 1 else ())])]
        if most > 1 and num != most:
            sets.append(("weak", small, [(ALONE, "")] if num == 1 else [("ring", "zigzag")]))
        for scaling, tokens, chosen in sets:
            if chosen:
                jobs.append(_job(pool, where, tokens, chosen, num, settings, scaling))
    return jobs


def _job(
    pool: Pool,
    where: dict[str, Any],
    work: Workload,
    cases: Sequence[tuple[str, str]],
    num: int,
    settings: dict[str, int],
    scaling: str,
) -> sweep.Job:
    """Cases that take turns. If they fail, each half of them by itself: what one cannot do must not cost the others."""

    def some(chosen: Sequence[tuple[str, str]]) -> sweep.Job:
        return _job(pool, where, work, chosen, num, settings, scaling)

    def part(rows: Sequence[Row]) -> sweep.Job:
        names = {row.impl for row in rows}
        return some([case for case in cases if impl_of(case) in names])

    def measure() -> list[Row]:
        given = (work, tuple(cases), KINDS, settings["repeats"], pool.device_type)
        try:
            results = pool.get(num).run(run_on_rank, *given, timeout=600 * len(cases))
        except (RankError, TimeoutError):
            if len(cases) == 1:
                raise
            half = len(cases) // 2
            return [row for group in (cases[:half], cases[half:]) for row in sweep.attempt_here(some(group))]
        more = {**settings, "scaling": scaling}
        return [
            join(where, work, case, kind, [result[case][kind] for result in results], more)
            for case in cases
            for kind in KINDS
        ]

    expected = tuple(make_row(where, work, case, kind, num, more=settings) for case in cases for kind in KINDS)
    return sweep.Job(expected, measure, part=part)


def table(rows: Sequence[Row], of_what: str = "") -> Table:
    """A line per case and pass of one model and dtype, beside one device on the same tokens."""
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
            "tokens/s": lambda row: float(round(row.more.get("tokens_per_second", 0))) if row.ok else "",
            "speed-up": speedup,
            "MFU": percent("mfu"),
            "in products": percent("product_share"),
            "wire/compute": lambda row: row.more.get("wire_to_computing"),
            "hidden": percent("hidden"),
            "sent MiB": lambda row: row.bytes / 2**20,
            "peak MiB": lambda row: row.peak_mib,
        },
        num_names=3,
    )


def bench_context(
    *,
    quick: bool = False,
    ranks: tuple[int, ...] | None = None,
    tokens: int | None = None,
    width: int | None = None,
    layers: int | None = None,
    heads: int = 8,
    kv_heads: int = 2,
    dtype: str = "float32",
    repeats: int | None = None,
    folder: Path = record.FOLDER,
    again: bool = False,
) -> int:
    """One device against every strategy and layout: latency, tokens/s, MFU, wire, memory, scaling.

    Runs a LLaMA on 1 to 8 ranks (GPUs where there are enough, CPU processes otherwise) and appends a row for each
    strategy, layout, number of ranks and pass to FOLDER/context.jsonl. All on a number of ranks take turns. Run again,
    it measures only what is missing. `flashspan report` makes a page of it.

    Args:
        quick: six of the strategies and layouts and, unless given, a smaller model on 1 and 2 ranks; two minutes on
            two cores.
        ranks: the numbers of ranks, each 1 to 8; unless given 1 2 4 8, with --quick 1 2.
        tokens: length of the whole sequence; unless given 4096, with --quick 1024.
        width: of the model; unless given 512, with --quick 256.
        layers: of the model; unless given 4, with --quick 2.
        heads: query heads.
        kv_heads: key and value heads.
        dtype: float32, or bfloat16 for autocast.
        repeats: timed steps of each; unless given 5, with --quick 3.
        folder: where the rows go.
        again: measure what is there, too.
    """
    usual = QUICK if quick else FULL
    ranks = usual["ranks"] if ranks is None else ranks
    tokens = usual["tokens"] if tokens is None else tokens
    width = usual["width"] if width is None else width
    layers = usual["layers"] if layers is None else layers
    repeats = usual["repeats"] if repeats is None else repeats
    if not ranks or not all(1 <= num <= 8 for num in ranks):
        raise ValueError(f"bench context runs on 1 to 8 ranks: got {' '.join(map(str, ranks)) or 'none'}")
    if tokens < 2 * max(ranks) or repeats < 1:
        raise ValueError(f"bench context needs 2 tokens per rank and 1 repeat or more: got {tokens} and {repeats}")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be float32, bfloat16 or float16: got {dtype!r}")
    work = Workload(width, layers, heads, kv_heads, tokens, dtype)
    work.config()  # refuses impossible sizes
    pool = Pool("cuda" if torch.cuda.device_count() >= max(ranks) else "cpu", max(ranks))
    path = folder / "context.jsonl"
    try:
        jobs = jobs_of(work, QUICK_CASES if quick else ALL_CASES, sorted(set(ranks)), repeats, pool)
        outcome = sweep.run(jobs, path, again=again, title="context")
    finally:
        pool.close()
    note = f"{outcome.num_measured} measured, rows in {path}; `flashspan report {folder}` makes a page of them"
    show_tables([table(outcome.rows)], note)
    return 0
