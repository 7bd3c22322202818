"""Memory over time, on a GPU or a CPU: every allocation that the profiler reports, and the phases of a step.

    with watch(torch.device("cpu")) as timeline: loss = step()
    timeline.peak, timeline.phases, draw(timeline)

The profiler reports all allocations by PyTorch, including those inside operators, so the peak on a CPU has the meaning
of `torch.cuda.max_memory_allocated` on a GPU.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flashspan.bench.measure.clock import synchronise
from flashspan.bench.measure.ranges import PHASES
from flashspan.bench.measure.trace import profiled
from flashspan.plan.devices import available_bytes, free_gpu_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
LARGEST = 12
"""The number of largest allocations that a timeline lists; allocations of one size in one range count as one."""


@dataclass
class Timeline:
    """The bytes allocated at each time (milliseconds since the beginning), and the begin and end of each phase."""

    held: float = 0.0  # before the beginning, counted by the caller
    times: list[float] = field(default_factory=list)
    allocated: list[float] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)  # name, begin, end
    largest: list[tuple[float, str, int]] = field(default_factory=list)  # bytes, range, count

    @property
    def peak(self) -> float:
        """The most bytes allocated at once, including those from before the beginning."""
        return max([self.held, *self.allocated])

    def peak_of(self, phase: str) -> float:
        """The most bytes allocated at once during a phase, 0 if there was none."""
        spans = [(begin, end) for name, begin, end in self.phases if name == phase]
        inside = [b for t, b in zip(self.times, self.allocated, strict=True) if any(s <= t <= e for s, e in spans)]
        return max(inside, default=0.0)


@contextlib.contextmanager
def watch(device: torch.device, *, held: float = 0.0) -> Iterator[Timeline]:
    """A timeline, filled in when the block ends. `held`: the bytes of tensors that exist before."""
    timeline = Timeline(held=held)
    with profiled(device, memory=True) as profiler:
        yield timeline
        synchronise(device)
    fill(timeline, profiler, device)


def peak_of(call: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """The most bytes that tensors took at once in a call, without those allocated before; and the call's result."""
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        torch.cuda.synchronize(device)
        return float(torch.cuda.max_memory_allocated(device) - held), result
    with watch(device) as timeline:
        result = call()
    return timeline.peak, result


CONTEXT = 600 * 2**20
"""Approximate bytes of GPU memory that each process uses before its first tensor."""


def refuse_shared_gpu(num_ranks: int, num_bytes: float, remedy: str) -> None:
    """ValueError if there is no GPU, or if ranks that share it, each with this many bytes, do not fit in it."""
    if not torch.cuda.is_available():
        raise ValueError("--share-gpu needs a GPU: found none; without it, ranks are CPU processes")
    needed, free = num_ranks * (num_bytes + CONTEXT), free_gpu_bytes()
    if needed > free:
        raise ValueError(
            f"{num_ranks} ranks that share a GPU need about {needed / 2**30:.1f} GiB: {free / 2**30:.1f} GiB are free; "
            f"{remedy}"
        )


def free_bytes(device_type: str) -> float | None:
    """The total memory of a GPU, or the available memory of this machine; None if the system does not report it."""
    return float(torch.cuda.get_device_properties(0).total_memory) if device_type == "cuda" else available_bytes()


def check_room(needed: float, device: torch.device) -> None:
    """MemoryError if a CPU's memory cannot hold `needed` bytes. On a GPU the allocator raises an error itself; on a CPU
    the allocation may succeed, and the system kills the process later."""
    free = free_bytes(device.type) if device.type == "cpu" else None
    if free is not None and needed > free:
        raise MemoryError(f"{needed / 2**30:.1f} GiB are needed, {free / 2**30:.1f} are available")


def fill(timeline: Timeline, profiler: Any, device: torch.device) -> None:
    """Fill a timeline from a profile taken with `memory=True`."""
    events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
    if not events:
        return
    begin = events[0].start_ns()
    # Only ranges on the host, which allocates memory: a GPU's ranges have the same names but run later.
    cpu = torch._C._autograd.DeviceType.CPU
    host = [event for event in events if event.duration_ns() and event.device_type() == cpu]
    spans = [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in host]
    named = [span for span in spans if not span[0].startswith(("aten::", "cuda", "void ")) and span[2] > span[1]]
    total = timeline.held
    asked: Counter[tuple[float, str]] = Counter()
    kind = torch._C._autograd.DeviceType.CUDA if device.type == "cuda" else cpu
    memory = [event for event in events if event.name() == "[memory]" and event.device_type() == kind]
    sizes = sorted({event.nbytes() for event in memory if event.nbytes() > 0}, reverse=True)[:LARGEST]
    for event in memory:
        total += event.nbytes()
        timeline.times.append((event.start_ns() - begin) / 1e6)
        timeline.allocated.append(total)
        if sizes and event.nbytes() >= sizes[-1]:
            inside = [s for s in named if s[1] <= event.start_ns() <= s[2]]
            path = " > ".join(s[0] for s in sorted(inside, key=lambda s: s[1] - s[2])[:4])
            asked[float(event.nbytes()), path] += 1
    in_order = sorted(asked.items(), key=lambda one: (-one[0][0], -one[1], one[0][1]))
    timeline.largest = [(size, path, number) for (size, path), number in in_order[:LARGEST]]
    timeline.phases = [(name, (s - begin) / 1e6, (e - begin) / 1e6) for name, s, e in spans if name in PHASES]


def thin(timeline: Timeline, most: int = 500) -> Timeline:
    """The same timeline with fewer points: each stretch keeps its point with the most bytes, so that peaks remain."""
    step = max(1, -(-len(timeline.times) // most))
    stretches = [range(begin, min(begin + step, len(timeline.times))) for begin in range(0, len(timeline.times), step)]
    kept = [max(stretch, key=timeline.allocated.__getitem__) for stretch in stretches]
    return replace(timeline, times=[timeline.times[i] for i in kept], allocated=[timeline.allocated[i] for i in kept])


def draw(timeline: Timeline, title: str) -> Figure:
    """Draw active memory over time, with shaded phases and the peak."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    mib = [b / 2**20 for b in timeline.allocated]
    axes.fill_between(timeline.times, mib, step="post", color="#4c78a8", alpha=0.35, linewidth=0)
    axes.step(timeline.times, mib, where="post", color="#4c78a8", linewidth=1)
    top = timeline.peak / 2**20
    for (name, begin, end), shade in zip(timeline.phases, _shades(timeline.phases), strict=True):
        axes.axvspan(begin, end, color=shade, alpha=0.25, linewidth=0)
        axes.text((begin + end) / 2, 1.12 * top, name, ha="center", va="bottom", fontsize=8)
    if mib:
        at = max(range(len(mib)), key=mib.__getitem__)
        axes.plot(timeline.times[at], mib[at], "o", color="#e45756", markersize=4)
        late = timeline.times[at] > timeline.times[-1] / 2
        axes.annotate(f"peak {top:,.0f} MiB", (timeline.times[at], mib[at]), xytext=(-6 if late else 6, 4),
                      textcoords="offset points", ha="right" if late else "left", fontsize=8)  # fmt: skip
    axes.set(xlabel="milliseconds", ylabel="MiB allocated", ylim=(0, 1.2 * max(top, 1e-6)), title=title)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _shades(phases: Sequence[tuple[str, float, float]]) -> list[str]:
    colours = ("#eeca3b", "#72b7b2", "#f58518", "#b279a2")
    names = list(dict.fromkeys(name for name, _, _ in phases))
    return [colours[names.index(name) % len(colours)] for name, _, _ in phases]


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes allocated since `reset_peak`; 0 on a CPU, where PyTorch does not count them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def clear(device: torch.device) -> None:
    """Free the memory of objects that are no longer referenced."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated(device)
        if left > 2**28:
            kept = f"{left / 2**30:.2f} GiB of an earlier measurement"
            print(f"warning: {kept} are still allocated and count in the next peak", flush=True)
