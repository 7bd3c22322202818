"""Where a profiled step's time went, by kernel: products, attention, the rest.

On a GPU these are kernels and their GPU time; on the CPU, operators and the time they spend themselves.
"""

from __future__ import annotations

import bisect
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import profile

PRODUCTS = ("gemm", "cutlass", "xmma", "wgmma", "aten::mm", "aten::bmm", "aten::addmm", "nvjet", "splitk", "cublas")
FUSED = ("flash", "fmha", "scaled_dot_product", "sdpa")
# Our attention kernels: those that multiply, and those that prepare, repair and finish for them.
PASSES = ("forward", "backward", "keys", "queries", "repair")
OURS = {f"{kind}{word}_kernel" for kind in ("", "sparse_", "lists_") for word in PASSES}
OURS |= {f"{word}_kernel" for word in ("finer", "delta", "rows", "cast")}
INSIDE = r"\b\w+(?:Functor\w*|Ops|_kernel\w*|_cuda)\b"
GENERAL = ("BinaryFunctor", "AUnaryFunctor", "BUnaryFunctor", "gpu_kernel_impl", "gpu_kernel_impl_nocast")
WIRE = ("nccl", "gloo", "c10d::", "record_param_comms")


@dataclass(frozen=True)
class Kernel:
    """One kernel (or operator) of a profile: total milliseconds and how often it ran."""

    name: str
    milliseconds: float
    count: int

    @property
    def kind(self) -> str:
        """ "product", "attention", "wire" or "other"."""
        low = self.name.lower()
        if low in OURS:
            return "attention"
        for kind, words in (("wire", WIRE), ("attention", FUSED), ("product", PRODUCTS)):
            if any(word in low for word in words):
                return kind
        return "other"

    @property
    def short(self) -> str:
        """A name to read: of a product its layout and tile, of PyTorch's general kernels what they compute."""
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
    """PyTorch's profiler of what runs on a device: what torch.profiler wraps. The first use of that wrapper imports
    torch._dynamo, which takes a second or two in every process."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints a line when it starts and when it stops
    return profile(use_kineto=True, use_device="cuda" if device.type == "cuda" else None, profile_memory=memory)


def kernels(profiler: Any, device: torch.device) -> list[Kernel]:
    """The kernels of a profile, the longest first."""
    found: dict[str, list[float]] = defaultdict(list)
    events = profiler.kineto_results.events()
    if device.type == "cuda":
        kind = torch._C._autograd.DeviceType.CUDA
        for event in (e for e in events if e.device_type() == kind and e.duration_ns()):
            if not event.is_user_annotation() and event.name() != "[memory]":
                found[event.name()].append(event.duration_ns() / 1e6)
    else:
        for name, own in _own_times(events):
            found[name].append(own)
    listed = [Kernel(name, sum(times), len(times)) for name, times in found.items()]
    return sorted(listed, key=lambda kernel: -kernel.milliseconds)


def share(listed: list[Kernel], *kinds: str) -> float:
    """The part of the time that kernels of these kinds took; nan where nothing ran."""
    total = sum(kernel.milliseconds for kernel in listed)
    return sum(k.milliseconds for k in listed if k.kind in kinds) / total if total else float("nan")


def ranges_ms(profiler: Any, name: str, device: torch.device) -> list[float]:
    """Milliseconds of each range of this name: on a GPU those of its kernels, without the gaps between them."""
    kinds = torch._C._autograd.DeviceType
    kind = kinds.CUDA if device.type == "cuda" else kinds.CPU
    events = [e for e in profiler.kineto_results.events() if e.device_type() == kind and e.duration_ns()]
    spans = [(e.start_ns(), e.duration_ns()) for e in events if e.name() == name]
    if device.type != "cuda":
        return [duration / 1e6 for _, duration in spans]
    work = (e for e in events if not e.is_user_annotation() and e.name() != "[memory]")
    ran = sorted((e.start_ns(), e.duration_ns()) for e in work)
    starts = [start for start, _ in ran]
    inside = [slice(bisect.bisect_left(starts, start), bisect.bisect_left(starts, start + d)) for start, d in spans]
    return [sum(duration for _, duration in ran[part]) / 1e6 for part in inside]


def _own_times(events: Any) -> list[tuple[str, float]]:
    """(operator, milliseconds it spent outside the operators it called), of every operator on every thread."""
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
