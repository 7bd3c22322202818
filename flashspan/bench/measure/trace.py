"""The time of a profiled step by kernel: matmuls, attention, communication, the rest.

On a GPU these are kernels with their GPU time. On a CPU they are operators; the time of an operator does not include
that of the operators it calls.
"""

from __future__ import annotations

import bisect
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import profile

PRODUCTS = (
    *("gemm", "cutlass", "xmma", "wgmma", "nvjet", "splitk", "cublas"),
    *("aten::mm", "aten::bmm", "aten::addmm"),
)
FUSED = ("flash", "fmha", "scaled_dot_product", "sdpa")
# Our attention kernels: those with matmuls, and those that run before and after them.
PASSES = ("forward", "backward", "gradients", "keys", "queries", "repair")
AROUND = ("float16", "delta", "rows", "cast", "split", "combine", "few_rows", "add_gradients")
OURS = {f"{word}_kernel" for word in (*PASSES, *AROUND)}
# Our matmuls: of a layer (ops), and of a decode step.
MATMULS = {f"{word}_kernel" for word in ("projection", "gated", "gated_backward", "sum", "project", "add", "head")}
INSIDE = r"\b\w+(?:Functor\w*|Ops|_kernel\w*|_cuda)\b"
GENERAL = ("BinaryFunctor", "AUnaryFunctor", "BUnaryFunctor", "gpu_kernel_impl", "gpu_kernel_impl_nocast")
WIRE = ("nccl", "gloo", "c10d::", "record_param_comms")


@dataclass(frozen=True)
class Kernel:
    """One kernel (or operator) of a profile: total milliseconds and number of calls."""

    name: str
    milliseconds: float
    count: int

    @property
    def kind(self) -> str:
        """ "product", "attention", "wire" or "other"."""
        low = self.name.lower()
        if low in OURS:
            return "attention"
        if low in MATMULS:
            return "product"
        for kind, words in (("wire", WIRE), ("attention", FUSED), ("product", PRODUCTS)):
            if any(word in low for word in words):
                return kind
        return "other"

    @property
    def short(self) -> str:
        """A readable name: for a matmul its layout and tile, for a generic PyTorch kernel its operation."""
        if found := re.search(r"(sm\d+)_xmma_gemm_\w+?_([nt]{2})_\w+?tilesize(\d+x\d+)", self.name):
            return f"{found[1]} gemm {found[2]} {found[3]}"
        if found := re.search(r"cutlass_\w+|nvjet_\w+", self.name):
            return found[0]
        bare = re.sub(r"^void |\(anonymous namespace\)::|at::native::", "", self.name)
        outer = re.match(r"[\w:]*", bare)
        name = outer[0] if outer else ""
        inner = [word for word in re.findall(INSIDE, bare[len(name) :]) if word not in GENERAL]
        return f"{name} ({inner[-1]})" if inner else name or bare


def profiled(device: torch.device, *, memory: bool = False) -> profile:
    """PyTorch's profiler of a device, without its wrapper torch.profiler: the first use of the wrapper imports
    torch._dynamo, which takes a second or two in every process."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints a line at its start and its end
    return profile(use_kineto=True, use_device="cuda" if device.type == "cuda" else None, profile_memory=memory)


def kernels(profiler: Any, device: torch.device) -> list[Kernel]:
    """The kernels of a profile, the longest first."""
    found: dict[str, list[float]] = defaultdict(list)
    events = profiler.kineto_results.events()
    if device.type == "cuda":
        for event in ran(events):
            found[event.name()].append(event.duration_ns() / 1e6)
    else:
        for name, own in _own_times(events):
            found[name].append(own)
    listed = [Kernel(name, sum(times), len(times)) for name, times in found.items()]
    return sorted(listed, key=lambda kernel: -kernel.milliseconds)


def share(listed: list[Kernel], *kinds: str) -> float:
    """The share of kernels of these kinds in the total time; nan if nothing ran."""
    total = sum(kernel.milliseconds for kernel in listed)
    return sum(k.milliseconds for k in listed if k.kind in kinds) / total if total else float("nan")


def ranges_ms(profiler: Any, name: str, device: torch.device) -> list[float]:
    """Milliseconds of each range of this name; on a GPU, of its kernels, without the gaps between them."""
    kinds = torch._C._autograd.DeviceType
    kind = kinds.CUDA if device.type == "cuda" else kinds.CPU
    events = [e for e in profiler.kineto_results.events() if e.device_type() == kind and e.duration_ns()]
    spans = [(e.start_ns(), e.duration_ns()) for e in events if e.name() == name]
    if device.type != "cuda":
        return [duration / 1e6 for _, duration in spans]
    kernels = sorted((e.start_ns(), e.duration_ns()) for e in ran(events))
    starts = [start for start, _ in kernels]
    inside = [slice(bisect.bisect_left(starts, start), bisect.bisect_left(starts, start + d)) for start, d in spans]
    return [sum(duration for _, duration in kernels[part]) / 1e6 for part in inside]


def wire_of(events: Sequence[Any], device: torch.device) -> tuple[float, float]:
    """The milliseconds of a profile in which this rank communicated or waited for another rank, and the share of them
    in which it also computed; nan if there was no collective."""
    if device.type == "cuda":
        kernels = ran(events)
        wire = [e for e in kernels if "nccl" in e.name().lower()]
        computing = [e for e in kernels if "nccl" not in e.name().lower()]
    else:
        cpu = torch._C._autograd.DeviceType.CPU
        seen = [e for e in events if e.duration_ns() and e.device_type() == cpu]
        wire = [e for e in seen if e.name().startswith("gloo:")]
        # An operator that calls others may wait inside one, so only operators that call none count as computing.
        ops = [e for e in seen if e.name().startswith(("aten::", "flashspan::"))]
        ops.sort(key=lambda e: (e.start_thread_id(), e.start_ns(), -e.duration_ns()))
        followed = zip(ops, [*ops[1:], None], strict=True)
        computing = [op for op, after in followed if after is None or not _encloses(op, after)]
    spans, busy = ([(e.start_ns(), e.start_ns() + e.duration_ns()) for e in chosen] for chosen in (wire, computing))
    if not spans:
        return float("nan"), float("nan")
    both = _covered(spans) + _covered(busy) - _covered([*spans, *busy])
    return _covered(spans) / 1e6, both / _covered(spans)


def _encloses(outer: Any, inner: Any) -> bool:
    """Whether the second of two events, in order, began inside the first, on the same thread."""
    same = outer.start_thread_id() == inner.start_thread_id()
    return same and inner.start_ns() < outer.start_ns() + outer.duration_ns()


def _covered(spans: Sequence[tuple[int, int]]) -> int:
    """The total time covered by at least one of these spans."""
    total, until = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def ran(events: Sequence[Any]) -> list[Any]:
    """The kernels and copies of a GPU, without the ranges around them."""
    cuda = torch._C._autograd.DeviceType.CUDA
    done = (e for e in events if e.device_type() == cuda and e.duration_ns())
    return [e for e in done if not e.is_user_annotation() and e.name() != "[memory]"]


def _own_times(events: Any) -> list[tuple[str, float]]:
    """(operator, milliseconds outside the operators that it called), for every operator on every thread."""
    by_thread: dict[int, list[Any]] = defaultdict(list)
    for event in events:
        if event.name().startswith(("aten::", "flashspan::", "c10d::", "gloo:")) and event.duration_ns():
            by_thread[event.start_thread_id()].append(event)
    result = []
    for ops in by_thread.values():
        ops.sort(key=lambda e: (e.start_ns(), -e.duration_ns()))
        stack: list[list[Any]] = []  # event, end, own time

        def close(stack: list[list[Any]] = stack) -> None:
            event, _, own = stack.pop()
            result.append((event.name(), max(0.0, own) / 1e6))

        for event in ops:
            begin, end = event.start_ns(), event.start_ns() + event.duration_ns()
            while stack and stack[-1][1] <= begin:
                close()
            if stack:
                stack[-1][2] -= event.duration_ns()
            stack.append([event, end, float(event.duration_ns())])
        while stack:
            close()
    return result
