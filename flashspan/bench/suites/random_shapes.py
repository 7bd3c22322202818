"""Shapes of attention calls, drawn at random from a fixed distribution, for `flashspan bench attention --random`.

    for shape in draw(200, seed=7):
        compile_kernels(shape)  # shape.B, H, K, T, S, D and shape.mask()

Every 20 shapes have each scenario as often as SCENARIOS says, in random order. Within a scenario:

- lengths and windows are log-uniform in their range, and half of them are rounded to a multiple of 128;
- batch, key heads, queries per key head and head size come from the weighted lists below;
- a draw that exceeds a limit (MOST_BYTES, MOST_MS, MOST_HEADS), or repeats an earlier shape, is drawn again.

`draw(n, seed)` is the beginning of `draw(m, seed)` for m > n.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashspan import masks
from flashspan.kernels.masks import EVERYTHING, count

MOST_BYTES = 4 * 2**30
"""The most memory of q, k, v, the output, and the gradients of all four, in bf16."""
MOST_MS = 30.0
"""The longest estimated time of forward and backward, at TFLOPS and BYTES_PER_SECOND."""
MOST_HEADS = 64
MOST_SHAPES = 10_000
TFLOPS, BYTES_PER_SECOND = 400.0, 3e12
FEW_QUERIES = 16
"""Calls with this many queries or fewer occur in generation: they have no backward."""
SHORT, LONG = 512, 32768
MULTIPROCESSORS, TILE = 132, 128
"""Multiprocessors of an H200, and the queries that one of them usually processes at a time."""

HEAD_SIZES = {32: 1, 64: 5, 80: 1, 96: 1, 112: 1, 128: 7, 160: 1, 192: 1, 256: 2}
KEY_HEADS = {1: 2, 2: 2, 3: 1, 4: 3, 5: 1, 8: 5, 12: 1, 16: 3, 32: 2}
GROUPS = {1: 8, 2: 2, 3: 1, 4: 4, 5: 1, 7: 1, 8: 3, 16: 1}
"""Query heads that share a key head."""


@dataclass(frozen=True)
class RandomShape:
    """q is [B, H, T, D], k and v are [B, K, S, D]. The pattern is "full", "causal" or "window W".

    "causal" aligns the last query with the last key (T <= S); "window W" is causal and has T = S.
    """

    B: int
    H: int
    K: int
    T: int
    S: int
    D: int
    pattern: str

    def __str__(self) -> str:
        return f"{self.B}x{self.H}/{self.K}x{self.T}x{self.S}x{self.D} {self.pattern}"

    @property
    def size(self) -> int:
        """The number W in the pattern."""
        return int(self.pattern.split()[1])

    @property
    def trains(self) -> bool:
        """Whether backward is measured too."""
        return self.T > FEW_QUERIES

    @property
    def sees_all(self) -> bool:
        """Whether every query sees every key, so that no mask is needed."""
        return self.mask().simplify(self.T, self.S) == EVERYTHING

    def mask(self) -> masks.Band:
        if self.pattern == "full":
            return masks.full()
        if self.pattern == "causal":
            return masks.causal(self.S - self.T)
        return masks.window(self.size - 1, 0)

    def flops(self) -> float:
        """Operations of one forward: two matmuls over the visible pairs."""
        return 4.0 * self.B * self.H * self.D * count(self.mask(), self.T, self.S)

    def bytes(self) -> int:
        """Memory of all inputs, outputs and gradients, in bf16."""
        copies = 2 if self.trains else 1
        return 4 * copies * self.B * self.D * (self.H * self.T + self.K * self.S)

    def expected_ms(self) -> float:
        """Estimated time of all passes: what TFLOPS or BYTES_PER_SECOND allow, whichever takes longer."""
        weight = 3.5 if self.trains else 1.0
        return max(1e3 * self.bytes() / BYTES_PER_SECOND, weight * self.flops() / TFLOPS / 1e9)

    def classes(self) -> tuple[str, ...]:
        """The classes by which the page groups shapes: one for the lengths and the mask, then attributes."""
        attributes = {
            "long": max(self.T, self.S) >= LONG,
            "few tiles": self.trains and self.B * self.H * math.ceil(self.T / TILE) < MULTIPROCESSORS,
            "GQA": self.H != self.K,
            "odd head size": self.D & (self.D - 1) != 0,
            "odd length": self.S % 64 != 0 or (self.trains and self.T % 64 != 0),
        }
        return (self._scenario(), *(name for name, has in attributes.items() if has))

    def _scenario(self) -> str:
        if self.T == 1:
            return "decode"
        if not self.trains:
            return "few queries"
        if self.pattern.startswith("window"):
            return "window"
        if max(self.T, self.S) <= SHORT:
            return "short"
        if self.T == self.S:
            return "self"
        return "continued" if self.pattern == "causal" else "cross"


CLASSES = (
    *("decode", "few queries", "continued", "cross", "short", "self", "window"),
    *("long", "few tiles", "GQA", "odd head size", "odd length"),
)
"""All names that `RandomShape.classes` gives."""
CLASS_NOTE = (
    f"A shape can be in several classes. Short: at most {SHORT} queries and keys. Long: at least {LONG:,} "
    f"queries or keys. Few tiles: more than {FEW_QUERIES} queries, but fewer blocks of {TILE} queries, over batch and "
    f"heads, than the {MULTIPROCESSORS} multiprocessors of an H200. Odd head size: not a power of 2. Odd length: the "
    "number of keys is not a multiple of "
    f"64, or there are more than {FEW_QUERIES} queries and their number is not a multiple of 64."
)
"""The page's explanation of class names that are not self-explanatory."""


@dataclass(frozen=True)
class Scenario:
    """`share`: how often it occurs in 20 shapes. The others: what its sizes are drawn from; without `keys`, S is T."""

    share: int
    batch: Mapping[int, int]
    queries: tuple[int, int]
    keys: tuple[int, int] | None
    patterns: Mapping[str, int]


def _powers(most: int) -> dict[int, int]:
    """1, 2, 4, ... with equal weights."""
    return {2**n: 1 for n in range(most.bit_length())}


SCENARIOS = {
    "self": Scenario(4, _powers(16), (513, 16384), None, {"causal": 2, "full": 1}),
    "long": Scenario(2, {1: 1}, (LONG, 98304), None, {"causal": 2, "full": 1}),
    "short": Scenario(3, _powers(128), (FEW_QUERIES + 1, SHORT), None, {"causal": 1, "full": 1}),
    "window": Scenario(2, _powers(4), (1024, 32768), None, {"window": 1}),
    "cross": Scenario(2, _powers(16), (FEW_QUERIES + 1, 8192), (FEW_QUERIES + 1, 8192), {"full": 1}),
    "continued": Scenario(2, _powers(4), (FEW_QUERIES + 1, 4096), (1024, 131072), {"causal": 1}),
    "few queries": Scenario(2, _powers(16), (2, FEW_QUERIES), (512, 262144), {"causal": 1}),
    "decode": Scenario(3, _powers(64), (1, 1), (512, 262144), {"full": 1}),
}
"""Training on sequences, long ones, batches of short ones and windows; attention to another sequence; prompts that
continue a cache; and generation, with a few queries or one over a cache."""
WINDOWS = (32, 4096)


def check_draw(number: int, seed: int) -> None:
    """ValueError unless shapes can be drawn."""
    if not 1 <= number <= MOST_SHAPES:
        raise ValueError(f"--random takes the number of shapes, 1 to {MOST_SHAPES:,}: got {number}")
    if seed < 0:
        raise ValueError(f"--seed must be 0 or more: got {seed}")


def draw(number: int, seed: int) -> list[RandomShape]:
    """`number` different shapes: the same ones for the same seed, on every machine."""
    check_draw(number, seed)
    rng = random.Random(seed)
    names = [name for name, scenario in SCENARIOS.items() for _ in range(scenario.share)]
    shapes: dict[RandomShape, None] = {}
    while len(shapes) < number:
        rng.shuffle(names)
        for name in names:
            shape = _draw_one(rng, SCENARIOS[name])
            while shape is None or shape in shapes:
                shape = _draw_one(rng, SCENARIOS[name])
            shapes[shape] = None
    return list(shapes)[:number]


def _draw_one(rng: random.Random, scenario: Scenario) -> RandomShape | None:
    """A shape, or None if it exceeds a limit."""
    B, K, group, D = (_weighted(rng, choices) for choices in (scenario.batch, KEY_HEADS, GROUPS, HEAD_SIZES))
    T = _log_uniform(rng, *scenario.queries)
    S = T if scenario.keys is None else _log_uniform(rng, *scenario.keys)
    pattern = _weighted(rng, scenario.patterns)
    if pattern == "window":
        pattern = f"window {_log_uniform(rng, *WINDOWS)}"
    shape = RandomShape(B, K * group, K, T, S, D, pattern)
    fits = shape.H <= MOST_HEADS and shape.bytes() <= MOST_BYTES and shape.expected_ms() <= MOST_MS
    if pattern.startswith("window"):
        return shape if fits and shape.size < T else None
    if scenario.keys is None:
        return shape if fits else None
    return shape if fits and (T < S if pattern == "causal" else T != S) else None


def _weighted(rng: random.Random, choices: Mapping[int, int] | Mapping[str, int]) -> Any:
    """A random key, with the values as weights."""
    return rng.choices(list(choices), list(choices.values()))[0]


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    """A log-uniform number from low to high; half of those from 128 upwards are rounded to a multiple of 128."""
    value = round(math.exp(rng.uniform(math.log(low), math.log(high))))
    if rng.random() < 0.5 and value >= 128:
        value = 128 * round(value / 128)
    return min(max(value, low), high)
