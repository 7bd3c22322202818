"""The measurements of `bench training`: as rows, and as text with the targets they are held to."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from flashspan.bench.measure import record
from flashspan.model import LlamaConfig


@dataclass(frozen=True)
class Figure:
    """The targets of a part: minimum speed and maximum memory relative to the baseline, maximum GiB, and minimum speed
    relative to the baseline with Liger's kernels."""

    speed: float
    memory: float | None = None
    gib: float | None = None
    liger: float | None = None


FIGURES = {
    "train8k": Figure(1.25, 0.6, liger=1.35),
    "train32k": Figure(1.4, 0.45, 45.0, liger=1.35),
    "prefill": Figure(1.0),
    "decode": Figure(1.0),
}


@dataclass(frozen=True)
class Measured:
    """A part of one implementation: seconds of each repetition, peak bytes, tokens and FLOPs of one repetition."""

    part: str
    name: str
    seconds: list[float]
    peak: int
    tokens: int
    flops: float
    error: float  # relative difference from the baseline: of the first loss (training) or the logits (prefill)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def rows_of(results: list[Measured], model: LlamaConfig, prompt: int, device: torch.device) -> list[record.Row]:
    """The measurements as rows; decoding begins after a prompt of this many tokens."""
    size = f"{model.num_parameters / 1e9:.2f}B"
    around = record.environment(device)
    rows = []
    for m in results:
        shape = f"{size} 1x{m.tokens}" + (f" after {prompt}" if m.part == "decode" else "")
        kind = "step" if m.part.startswith("train") else m.part
        rows.append(
            record.row(
                around,
                what="trainer",
                shape=shape,
                impl=m.name,
                kind=kind,
                dtype="bfloat16",
                samples_ms=[1e3 * seconds for seconds in m.seconds],
                tflop=m.flops / 1e12,
                error=m.error,
                peak_mib=m.peak / 2**20,
            )
        )
    return rows


def table_of(results: list[Measured]) -> str:
    """Text that compares every measurement with the baseline, and says whether it meets its target."""
    lines = []
    for part in dict.fromkeys(m.part for m in results):
        theirs, *others = (m for m in results if m.part == part)
        lines.append(f"{part}\n  {theirs.name:<30} {describe(theirs)}")
        liger = next((m for m in others if "Liger" in m.name), None)
        if liger is not None:
            lines.append(f"  {liger.name:<30} {describe(liger)}")
        for m in (m for m in others if m is not liger):
            speed, target = theirs.median / m.median, FIGURES[part]
            verdicts = [f"{speed:.2f}x as fast (target {target.speed}: {verdict(speed >= target.speed)})"]
            if liger is not None and target.liger is not None:
                speed = liger.median / m.median
                verdicts.append(
                    f"{speed:.2f}x as fast as with Liger (target {target.liger}: {verdict(speed >= target.liger)})"
                )
            if target.memory is not None and theirs.peak:
                memory = m.peak / theirs.peak
                verdicts.append(
                    f"{memory:.2f}x the memory (target {target.memory}: {verdict(memory <= target.memory)})"
                )
            if target.gib is not None and m.peak:
                verdicts.append(f"target {target.gib:g} GiB: {verdict(m.peak / 2**30 <= target.gib)}")
            lines += [f"  {m.name:<30} {describe(m)}", f"  {'':<30} {', '.join(verdicts)}"]
    return "\n".join(lines)


def describe(m: Measured) -> str:
    """A measurement as a line of text."""
    return (
        f"{m.median * 1e3:9.1f} ms  {m.tokens / m.median:10,.0f} tokens/s  {m.flops / m.median / 1e12:6.1f} TFLOP/s  "
        f"{m.peak / 2**30:6.2f} GiB  error {m.error:.1e}"
    )


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"
