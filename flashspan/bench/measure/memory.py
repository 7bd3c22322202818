"""Memory over time, on a GPU or the CPU: every allocation as the profiler reports it, with the phases of a step.

    with watch(torch.device("cpu")) as timeline: loss = step()
    timeline.peak, timeline.phases, draw(timeline)

The profiler sees what PyTorch's allocators hand out, inside operators too, so the CPU's peak means what
`torch.cuda.max_memory_allocated` means on a GPU.
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
"""How many of the largest allocations a timeline names, those of one size in one range taken together."""


@dataclass
class Timeline:
    """Bytes allocated at times (milliseconds since the beginning), and the spans of the phases."""

    held: float = 0.0  # before the beginning, as the caller counts it
    times: list[float] = field(default_factory=list)
    allocated: list[float] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)  # name, begin, end
    largest: list[tuple[float, str, int]] = field(default_factory=list)  # bytes, the range that asked, how often

    @property
    def peak(self) -> float:
        """The most bytes allocated at once, with those held before."""
        return max([self.held, *self.allocated])

    def peak_of(self, phase: str) -> float:
        """The most bytes allocated at once during a phase, 0 if there was none."""
        spans = [(begin, end) for name, begin, end in self.phases if name == phase]
        inside = [b for t, b in zip(self.times, self.allocated, strict=True) if any(s <= t <= e for s, e in spans)]
        return max(inside, default=0.0)


@contextlib.contextmanager
def watch(device: torch.device, *, held: float = 0.0) -> Iterator[Timeline]:
    """A timeline, filled in when the block ends. `held` is what the caller's tensors already take."""
    timeline = Timeline(held=held)
    with profiled(device, memory=True) as profiler:
        yield timeline
        synchronise(device)
    fill(timeline, profiler, device)


def peak_of(call: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """The most bytes that tensors took at once in a call, beyond those there before it; and the call's result."""
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
"""Bytes of a GPU's memory that each process takes before its first tensor, about."""


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
    """Memory there is to use, of a GPU or of this machine; None where the system does not tell."""
    return float(torch.cuda.get_device_properties(0).total_memory) if device_type == "cuda" else available_bytes()


def check_room(needed: float, device: torch.device) -> None:
    """Refuse what a CPU's memory cannot hold before it is tried. A GPU's allocator says so itself; a CPU's may hand out
    memory that is not there, and the system then kills the process."""
    free = free_bytes(device.type) if device.type == "cpu" else None
    if free is not None and needed > free:
        raise MemoryError(f"{needed / 2**30:.1f} GiB are needed, and {free / 2**30:.1f} are there")


def fill(timeline: Timeline, profiler: Any, device: torch.device) -> None:
    """Read a profile taken with `memory=True`."""
    events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
    if not events:
        return
    begin = events[0].start_ns()
    # On the host, where memory is asked for: a GPU's ranges have the same names and lag behind.
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
    """The same in fewer moments: of every stretch the one with the most bytes, so that no peak is lost."""
    step = max(1, -(-len(timeline.times) // most))
    stretches = [range(begin, min(begin + step, len(timeline.times))) for begin in range(0, len(timeline.times), step)]
    kept = [max(stretch, key=timeline.allocated.__getitem__) for stretch in stretches]
    return replace(timeline, times=[timeline.times[i] for i in kept], allocated=[timeline.allocated[i] for i in kept])


def draw(timeline: Timeline, title: str) -> Figure:
    """Active memory over time, phases shaded and named, the peak marked."""
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
    """The most that was allocated since `reset_peak`; 0 on the CPU, where nobody counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def clear(device: torch.device) -> None:
    """Let go of a model that nobody holds any more."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated(device)
        if left > 2**28:
            print(f"warning: {left / 2**30:.2f} GiB of an earlier part are still held", flush=True)
