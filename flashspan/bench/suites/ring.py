"""A timeline of attention across ranks: the kernels and copies of each GPU, and its idle time.

    flashspan bench ring --ranks 2 --share-gpu

Each rank profiles one forward and one backward pass. Rows are appended to docs/benchmarks/ring.jsonl; the picture is
ring.svg in the same folder. Ranks that share a GPU take turns unless MPS runs. With MPS and half of the GPU's
multiprocessors for each of two ranks, they are most similar to ranks with separate GPUs:

    nvidia-cuda-mps-control -d
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 flashspan bench ring --ranks 2 --share-gpu
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flashspan.bench.measure import record, trace
from flashspan.bench.measure.memory import refuse_shared_gpu
from flashspan.bench.measure.strategies import Layout, Strategy, over_all_ranks
from flashspan.bench.report import plots
from flashspan.launch import Ranks, check_num_ranks
from flashspan.progress import progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path("docs/benchmarks")
WARM_UP = 3
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize")
"""CUDA runtime calls in which the host waits for the device."""


@dataclass(frozen=True)
class Shape:
    """The shape of the benchmark: each rank has `tokens` tokens."""

    strategy: str
    layout: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"1x{self.heads}/{self.kv_heads}x{self.tokens}x{self.head_dim} {kind} {self.strategy} {self.layout}"


@dataclass(frozen=True)
class Span:
    """A kernel or a copy of a rank, in microseconds since the first one on any rank began."""

    name: str
    begin: float
    end: float
    is_copy: bool


@dataclass(frozen=True)
class PassProfile:
    """A profiled pass of a rank."""

    spans: tuple[Span, ...]
    host_waits: tuple[str, ...]
    transport: str

    @property
    def kernels(self) -> list[Span]:
        return [span for span in self.spans if not span.is_copy]

    @property
    def tiles(self) -> list[Span]:
        """The kernels that compute tiles: those that take at least a tenth of the longest kernel's time."""
        attention = [span for span in self.kernels if trace.Kernel(span.name, 0.0, 1).kind == "attention"]
        longest = max((span.end - span.begin for span in attention), default=0.0)
        return [span for span in attention if span.end - span.begin >= longest / 10]

    @property
    def gaps(self) -> list[float]:
        """Microseconds without a kernel, between each kernel and the next, from the first tile to the last."""
        if not self.tiles:
            return []
        first, last = self.tiles[0].begin, self.tiles[-1].end
        until, found = 0.0, []
        for one, after in pairwise(span for span in self.kernels if first <= span.begin < last):
            until = max(until, one.end)
            found.append(max(0.0, after.begin - until))
        return found

    @property
    def hidden(self) -> float:
        """The share of the copies' time in which a kernel also runs."""
        copies = [(span.begin, span.end) for span in self.spans if span.is_copy]
        both = sum(max(0.0, min(end, k.end) - max(begin, k.begin)) for begin, end in copies for k in self.kernels)
        return both / sum(end - begin for begin, end in copies) if copies else float("nan")


def bench_ring(
    *,
    ranks: int = 2,
    tokens: int = 16384,
    heads: int = 16,
    kv_heads: int = 16,
    head_dim: int = 128,
    causal: bool = True,
    strategy: Strategy = "ring",
    layout: Layout = "zigzag",
    share_gpu: bool = False,
    folder: Path = FOLDER,
) -> int:
    """Timeline of attention across GPUs: kernels, copies and idle time of each rank, as rows and as a picture.

    Example: flashspan bench ring --ranks 2 --share-gpu

    Args:
        ranks: Number of ranks to start.
        tokens: Tokens per rank.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Head size.
        causal: Causal mask.
        strategy: Strategy of context parallelism.
        layout: Assignment of tokens to ranks.
        share_gpu: All ranks on the first GPU, for development and debugging.
        folder: Folder for the rows and the picture.
    """
    check_num_ranks(ranks, "bench ring")
    shape = Shape(strategy, layout, tokens, heads, kv_heads, head_dim, causal)
    if share_gpu:
        refuse_shared_gpu(ranks, 40 * heads * tokens * head_dim, "lower --ranks, --tokens or --heads")
    elif torch.cuda.device_count() < ranks:
        raise ValueError(f"bench ring needs a GPU for each of {ranks} ranks: found {torch.cuda.device_count()}; "
                         f"--share-gpu puts all on one")  # fmt: skip
    backend = "gloo" if share_gpu else "nccl"
    with progress("bench ring"), Ranks(ranks, backend=backend, timeout=120, share_gpu=share_gpu) as pool:
        profiles: list[dict[str, PassProfile]] = pool.run(run_on_rank, shape, timeout=300)
    named = [(rank, kind, profile) for rank, both in enumerate(profiles) for kind, profile in both.items()]
    where = record.environment(torch.device("cuda"))
    rows = [row_of(where, shape, kind, rank, profile, ranks, share_gpu) for rank, kind, profile in named]
    record.append(rows, folder / "ring.jsonl")
    (folder / "ring.svg").write_text(plots.to_svg(draw(shape, profiles), "Timeline of a ring"), encoding="utf-8")
    print(f"{shape}, {ranks} ranks\ntransport: {profiles[0]['forward'].transport}\n")
    print(
        f"{'rank':>4} {'pass':<9} {'pass ms':>8} {'kernels':>8} {'longest gap us':>15} {'copies hidden':>14} host waits"
    )
    for row in rows:
        more = row.more
        idle = f"{more['longest_gap_us']:>15.1f} {more['hidden']:>14.0%} {more['host_waits'] or 'none'}"
        print(f"{more['rank']:>4} {row.kind:<9} {row.p50_ms:>8.2f} {more['kernels']:>8} {idle}")
    print(f"appended to {folder / 'ring.jsonl'}; picture in {folder / 'ring.svg'}")
    return 0


def run_on_rank(shape: Shape) -> dict[str, PassProfile]:
    """Run on each rank: profile forward and backward, after a few warm-up passes."""
    device = torch.device("cuda", torch.cuda.current_device())
    attend = over_all_ranks(shape.strategy, shape.layout, "cuda", num_tokens=shape.tokens * dist.get_world_size())
    torch.manual_seed(dist.get_rank())
    sizes = [(1, heads, shape.tokens, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    q, k, v = (torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for size in sizes)
    for _ in range(WARM_UP):
        out = attend(q, k, v, causal=shape.causal)
        out.backward(out.detach())
        q.grad = k.grad = v.grad = None
    found = {}
    for kind in ("forward", "backward"):
        torch.cuda.synchronize()
        dist.barrier()
        with trace.profiled(device) as profiler:
            if kind == "forward":
                out = attend(q, k, v, causal=shape.causal)
            else:
                out.backward(torch.ones_like(out))
            ended = time.time_ns()
            torch.cuda.synchronize()
        events = list(profiler.kineto_results.events())
        ran = sorted(trace.ran(events), key=lambda event: event.start_ns())
        spans = [
            Span(e.name(), e.start_ns() / 1e3, (e.start_ns() + e.duration_ns()) / 1e3, e.name().startswith("Memcpy"))
            for e in ran
        ]
        waits = sorted((e.start_ns(), e.name()) for e in events if e.name() in WAITS and e.start_ns() < ended)
        found[kind] = PassProfile(tuple(spans), tuple(name for _, name in waits), attend.transport(device))
    return found


def row_of(
    where: dict[str, Any], shape: Shape, kind: str, rank: int, profile: PassProfile, ranks: int, share_gpu: bool
) -> record.Row:
    """A profiled pass as a row."""
    gaps = profile.gaps
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    more: dict[str, Any] = {
        "rank": rank,
        "kernels": len(profile.kernels),
        "copies": sum(span.is_copy for span in profile.spans),
        "longest_gap_us": max(gaps, default=0.0),
        "hidden": profile.hidden,
        "host_waits": ", ".join(profile.host_waits),
        "transport": profile.transport,
        "share_gpu": share_gpu,
        "mps_percentage": share or "",
    }
    span_ms = (max(s.end for s in profile.spans) - min(s.begin for s in profile.spans)) / 1e3
    return record.row(
        where, what="ring", shape=str(shape), impl=f"rank {rank}", kind=kind, dtype="bfloat16", samples_ms=[span_ms],
        ranks=ranks, more=more,
    )  # fmt: skip


def draw(shape: Shape, profiles: list[dict[str, PassProfile]]) -> Figure:
    """Draw the kernels and copies of each rank over time, forward above backward."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.9 * len(profiles)), layout="constrained")
    for axes, kind in zip(figure.subplots(2, 1), ("forward", "backward"), strict=True):
        first = min(span.begin for both in profiles for span in both[kind].spans)
        for rank, both in enumerate(profiles):
            for span in both[kind].spans:
                attention = trace.Kernel(span.name, 0.0, 1).kind == "attention"
                colour = plots.COLOURS[1] if span.is_copy else plots.COLOURS[0 if attention else 7]
                place = (2 * rank + span.is_copy - 0.4, 0.8)
                bar = [((span.begin - first) / 1e3, (span.end - span.begin) / 1e3)]
                axes.broken_barh(bar, place, facecolors=colour, edgecolor="white", linewidth=0.3)
        labels = [f"rank {rank} {lane}" for rank in range(len(profiles)) for lane in ("kernels", "copies")]
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(f"{kind}, {shape}", fontsize=9)
        axes.set_xlabel("milliseconds", fontsize=8)
    handles = [
        figure.axes[0].broken_barh([(0, 0)], (0, 0), facecolors=plots.COLOURS[colour], label=label)
        for colour, label in ((0, "attention kernel"), (7, "other kernel"), (1, "copy to another rank"))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure
