"""The results of a preflight, and its verdict: the ranks and links that are wrong or slow."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashspan.bench.measure.links import EVERY_PAIR, Link, Overlap
from flashspan.bench.measure.strategies import Layout, Strategy
from flashspan.commands.check import BOUNDS, Result, at_length
from flashspan.context.symmetric import TransportName
from flashspan.plan.devices import Link as LinkKind

SLOW = 0.5
"""A speed below this share of the others' speed, or of the planner's expectation, is a fault."""
BUSY = 0.2
"""The same share for links inside a host whose ranks share cores or a GPU: there, ranks slow each other's links."""
HIDDEN = 0.5
"""The share of a ring's transfers that attention must hide, if each rank has its own GPU."""
LISTED = 8
"""The most slow links that are listed one by one."""


@dataclass(frozen=True)
class Job:
    """The settings of a preflight."""

    strategy: Strategy
    layout: Layout
    dtype: str
    transport: TransportName
    share_gpu: bool


@dataclass(frozen=True)
class Planned:
    """The planner's expectation: the link inside a host, and two times of the pass whose overlap is measured. These are
    the seconds of attention alone and of the whole pass, 0 if unknown."""

    device: str
    link: LinkKind
    attention: float
    both: float


@dataclass(frozen=True)
class Report:
    """The measurements of a preflight. `alone` has the errors of each rank without the others."""

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


def slow_links(report: Report, links: Sequence[Link]) -> list[tuple[Link, float]]:
    """Links that are much slower than the median of their kind (inside a host, between hosts), with that median."""
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
    """The faults that were found, one line each."""
    dtype, hosts = report.job.dtype, report.hosts
    bounds = at_length(BOUNDS[dtype], dtype, report.tokens)
    faults = []
    for rank, alone in enumerate(report.alone):
        if not alone.passes(dtype, report.tokens):
            faults.append(
                f"rank {rank} ({hosts[rank]}) computes wrong numbers even without the others: errors {_errors(alone)}, "
                f"allowed {bounds[0]:g} and {bounds[1]:g}; check its GPU, driver and packages"
            )
    if not report.parity.passes(dtype, report.tokens):
        faults.append(
            f"{report.job.strategy} {report.job.layout} differs from one device: errors {_errors(report.parity)}, "
            f"allowed {bounds[0]:g} and {bounds[1]:g}"
        )
    faults += [
        f"{_name(link, hosts)}: received bytes differ from sent bytes; use --transport group, and check the driver"
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
    """Faults: links inside hosts far below the plan, slow devices, too little overlap. Only for GPUs that are not
    shared: elsewhere ranks compete for the resources that are measured."""
    if not report.own_gpus:
        return []
    faults = []
    inside = [link.bandwidth for link in report.links if report.hosts[link.src] == report.hosts[link.dst]]
    if inside and report.planned is not None:
        usual, link = statistics.median(inside), report.planned.link
        if usual < SLOW * link.bandwidth:
            faults.append(
                f"links inside a host: {usual / 1e9:.3g} GB/s, expected for {link.name} of {report.planned.device}: "
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
                f"attention must hide {HIDDEN:.0%} of the transfers: it hides {report.overlap.hidden:.0%}; "
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
    return gpu if report.device != "cpu" else "check for other processes on this host"


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
                f"links {kind}: {len(speeds)}, {min(speeds):.3g} to {max(speeds):.3g} GB/s, "
                f"median {statistics.median(speeds):.3g}{plan}"
            )
    if report.links and len(hosts) <= EVERY_PAIR:
        print_matrix(report.links, len(hosts))
    if report.overlap is not None:
        overlap, plan = report.overlap, ""
        print(
            f"ring step with nearly empty messages: {1e6 * report.empty_step:.0f} us"
            + (f"; planner {1e6 * planned.link.latency:.0f}" if planned else "")
        )
        if planned is not None and planned.both:
            plan = f"; planner: attention {1e3 * planned.attention:.3g}, both {1e3 * planned.both:.3g}"
        print(
            f"overlap of {overlap.tokens} tokens, batch {overlap.shape.num_batch}: attention "
            f"{1e3 * max(overlap.attention):.3g} ms, transfers {1e3 * overlap.transfers:.3g}, both "
            f"{1e3 * overlap.both:.3g}: {max(0.0, overlap.hidden):.0%} hidden{plan}"
        )
    print(f"verdict: FAILED, faults found: {len(faults)}" if faults else "verdict: fine")
    for fault in faults:
        print(f"  {fault}")


def print_matrix(links: Sequence[Link], num_ranks: int) -> None:
    """Print a table of GB/s: each row is a sending rank, each column a receiving rank."""
    found = {(link.src, link.dst): f"{link.bandwidth / 1e9:.3g}" for link in links}
    print("GB/s to rank " + " ".join(f"{dst:>6}" for dst in range(num_ranks)))
    for src in range(num_ranks):
        print(f"from {src:>7} " + " ".join(f"{found.get((src, dst), '-'):>6}" for dst in range(num_ranks)))
