"""`flashspan profile`: time of a step by kernel and part, or its memory over time.

    flashspan profile --preset small --tokens 256 --attention plain        # a summary and a trace for Perfetto
    flashspan profile --preset small --memory                              # the active memory over time, drawn
    nsys profile flashspan profile --preset small                          # the same ranges, as NVTX

Every part has a named range: warm-up, forward, backward, optimizer; each module; scores, softmax and values of plain
attention. The summary has the longest kernels and the shares of matmuls, softmax and the rest, for inference and for a
training step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from flashspan.bench.measure import memory as memories
from flashspan.bench.measure import precision as precisions
from flashspan.bench.measure import ranges, record, sweep, trace
from flashspan.bench.measure.clock import check_repeats, synchronise, timed
from flashspan.bench.report.plots import to_svg
from flashspan.bench.report.tables import show_tables
from flashspan.bench.suites.model import ATTENTIONS, Setting, Stepper, needed_bytes
from flashspan.model import preset as find_preset
from flashspan.progress import progress

PARTS = ("attention scores", "attention scale and mask", "attention softmax", "attention values")
FOLDER = Path("runs/profile")


@dataclass(frozen=True)
class Summary:
    """The profile of a pass: milliseconds until the device was done, its kernels, and the parts of plain attention."""

    name: str
    wall_ms: float
    kernels: list[trace.Kernel]
    parts: dict[str, float]
    head_dim: int

    def words(self) -> list[str]:
        """The summary, line by line."""
        if not self.kernels:
            return [f"{self.name}: nothing was recorded."]
        top = self.kernels[0]
        busy = sum(kernel.milliseconds for kernel in self.kernels)
        others = [k for k in self.kernels if k.kind == "other"][:3]
        lines = [
            f"{self.name}: {self.wall_ms:.4g} ms wall time, {busy:.4g} ms in kernels.",
            f"  Longest kernel: {top.short}, {top.milliseconds:.4g} ms in {top.count} calls "
            f"({top.milliseconds / busy:.0%} of kernel time).",
            f"  Matmuls take {trace.share(self.kernels, 'product'):.0%}, fused attention "
            f"{trace.share(self.kernels, 'attention'):.0%}, everything else {trace.share(self.kernels, 'other'):.0%}.",
        ]
        if others:
            listed = "; ".join(f"{k.short} {k.milliseconds / busy:.0%}" for k in others)
            lines.append(f"  Longest other kernels: {listed}.")
        if all(part in self.parts for part in PARTS):
            scores, prepared, softmax, values = (self.parts[part] for part in PARTS)
            products = scores + values
            lines.append(
                f"  In attention, softmax takes {softmax:.4g} ms and the two matmuls {products:.4g} ms. "
                f"Softmax takes {softmax / products:.2f} of the matmuls' time, and has about "
                f"{flop_ratio(self.head_dim):.3f} of their operations. Scaling and mask take {prepared:.4g} ms."
            )
        return lines


def flop_ratio(head_dim: int) -> float:
    """Operations of softmax (about 5 per score) over those of the two matmuls (4 d per score)."""
    return 5.0 / (4.0 * head_dim)


def run_profile(setting: Setting, device: torch.device, *, training: bool, trace_path: Path | None = None) -> Summary:
    """Warm up, then profile one inference or one training step."""
    stepper = Stepper(setting, device)
    step = stepper.train if training else stepper.infer
    with ranges.span("warm-up"):
        for _ in range(setting.warmup):
            step()
    synchronise(device)
    with trace.profiled(device) as profiler, ranges.named(stepper.model):
        wall_ms, _ = timed(step, device)
    if trace_path is not None:
        try:
            trace_path.parent.mkdir(parents=True, exist_ok=True)
            trace_path.unlink(missing_ok=True)
            profiler.export_chrome_trace(str(trace_path))
            if not trace_path.exists():  # the profiler does not report a full disk
                raise OSError("is there no space left?")
        except (OSError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"the trace cannot be written to {trace_path}: {why}; give another --folder") from error
    parts = {part: sum(found) for part in PARTS if (found := trace.ranges_ms(profiler, part, device))}
    name, head_dim = "training step" if training else "inference", find_preset(setting.preset).head_dim
    return Summary(name, wall_ms, trace.kernels(profiler, device), parts, head_dim)


def memory_timeline(setting: Setting, device: torch.device, *, training: bool, snapshot: Path | None = None) -> Any:
    """The active memory of one step, with its phases. On a GPU, also writes the history for pytorch.org/memory_viz to
    `snapshot`."""
    stepper = Stepper(setting, device)
    step = stepper.train if training else stepper.infer
    for _ in range(max(1, setting.warmup)):
        step()
    synchronise(device)
    history = device.type == "cuda" and snapshot is not None
    if history:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    held = stepper.held() if device.type == "cpu" else float(torch.cuda.memory_allocated(device))
    with memories.watch(device, held=held) as timeline, ranges.named(stepper.model):
        step()
    if history:
        torch.cuda.memory._dump_snapshot(str(snapshot))
        torch.cuda.memory._record_memory_history(enabled=None)
    return timeline


def residual_mib(setting: Setting) -> float:
    """One tensor of the residual stream in float32: batch x tokens x width x 4 bytes, in MiB."""
    return setting.batch * setting.tokens * find_preset(setting.preset).width * 4 / 2**20


def profile(
    *,
    preset: str = "tiny",
    tokens: int = 128,
    batch: int = 4,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    attention: Literal["plain", "flashspan"] = "plain",
    compiled: bool = False,
    warmup: int = 3,
    memory: bool = False,
    precision: bool = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    folder: Path = FOLDER,
) -> int:
    """Show the time of a step by kernel and by part; with --memory, its memory over time.

    Profiles an inference and a training step with named ranges on every part, prints a summary, and writes traces for
    Perfetto (ui.perfetto.dev). The ranges are also NVTX ranges: run the command under nsys profile.

    Example: flashspan profile --preset small --tokens 256

    Args:
        preset: Name of a model: tiny, small, medium, large, xl, 2.7B, ...
        tokens: Context length.
        batch: Number of samples.
        dtype: Dtype: float32, or a 16-bit one for autocast.
        attention: Implementation: plain (scores, softmax and values as separate operations) or flashspan (one fused
            kernel).
        compiled: torch.compile for the layers.
        warmup: Number of steps before the profiled one.
        memory: Pictures of the active memory over time, for inference and for a training step, instead of times.
        precision: Mixed-precision study at fixed sizes, instead of times.
        device: Device type: auto, cpu or cuda.
        folder: Folder for traces and pictures.
    """
    if memory and precision:
        raise ValueError("--memory and --precision exclude each other: got both; use one at a time")
    place = record.find_device(device)
    if precision:
        given = (preset, tokens, batch, dtype, attention, compiled, warmup, folder)
        if given != ("tiny", 128, 4, "float32", "plain", False, 3, FOLDER):
            raise ValueError("--precision has fixed sizes and accepts only --device: leave the other options out")
        with progress("precision study"):
            tables = precisions.tables(place)
        show_tables(tables)
        return 0
    if attention not in ATTENTIONS:
        raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}: got {attention!r}")
    if tokens < 1 or batch < 1:
        raise ValueError(f"tokens and batch must be 1 or more: got {tokens} and {batch}")
    check_repeats(0, warmup=warmup)
    setting = Setting(preset, batch, tokens, dtype, attention, compiled, warmup)
    find_preset(preset)
    stem = f"{preset}-{batch}x{tokens}-{dtype}-{attention}"
    try:
        memories.check_room(needed_bytes(setting), place)
        (_draw_memory if memory else _summarise)(setting, place, folder, stem)
    except Exception as error:  # several types; sizes above 64 bits overflow before memory is allocated
        if not (sweep.is_out_of_memory(error) or "overflow" in str(error).lower()):
            raise
        raise ValueError(
            f"a step must fit in the memory of the device: {setting.shape} with {attention} attention does not fit on "
            f"{place.type}; use fewer --tokens, a smaller --batch or a smaller --preset"
        ) from error
    return 0


def _summarise(setting: Setting, device: torch.device, folder: Path, stem: str) -> None:
    summaries = []
    for training in (False, True):
        name = "training" if training else "inference"
        path = folder / f"{stem}-{name}.trace.json"
        with progress(f"profile of {name}, {setting.shape}"):
            summaries.append(run_profile(setting, device, training=training, trace_path=path))
        print("\n".join(summaries[-1].words()))
        print(f"  Trace: {path}")
    one, two = (trace.share(s.kernels, "product", "attention") for s in summaries)
    print(f"Matmuls and fused attention take {one:.0%} of inference and {two:.0%} of a training step.")


def _draw_memory(setting: Setting, device: torch.device, folder: Path, stem: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"pictures cannot be written to {folder}: {error.strerror}; give another --folder") from error
    for training in (False, True):
        name = "training" if training else "inference"
        snapshot = folder / ("memory_snapshot.pickle" if training else "memory_snapshot_inference.pickle")
        with progress(f"memory of {name}, {setting.shape}"):
            timeline = memory_timeline(setting, device, training=training, snapshot=snapshot)
        path = folder / f"{stem}-memory-{name}.svg"
        title = f"{setting.shape} {setting.dtype}: active memory, {name}"
        path.write_text(to_svg(memories.draw(timeline, title), title), encoding="utf-8")
        peaks = ", ".join(f"{phase} {timeline.peak_of(phase) / 2**20:,.1f}" for phase in ranges.PHASES[1:]
                          if timeline.peak_of(phase))  # fmt: skip
        print(f"{name}: before {timeline.held / 2**20:,.1f} MiB, peak {timeline.peak / 2**20:,.1f} MiB ({peaks})")
        for size, where, number in timeline.largest[:3]:
            times = f"{number} x " if number > 1 else ""
            print(f"  {times}{size / 2**20:,.1f} MiB allocated in {where or 'an unnamed part'}")
        print(f"  picture: {path}" + (f"; history: {snapshot}" if device.type == "cuda" else ""))
    print(f"One residual-stream tensor in float32: {setting.batch} x {setting.tokens} x "
          f"{find_preset(setting.preset).width} x 4 bytes = {residual_mib(setting):.2f} MiB.")  # fmt: skip
