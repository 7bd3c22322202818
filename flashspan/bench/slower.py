"""Where ours is slower than plain PyTorch in the flash study, and why: paragraphs of the write-up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from flashspan.bench.record import Row
from flashspan.bench.tables import Table

STEADY = 0.05  # of the median, from the 20th to the 80th percentile: kernels repeat so well, a host's launches do not
FILLING = 3.0  # times the time for twice the tokens: below that, it grows more like their number than its square


class Pair(NamedTuple):
    """Ours and plain PyTorch on one cell of the flash study."""

    ours: Row
    theirs: Row

    @property
    def ratio(self) -> float:
        """How many times as fast ours is."""
        return self.theirs.p50_ms / self.ours.p50_ms

    @property
    def line(self) -> tuple[str, int]:
        """The cells that differ in length alone share it."""
        return self.ours.dtype, self.ours.more["head_dim"]

    @property
    def tokens(self) -> int:
        return int(self.ours.more["tokens"])

    @property
    def bound_by(self) -> str:
        """What our time is the time of."""
        row = self.ours
        return "kernels" if row.p80_ms - row.p20_ms <= STEADY * row.p50_ms else "launches"


def where_slower(pairs: Sequence[Pair]) -> list[str]:
    """The cells where PyTorch is ahead, by what our time is made of there, and why."""
    slower = [pair for pair in pairs if pair.ratio < 1]
    if not slower:
        return []
    said = [f"It is slower in {len(slower)} of {len(pairs)} cells:", _table(pairs).markdown().strip()]
    if launched := [pair for pair in slower if pair.bound_by == "launches"]:
        took, lengths = [pair.ours.p50_ms for pair in launched], [pair.tokens for pair in launched]
        said.append(
            f"Launches: from {min(lengths)} to {max(lengths)} tokens ours takes {min(took):.1f} to {max(took):.1f} "
            f"ms in these cells whatever the length, and its times lie more than {STEADY:.0%} apart (20th to 80th "
            "percentile): the host is timed there, not the chip, and who is ahead changes from length to length."
        )
    if kept_busy := [pair for pair in slower if pair.bound_by == "kernels"]:
        worst = min(kept_busy, key=lambda pair: pair.ratio)
        said += _why_kernels(worst, [pair for pair in pairs if pair.bound_by == "kernels"])
    return said


def _why_kernels(worst: Pair, pairs: Sequence[Pair]) -> list[str]:
    """How our kernels' time grows in the line of the worst cell, and what they reach with other head sizes."""
    said = list[str]()
    dtype, head_dim = worst.line
    line = [pair for pair in pairs if pair.line == worst.line]
    doubled = [(a, b) for a, b in pairwise(line) if b.tokens == 2 * a.tokens]
    ours, theirs = ([late[i].p50_ms / early[i].p50_ms for early, late in doubled] for i in (0, 1))
    if doubled and ours[0] < FILLING:
        listed = [", ".join(f"{times:.2f}" for times in growth) for growth in (ours, theirs)]
        said.append(
            f"Kernels: with each doubling from {line[0].tokens} tokens on, {dtype} with head size {head_dim} takes "
            f"us {listed[0]} times as long, and PyTorch {listed[1]} times. The pairs are four times as many: while "
            "the blocks of our one head all run side by side, the longest is what is waited for; PyTorch's squares "
            "fill the chip sooner."
        )
    if dtype == "float32":
        longest = [pair for pair in pairs if pair.ours.dtype == dtype and pair.tokens == line[-1].tokens]
        rates = ", ".join(f"{pair.ours.tflops:.0f} TFLOP/s (head size {pair.line[1]})" for pair in longest)
        said.append(
            f"With {line[-1].tokens} tokens our {dtype} runs at {rates}. Each of its products is made of six "
            "bfloat16 ones, to be as exact as float32 ([float32](kernels.md#float32)). PyTorch's are no less exact: "
            "unless told to, it does not use tf32."
        )
    return said


def _table(pairs: Sequence[Pair]) -> Table:
    """Where ours is slower: a line per dtype, head size and what our time is made of."""
    groups: dict[tuple[str, str, int], list[Pair]] = {}
    for pair in sorted(pairs, key=lambda pair: (pair.bound_by == "kernels", *pair.line, pair.tokens)):
        groups.setdefault((pair.bound_by, *pair.line), []).append(pair)
    cells = []
    for (by, dtype, head_dim), group in groups.items():
        if lost := [pair for pair in group if pair.ratio < 1]:
            ratios = [pair.ratio for pair in lost]
            span = f"{min(ratios):.2f}" + (f" to {max(ratios):.2f}" if len(ratios) > 1 else "")
            lengths = ", ".join(str(pair.tokens) for pair in lost)
            cells.append((by, dtype, str(head_dim), f"{len(lost)} of {len(group)}", lengths, span))
    return Table("", ("time of", "dtype", "head size", "slower", "at tokens", "times as fast"), tuple(cells), 3)
