"""`flashspan check --preflight`: before a long run, whether a cluster computes and communicates as it should.

flashspan check --preflight                                       on every GPU here, or 4 CPU ranks
flashspan check --preflight --ranks 4 --share-gpu                 4 ranks on one GPU
torchrun --nproc-per-node 8 -m flashspan.check --preflight        on the ranks that torchrun started

It compares a strategy with one device, measures every link, measures how much of the transfers attention hides, and
names the ranks and links that are wrong or slow. Exit code 1 if there are any.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from flashspan.bench.check import (
    BOUNDS,
    Dtype,
    Layout,
    Problem,
    Result,
    Strategy,
    at_length,
    compare,
    over_all_ranks,
    truth,
    under_torchrun,
    waiting,
)
from flashspan.bench.clock import here
from flashspan.bench.links import (
    EVERY_PAIR,
    MESSAGE,
    PARCELS,
    Link,
    Overlap,
    from_all,
    measure_empty_step,
    measure_links,
    measure_overlap,
    pairs_of,
    schedule_of,
)
from flashspan.bench.memory import refuse_shared_gpu
from flashspan.context.exchange import ExchangeError
from flashspan.context.layout import LAYOUTS
from flashspan.context.strategy import STRATEGIES, ContextAttention, context_parallel
from flashspan.context.symmetric import TRANSPORTS, Transport
from flashspan.kernels.masks import EVERYTHING
from flashspan.launch import RankError, Ranks, SilentRank, check_num_ranks, joined, raise_plainly
from flashspan.plan.devices import DEVICES, is_named, make_cluster
from flashspan.plan.devices import Link as LinkKind
from flashspan.plan.simulate import simulate
from flashspan.train.meeting import name_the_silent

SLOW = 0.5
"""Of the speed of the others, or of what the planner expects: less is a fault."""
BUSY = 0.2
"""The same inside a host where ranks share its cores or its GPU, and make each other's links slow by turns."""
HIDDEN = 0.5
"""The least part of a ring's transfers that attention must hide, on GPUs of their own."""
PATIENCE = 60.0
"""Seconds before a transfer that does not arrive is an error that names its rank."""
LISTED = 8
"""Slow links that are named one by one."""
HEAD_DIM = 64


@dataclass(frozen=True)
class Job:
    """What the preflight is of."""

    strategy: Strategy
    layout: Layout
    dtype: str
    transport: Transport
    share_gpu: bool


@dataclass(frozen=True)
class Planned:
    """The planner's expectation: the link inside a host, and seconds of the pass whose overlap was measured, its
    attention alone and all of it; 0 where it knows nothing."""

    device: str
    link: LinkKind
    attention: float
    both: float


@dataclass(frozen=True)
class Report:
    """What was measured. `alone` are each rank's errors by itself, with no other rank."""

    job: Job
    tokens: int
    device: str
    transport: str
    hosts: tuple[str, ...]
    parity: Result
    alone: tuple[Result, ...]
    links: tuple[Link, ...] = ()
    empty_step: float = 0.0
    overlap: Overlap | None = None
    planned: Planned | None = None

    @property
    def own_gpus(self) -> bool:
        return self.device != "cpu" and not self.job.share_gpu


def preflight(
    *,
    ranks: int | None = None,
    strategy: Strategy = "ring",
    layout: Layout = "zigzag",
    dtype: Dtype | None = None,
    transport: Transport = "auto",
    share_gpu: bool = False,
) -> int:
    """Check a cluster before a long run: results, links and overlap, in about a minute.

    Compares one strategy with one device in float64, measures the bandwidth of every link with all of them busy,
    measures how much of the transfers attention hides, and compares with the planner. Names the ranks and links that
    are wrong or slow. Exit code 1 if there are any.

    Example: torchrun --nproc-per-node 8 -m flashspan.check --preflight

    Args:
        ranks: ranks to start; by default one for each GPU, or 4 on CPUs. Under torchrun, the ranks are torchrun's.
        strategy: strategy to check.
        layout: layout to check.
        dtype: of q, k and v; by default bfloat16 on GPUs and float32 on CPUs.
        transport: symmetric (copies between GPUs of one host), group (NCCL or gloo), or auto.
        share_gpu: all ranks on the first GPU.
    """
    for name, value, choices in (
        ("strategy", strategy, STRATEGIES),
        ("layout", layout, LAYOUTS),
        ("transport", transport, TRANSPORTS),
        ("dtype", dtype, (*BOUNDS, None)),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(filter(None, choices))}: got {value!r}")
    by_torchrun = under_torchrun(share_gpu)
    num_gpus = torch.cuda.device_count()
    num_ranks = ranks if ranks is not None else (num_gpus if num_gpus and not share_gpu else 4)
    cuda = num_gpus > 0 if by_torchrun else share_gpu or num_ranks <= num_gpus
    job = Job(strategy, layout, dtype or ("bfloat16" if cuda else "float32"), transport, share_gpu)
    try:
        report = _join(job) if by_torchrun else _start(job, num_ranks, cuda)
    except (RankError, SilentRank, ExchangeError, TimeoutError) as error:
        if isinstance(error, RankError):
            raise_plainly(error)
        cause = error.report if isinstance(error, RankError) else str(error)
        print(f"verdict: FAILED, the preflight did not end: {cause}", flush=True)
        return 1
    if report is None:  # rank 0 prints
        return 0
    faults = judge(report)
    print_report(report, faults)
    return 1 if faults else 0


def _start(job: Job, num_ranks: int, cuda: bool) -> Report:
    check_num_ranks(num_ranks, "check")
    if job.share_gpu:
        refuse_shared_gpu(num_ranks, 6 * PARCELS * MESSAGE["cuda"], "lower --ranks")
    backend = "nccl" if cuda and not job.share_gpu else "gloo"
    pool = Ranks(num_ranks, backend=backend, timeout=PATIENCE, share_gpu=job.share_gpu)
    with waiting(f"preflight of {num_ranks} ranks"), pool:
        report: Report = pool.run(run_on_rank, job, "cuda" if cuda else "cpu", timeout=600)[0]
    return report


def _join(job: Job) -> Report | None:
    with joined(timeout=PATIENCE) as device_type:
        first = dist.get_rank() == 0
        with waiting(f"preflight of {dist.get_world_size()} ranks") if first else contextlib.nullcontext():
            return run_on_rank(job, device_type)


def run_on_rank(job: Job, device_type: str) -> Report | None:
    """On a rank: all measurements. Rank 0 returns the report."""
    with name_the_silent("the preflight"):
        report = _measure(job, here(device_type))
    return report if dist.get_rank() == 0 else None


def _measure(job: Job, device: torch.device) -> Report:
    dtype, world, hosts = getattr(torch, job.dtype), dist.get_world_size(), from_all(socket.gethostname())
    options: dict[str, Any] = {"num_tokens": max(1000, 16 * world + 1)}
    problem = Problem((), options["num_tokens"], 8, 2, HEAD_DIM, True, job.dtype, seed=0)
    inputs = problem.inputs(device)
    exact = truth(problem, inputs)

    def errors(attend: ContextAttention) -> Result:
        found = compare(attend, problem, inputs, exact)
        assert found is not None
        return Result(job.strategy, job.layout, *found)

    alone = from_all(errors(context_parallel(None, **options)))
    options |= {"transport": job.transport, "timeout": PATIENCE}
    if job.strategy == "double_ring" and (num_hosts := even_hosts(hosts)) > 1:
        options["sizes"] = (num_hosts, world // num_hosts)
    if job.strategy == "double_ring" and dist.get_backend() == "nccl":
        options["slow_group"] = dist.new_group()  # so that its two levels overlap
    attend = over_all_ranks(job.strategy, job.layout, device.type, **options)
    transport = attend.transport(device)
    parity = errors(attend)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    report = Report(job, problem.tokens, name, transport, hosts, parity, alone)
    if world == 1:
        return report

    def suspects(links: Sequence[Link]) -> list[Link]:
        return [link for link, _ in slow_links(report, links)]

    links = measure_links(attend, pairs_of(attend, problem.tokens), device, suspects)
    step = measure_empty_step(attend, device)
    overlap = measure_overlap(attend, device, dtype, HEAD_DIM)
    planned = plan(report, attend, overlap)
    return replace(report, links=tuple(links), empty_step=step, overlap=overlap, planned=planned)


def even_hosts(hosts: Sequence[str]) -> int:
    """How many hosts there are, if each has as many ranks as any other, one after another; else 1."""
    num = len(set(hosts))
    per_host = len(hosts) // num
    even = all(len(set(hosts[i : i + per_host])) == 1 for i in range(0, len(hosts), per_host))
    return num if even and num * per_host == len(hosts) else 1


def plan(report: Report, attend: ContextAttention, overlap: Overlap) -> Planned | None:
    """What the planner expects; None of CPUs, of a GPU that ranks share, and of one that is not in its table."""
    known = [name for name in DEVICES if is_named(name, report.device)] if report.own_gpus else []
    if not known:
        return None
    cluster = make_cluster(known[0], len(report.hosts), per_node=max(Counter(report.hosts).values()))
    device, link = cluster.device.name, cluster.inside
    if attend.inner.num_ranks > 1:  # an exchange of heads is no schedule
        return Planned(device, link, 0.0, 0.0)
    walked = simulate(schedule_of(attend, overlap.tokens, EVERYTHING), overlap.shape, cluster)
    return Planned(device, link, max(walked.computing), walked.seconds)


def slow_links(report: Report, links: Sequence[Link]) -> list[tuple[Link, float]]:
    """Links much slower than the median of the others of their kind (inside a host, between hosts), and that median."""
    hosts = report.hosts
    slow = []
    for inside in (True, False):
        least = BUSY if inside and not report.own_gpus else SLOW
        some = [link for link in links if (hosts[link.src] == hosts[link.dst]) == inside]
        for link in some:
            others = [other.bandwidth for other in some if other is not link]
            usual = statistics.median(others) if others else link.bandwidth
            if not link.bandwidth >= least * usual:
                slow.append((link, usual))
    return slow


def judge(report: Report) -> list[str]:
    """The faults found, one line each; none if all is fine."""
    dtype, hosts = report.job.dtype, report.hosts
    bounds = at_length(BOUNDS[dtype], dtype, report.tokens)
    faults = []
    for rank, alone in enumerate(report.alone):
        if not alone.passes(dtype, report.tokens):
            faults.append(
                f"rank {rank} ({hosts[rank]}) computes wrong numbers by itself: errors {_errors(alone)}, "
                f"allowed {bounds[0]:g} and {bounds[1]:g}; check its GPU, driver and packages"
            )
    if not report.parity.passes(dtype, report.tokens):
        faults.append(
            f"{report.job.strategy} {report.job.layout} differs from one device: errors {_errors(report.parity)}, "
            f"allowed {bounds[0]:g} and {bounds[1]:g}"
        )
    faults += [
        f"{_name(link, hosts)}: other bytes arrived than were sent; run with --transport group, and check the driver"
        for link in report.links
        if not link.intact
    ]
    slow = slow_links(report, report.links)
    for link, usual in slow[:LISTED]:
        faults.append(
            f"{_name(link, hosts)}: {link.bandwidth / 1e9:.3g} GB/s, others {usual / 1e9:.3g}; {_remedy(report, link)}"
        )
    if len(slow) > LISTED:
        ends = Counter(rank for link, _ in slow for rank in (link.src, link.dst))
        rank, number = ends.most_common(1)[0]
        faults.append(
            f"{len(slow) - LISTED} more links are slow; of all {len(slow)}, "
            f"{number} begin or end at rank {rank} ({hosts[rank]})"
        )
    return faults + _below_plan(report)


def _below_plan(report: Report) -> list[str]:
    """Faults of links, devices and overlap as a whole. They are judged on GPUs that ranks do not share: elsewhere,
    ranks compete for what they are measured on."""
    if not report.own_gpus:
        return []
    faults = []
    inside = [link.bandwidth for link in report.links if report.hosts[link.src] == report.hosts[link.dst]]
    if inside and report.planned is not None:
        usual, link = statistics.median(inside), report.planned.link
        if usual < SLOW * link.bandwidth:
            faults.append(
                f"links inside a host: {usual / 1e9:.3g} GB/s, {link.name} of {report.planned.device} reaches "
                f"{link.bandwidth / 1e9:.3g}; check nvidia-smi topo -m, NVLink and peer access"
            )
    if report.overlap is not None:
        for rank, seconds in enumerate(report.overlap.attention):
            usual = statistics.median(report.overlap.attention)
            if usual < SLOW * seconds:
                faults.append(
                    f"rank {rank} ({report.hosts[rank]}): attention takes {1e3 * seconds:.3g} ms, on others "
                    f"{1e3 * usual:.3g}; check its clocks and temperature: nvidia-smi -q -d PERFORMANCE"
                )
        if report.job.strategy in ("ring", "double_ring") and report.overlap.hidden < HIDDEN:
            faults.append(
                f"attention hides {report.overlap.hidden:.0%} of the transfers, and should hide {HIDDEN:.0%}; "
                f"compare --transport symmetric with group"
            )
    return faults


def _name(link: Link, hosts: Sequence[str]) -> str:
    src, dst = hosts[link.src], hosts[link.dst]
    where = f"both on host {src}" if src == dst else f"host {src} -> host {dst}"
    return f"rank {link.src} -> rank {link.dst} ({where})"


def _remedy(report: Report, link: Link) -> str:
    if report.hosts[link.src] != report.hosts[link.dst]:
        gpu = "check the cable, NCCL_IB_HCA, or PCIe placement (nvidia-smi topo -m)"
        return gpu if report.device != "cpu" else "check the cable and GLOO_SOCKET_IFNAME"
    gpu = "check NVLink (nvidia-smi nvlink -s) and PCIe placement (nvidia-smi topo -m)"
    return gpu if report.device != "cpu" else "check what else runs on this host"


def _errors(result: Result) -> str:
    return f"out {result.out:.1e}, dq {result.dq:.1e}, dk {result.dk:.1e}, dv {result.dv:.1e}"


def print_report(report: Report, faults: Sequence[str]) -> None:
    job, hosts, planned = report.job, report.hosts, report.planned
    placed = ", ".join(f"{host}: {num}" for host, num in Counter(hosts).items())
    what = "one shared " if job.share_gpu else ""
    print(
        f"preflight of {len(hosts)} ranks ({placed}), {what}{report.device}: {job.strategy} {job.layout}, {job.dtype}"
    )
    print(f"transport: {report.transport}")
    worst = {name: max(getattr(one, name) for one in report.alone) for name in ("out", "dq", "dk", "dv")}
    print(f"each rank alone against float64: {_errors(replace(report.parity, **worst))}")
    print(f"all ranks together:              {_errors(report.parity)}")
    for inside, kind in ((True, "inside a host"), (False, "between hosts")):
        speeds = [link.bandwidth / 1e9 for link in report.links if (hosts[link.src] == hosts[link.dst]) == inside]
        if speeds:
            plan = f"; planner {planned.link.bandwidth / 1e9:.3g} ({planned.link.name})" if planned and inside else ""
            print(
                f"links {kind}: {len(speeds)} of {min(speeds):.3g} to {max(speeds):.3g} GB/s, "
                f"median {statistics.median(speeds):.3g}{plan}"
            )
    if report.links and len(hosts) <= EVERY_PAIR:
        print_matrix(report.links, len(hosts))
    if report.overlap is not None:
        overlap, plan = report.overlap, ""
        print(
            f"empty step: {1e6 * report.empty_step:.0f} us"
            + (f"; planner {1e6 * planned.link.latency:.0f}" if planned else "")
        )
        if planned is not None and planned.both:
            plan = f"; planner: attention {1e3 * planned.attention:.3g}, both {1e3 * planned.both:.3g}"
        print(
            f"overlap of {overlap.tokens} tokens, batch {overlap.shape.num_batch}: attention "
            f"{1e3 * max(overlap.attention):.3g} ms, transfers {1e3 * overlap.transfers:.3g}, both "
            f"{1e3 * overlap.both:.3g}: {max(0.0, overlap.hidden):.0%} hidden{plan}"
        )
    print(f"verdict: FAILED, {len(faults)} found" if faults else "verdict: fine")
    for fault in faults:
        print(f"  {fault}")


def print_matrix(links: Sequence[Link], num_ranks: int) -> None:
    """GB/s from the rank of a row to that of a column."""
    found = {(link.src, link.dst): f"{link.bandwidth / 1e9:.3g}" for link in links}
    print("GB/s to rank " + " ".join(f"{dst:>6}" for dst in range(num_ranks)))
    for src in range(num_ranks):
        print(f"from {src:>7} " + " ".join(f"{found.get((src, dst), '-'):>6}" for dst in range(num_ranks)))
