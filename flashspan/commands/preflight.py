"""`flashspan check --preflight`: before a long run, whether a cluster computes and communicates as it should.

flashspan check --preflight                                       on every GPU here, or 4 CPU ranks
flashspan check --preflight --ranks 4 --share-gpu                 4 ranks on one GPU
torchrun --nproc-per-node 8 -m flashspan.check --preflight        on the ranks that torchrun started

It compares a strategy with one device, measures every link, measures how much of the transfers attention hides, and
names the ranks and links that are wrong or slow. Exit code 1 if there are any.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from flashspan.bench.measure.clock import here
from flashspan.bench.measure.links import (
    MESSAGE_BYTES,
    MESSAGES,
    Link,
    Overlap,
    from_all,
    measure_empty_step,
    measure_links,
    measure_overlap,
    pairs_of,
    schedule_of,
)
from flashspan.bench.measure.memory import refuse_shared_gpu
from flashspan.bench.measure.strategies import Layout, Strategy, over_all_ranks
from flashspan.commands.check import BOUNDS, Dtype, Problem, Result, compare, truth, under_torchrun
from flashspan.commands.verdict import Job, Planned, Report, judge, print_report, slow_links
from flashspan.context.layout import LAYOUTS
from flashspan.context.strategy import STRATEGIES, ContextAttention, context_parallel
from flashspan.context.symmetric import TRANSPORTS, TransportName
from flashspan.context.transport import ExchangeError
from flashspan.kernels.masks import EVERYTHING
from flashspan.launch import RankError, Ranks, SilentRank, check_num_ranks, joined, raise_user_error
from flashspan.plan.devices import DEVICES, is_named, make_cluster
from flashspan.plan.simulate import simulate
from flashspan.progress import progress
from flashspan.stdout import counted
from flashspan.train.silent_ranks import report_silent_ranks

PATIENCE = 60.0
"""Seconds to wait for a transfer. After them, an error names the rank that did not answer."""
HEAD_DIM = 64


def preflight(
    *,
    ranks: int | None = None,
    strategy: Strategy = "ring",
    layout: Layout = "zigzag",
    dtype: Dtype | None = None,
    transport: TransportName = "auto",
    share_gpu: bool = False,
) -> int:
    """Check a cluster before a long run: results, links and overlap, in about a minute.

    Compares one strategy with one device in float64, measures the bandwidth of the links with all of them busy,
    measures which part of the transfers is hidden behind attention, and compares these speeds with those that
    the planner expects. Names the ranks and links that are wrong or slow. Exit code 1 if there are any.

    Example: torchrun --nproc-per-node 8 -m flashspan.check --preflight

    Args:
        ranks: Number of ranks to start; by default one per GPU, or 4 on CPUs. Ignored under torchrun.
        strategy: Strategy of context parallelism.
        layout: Assignment of tokens to ranks.
        dtype: Dtype of q, k and v; by default bfloat16 on GPUs and float32 on CPUs.
        transport: Transport: symmetric (copies between GPUs of one host), group (NCCL or gloo), or auto.
        share_gpu: All ranks on the first GPU, for development and debugging.
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
            raise_user_error(error)
        cause = error.report if isinstance(error, RankError) else str(error)
        print(f"verdict: FAILED, the preflight was cut short: {cause}", flush=True)
        return 1
    faults = judge(report)
    if not by_torchrun or os.environ["RANK"] == "0":
        print_report(report, faults)
    return 1 if faults else 0  # on every rank: torchrun then fails on every node, and no next command starts


def _start(job: Job, num_ranks: int, cuda: bool) -> Report:
    check_num_ranks(num_ranks, "check")
    if job.share_gpu:
        refuse_shared_gpu(num_ranks, 6 * MESSAGES * MESSAGE_BYTES["cuda"], "lower --ranks")
    backend = "nccl" if cuda and not job.share_gpu else "gloo"
    pool = Ranks(num_ranks, backend=backend, timeout=PATIENCE, share_gpu=job.share_gpu)
    with progress(f"preflight of {counted(num_ranks, 'rank')}"), pool:
        report: Report = pool.run(run_on_rank, job, "cuda" if cuda else "cpu", timeout=600)[0]
    return report


def _join(job: Job) -> Report:
    with joined(timeout=PATIENCE) as device_type:
        first = dist.get_rank() == 0
        with progress(f"preflight of {dist.get_world_size()} ranks") if first else contextlib.nullcontext():
            return run_on_rank(job, device_type)


def run_on_rank(job: Job, device_type: str) -> Report:
    """Run on each rank: measure everything, and return a report with the results of all ranks."""
    with report_silent_ranks("the preflight"):
        return _measure(job, here(device_type))


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
        options["slow_group"] = dist.new_group()  # so that the two levels overlap
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
    transport = attend.transport(device)  # again: ranks that cannot share memory have changed to the group
    return replace(report, transport=transport, links=tuple(links), empty_step=step, overlap=overlap, planned=planned)


def even_hosts(hosts: Sequence[str]) -> int:
    """The number of hosts, if all have the same number of ranks, numbered consecutively; else 1."""
    num = len(set(hosts))
    per_host = len(hosts) // num
    even = all(len(set(hosts[i : i + per_host])) == 1 for i in range(0, len(hosts), per_host))
    return num if even and num * per_host == len(hosts) else 1


def plan(report: Report, attend: ContextAttention, overlap: Overlap) -> Planned | None:
    """The times that the planner expects; None for CPUs, a shared GPU, and a GPU that is not in the planner's table."""
    known = [name for name in DEVICES if is_named(name, report.device)] if report.own_gpus else []
    if not known:
        return None
    cluster = make_cluster(known[0], len(report.hosts), per_node=max(Counter(report.hosts).values()))
    device, link = cluster.device.name, cluster.inside
    if attend.inner.num_ranks > 1:  # ulysses has no schedule
        return Planned(device, link, 0.0, 0.0)
    walked = simulate(schedule_of(attend, overlap.tokens, EVERYTHING), overlap.shape, cluster)
    return Planned(device, link, max(walked.computing), walked.seconds)
