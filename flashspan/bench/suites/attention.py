"""Our attention compared with PyTorch's, on one GPU, in one run: forward, backward and both.

flashspan bench attention            # appends rows to docs/benchmarks/attention.csv and prints a table
flashspan bench attention --random 200 --seed 7  # random shapes: random_attention.py
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashspan import attention, masks
from flashspan.bench.measure import record
from flashspan.bench.measure.clock import percentiles
from flashspan.bench.report import plots, random_page, speed
from flashspan.bench.report.tables import Table, show_tables
from flashspan.bench.suites.random_attention import PATH as RANDOM
from flashspan.bench.suites.random_attention import bench_random
from flashspan.kernels.masks import Mask, count
from flashspan.progress import progress

PATH = Path("docs/benchmarks/attention.csv")


@dataclass(frozen=True)
class Shape:
    """One row of the benchmark. The pattern is "full", "causal", "window W" or "documents N", the last two causal."""

    B: int
    H: int
    K: int
    T: int
    D: int
    pattern: str

    @classmethod
    def parse(cls, words: str) -> Shape:
        """A shape from "1,16,16,16384,128,causal": batch, heads, key heads, tokens, head size, pattern."""
        kinds = ("full", "causal", "window", "documents")
        try:
            B, H, K, T, D, pattern = words.split(",")
            kind, *size = pattern.split()
            shape = cls(int(B), int(H), int(K), int(T), int(D), pattern)
            numbers = (shape.B, shape.H, shape.K, shape.T, shape.D, *map(int, size))
            if kind in kinds and len(size) == (kind in kinds[2:]) and min(numbers) >= 1 and shape.H % shape.K == 0:
                return shape
        except ValueError:
            pass
        raise ValueError(
            "a shape is batch,heads,key heads,tokens,head size,pattern: numbers from 1, the key heads a divisor of the "
            f"heads, and a pattern full, causal, 'window W' or 'documents N'; got {words!r}; for example "
            "1,32,8,8192,128,causal"
        )

    def __str__(self) -> str:
        return f"{self.B}x{self.H}/{self.K}x{self.T}x{self.D} {self.pattern}"

    @property
    def size(self) -> int:
        """The number W or N in the pattern."""
        return int(self.pattern.split()[1])

    def mask(self) -> Mask:
        if self.pattern == "full":
            return masks.full()
        if self.pattern == "causal":
            return masks.causal()
        if self.pattern.startswith("window"):
            return masks.window(self.size - 1, 0)
        return masks.documents([self.T // self.size] * self.size) & masks.causal()

    def flops(self) -> float:
        """FLOPs of one forward: two matmuls over the visible pairs; a causal mask counts as T^2 / 2 pairs, as usual."""
        pairs = self.T**2 / 2 if self.pattern == "causal" else count(self.mask(), self.T, self.T)
        return 4 * self.B * self.H * self.D * pairs


SHAPES = (
    Shape(1, 16, 16, 16384, 64, "causal"),
    Shape(1, 16, 16, 16384, 64, "full"),
    Shape(1, 16, 16, 16384, 128, "causal"),
    Shape(1, 16, 16, 16384, 128, "full"),
    Shape(1, 32, 8, 8192, 128, "causal"),
    Shape(1, 8, 8, 65536, 128, "causal"),
    Shape(8, 16, 16, 2048, 128, "causal"),
    Shape(1, 8, 8, 8192, 256, "causal"),
    Shape(1, 16, 16, 16384, 128, "window 1024"),
    Shape(1, 16, 16, 32768, 128, "window 4096"),
    Shape(1, 16, 16, 32768, 128, "documents 16"),
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def implementations(shape: Shape) -> dict[str, Callable[[], Attend]]:
    """Name -> a function that makes attention on q, k, v for this shape."""
    mask = shape.mask()
    makers: dict[str, Callable[[], Attend]] = {
        "flashspan": lambda: lambda q, k, v: attention(q, k, v, mask=mask),
        "flashspan-portable": lambda: lambda q, k, v: attention(q, k, v, mask=mask, backend="portable"),
        "flashspan-repeatable": lambda: lambda q, k, v: attention(q, k, v, mask=mask, deterministic=True),
    }
    if shape.pattern in ("full", "causal"):
        makers["sdpa-flash"] = lambda: _sdpa(shape, SDPBackend.FLASH_ATTENTION)
        makers["sdpa-cudnn"] = lambda: _sdpa(shape, SDPBackend.CUDNN_ATTENTION)
    makers["flex"] = lambda: _flex(shape)
    if shape.pattern in ("full", "causal"):
        for name, module in (("flash-attn-4", "flash_attn.cute.interface"), ("flash-attn-3", "flash_attn_interface")):
            if _importable(module):
                makers[name] = lambda module=module: _flash(shape, module)  # type: ignore[misc]
    return makers


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # no parent package
        return False


def _flash(shape: Shape, module: str) -> Attend:
    """Attention of a flash-attn release, whose tensors are [B, T, H, D]; some releases also return lse."""
    function = importlib.import_module(module).flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=shape.pattern == "causal")
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def _sdpa(shape: Shape, backend: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            causal = shape.pattern == "causal"
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shape.H != shape.K)

    return attend


def _flex(shape: Shape) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # above its limit of recompilations it would run uncompiled, without a warning
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    rules: dict[str, Callable[..., Any]] = {
        "causal": lambda b, h, i, j: i >= j,
        "window": lambda b, h, i, j: (i >= j) & (i - j < shape.size),
        "documents": lambda b, h, i, j: (i >= j) & (i // (shape.T // shape.size) == j // (shape.T // shape.size)),
    }
    rule = rules.get(shape.pattern.split()[0])
    block_mask = rule and create_block_mask(rule, None, None, shape.T, shape.T, device="cuda")
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=shape.H != shape.K)


def measure(shape: Shape, name: str, attend: Attend, where: dict[str, Any]) -> list[record.Row]:
    """The rows of one implementation on one shape: forward, backward and both."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(heads: int) -> Tensor:
        size = (shape.B, heads, shape.T, shape.D)
        return torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v = (random(heads).requires_grad_() for heads in (shape.H, shape.K, shape.K))
    dout = random(shape.H)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attend(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    del grads
    with torch.no_grad():
        group = shape.H // shape.K
        error = record.output_error(q[:1, :group], k[:1, :1], v[:1, :1], out[:1, :group], shape.mask())
    passes: dict[str, tuple[Callable[[], Any], float]] = {
        "forward": (lambda: attend(q, k, v), 1.0),
        "backward": (lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), 2.5),
        "both": (lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), dout), 3.5),
    }
    rows = []
    for kind, (call, weight) in passes.items():
        low, middle, high = percentiles(call)
        tflops = weight * shape.flops() / middle / 1e9
        rows.append(record.Row(**where, shape=str(shape), impl=name, kind=kind, p20_ms=low, p50_ms=middle, p80_ms=high,
                               tflops=tflops, error=error, peak_mib=peak))  # fmt: skip
    return rows


def table(rows: list[record.Row]) -> Table:
    """A table with a line per shape and implementation, and our speed relative to each."""
    headings = ("shape", "implementation", "forward", "backward", "both", "ours is", "error", "peak MiB")
    lines = []
    by = {(row.shape, row.impl, row.kind): row for row in rows}
    for shape, impl in dict.fromkeys((row.shape, row.impl) for row in rows):
        cells = [by[shape, impl, kind] for kind in ("forward", "backward", "both")]
        ours = by.get((shape, "flashspan", "both"))
        ratio = f"{cells[2].p50_ms / ours.p50_ms:.2f}x" if ours else ""
        times = [f"{cell.p50_ms:.3f} ({cell.tflops:.0f})" for cell in cells]
        lines.append((shape, impl, *times, ratio, f"{cells[0].error:.2e}", f"{cells[0].peak_mib:.0f}"))
    return Table("attention, bf16: median ms (TFLOP/s)", headings, tuple(lines), 2)


def markdown(rows: list[record.Row]) -> str:
    """A page with the newest row of each measurement: median milliseconds, and our speed-up for both passes."""
    by = {(row.shape, row.impl, row.kind): row for row in rows}
    newest = rows[-1]
    impls = list(dict.fromkeys(row.impl for row in rows))
    others = [impl for impl in impls if impl != "flashspan"]
    lines = [
        "# Attention, measured",
        "",
        f"{newest.device}, torch {newest.torch}, Triton {newest.triton}, bf16. `flashspan bench attention` "
        "measured the rows; the same command with `--page` wrote this page.",
        "Median milliseconds, forward / backward / both; shapes are batch x heads/kv heads x tokens x head size. "
        "flashspan chooses its kernels, flashspan-portable always uses the Triton kernels, flashspan-repeatable has "
        "`deterministic=True`. "
        "A column 'vs X' is the time of X divided by flashspan's, for both passes: above 1, flashspan is faster. "
        "Each cell is the newest measurement; attention.csv has its commit, and the rows of one run are consecutive.",
        "",
        "![TFLOP/s of each implementation](attention.svg)",
        "",
        "| shape | " + " | ".join(impls) + " | " + " | ".join(f"vs {impl}" for impl in others) + " |",
        "| --- " * (1 + len(impls) + len(others)) + "|",
    ]
    for shape in dict.fromkeys(row.shape for row in rows):
        cells = []
        for impl in impls:
            found = [by.get((shape, impl, kind)) for kind in ("forward", "backward", "both")]
            cells.append(" / ".join(f"{row.p50_ms:.3f}" for row in found if row) or "-")
        ours = by[shape, "flashspan", "both"].p50_ms
        theirs = [by.get((shape, impl, "both")) for impl in others]
        cells += [f"{row.p50_ms / ours:.2f}x" if row else "-" for row in theirs]
        lines.append(f"| {shape} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *error_lines(rows), ""])


def error_lines(rows: list[record.Row]) -> list[str]:
    """A table of the page with the errors of each shape. Implementations are compared in one commit, the newest that
    measured flashspan on the shape: errors of other commits may be of other code."""
    newest = {row.shape: row.commit for row in rows if row.impl == "flashspan"}
    found = [row for row in rows if row.kind == "forward" and row.commit == newest.get(row.shape)]
    by = {(row.shape, row.impl): row for row in found}
    impls = list(dict.fromkeys(impl for _, impl in by))
    lines = [
        "Relative error of the output in 1e-3, compared with float32 arithmetic on evenly spaced queries; "
        "for each shape, rows of the newest commit that measured it "
        "([why flashspan's is smaller](../kernels.md#the-maximum-and-float16-v)).",
        "",
        "| shape | " + " | ".join(impls) + " |",
        "| --- " * (1 + len(impls)) + "|",
    ]
    for shape in dict.fromkeys(row.shape for row in rows if row.shape in newest):
        cells = [by.get((shape, impl)) for impl in impls]
        lines.append(f"| {shape} | " + " | ".join(f"{row.error * 1e3:.3f}" if row else "-" for row in cells) + " |")
    return lines


def chart(rows: list[record.Row]) -> str:
    """Forward and backward together in TFLOP/s, a bar per implementation, as SVG."""
    newest = {(row.shape, row.impl): row for row in rows if row.kind == "both"}
    groups: dict[str, dict[str, float]] = {}
    for (shape, impl), row in newest.items():
        groups.setdefault(shape, {})[impl] = row.tflops
    label = "attention, forward and backward"
    # The title has two lines, because the names of shapes leave too little width for one.
    return plots.to_svg(plots.bars(groups, title=f"{label}\nbf16, {rows[-1].device}", x="TFLOP/s"), label)


def bench_attention(
    *,
    quick: bool = False,
    shapes: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    random: int | None = None,
    seed: int | None = None,
    part: str | None = None,
    flex: Literal["none", "some", "all"] | None = None,
    page: bool = False,
) -> int:
    """Kernels of flashspan, PyTorch and (if installed) flash-attn compared: forward, backward and both, on a GPU.

    Rows are printed as a table, and appended to docs/benchmarks/attention.csv (with --random, to random.csv).

    Example: flashspan bench attention --shapes 1,32,8,8192,128,causal --only flashspan sdpa-cudnn

    Example: flashspan bench attention --random 200 --seed 7

    Args:
        quick: First two shapes only.
        shapes: Shapes, each batch,heads,key heads,tokens,head size,pattern; the pattern is full, causal, "window W" or
            "documents N".
        only: Implementations to measure; all by default.
        random: Number of random shapes, measured instead of the fixed ones, each against PyTorch's fastest
            implementation.
        seed: Seed of the random shapes; 0 by default.
        part: Part I/N of the random shapes, for instance 1/4; all by default.
        flex: Random shapes on which compiled FlexAttention is also measured, which takes seconds each. none; some
            (default): a part of the shapes with a window; all: every shape with a window, and causal shapes with fewer
            queries than keys.
        page: Pages and plots in docs/benchmarks from the recorded rows, without measuring.
    """
    of_random = {"--seed": seed, "--part": part, "--flex": flex}
    given = [name for name, value in of_random.items() if value is not None]
    if page and (quick or shapes or only or random is not None or given):
        raise ValueError(
            "--page writes the pages of all recorded rows: leave --quick, --shapes, --only and --random out"
        )
    if random is None and given:
        raise ValueError(f"only --random takes {', '.join(given)}: add --random N, or leave {', '.join(given)} out")
    if random is not None and (quick or shapes or only):
        raise ValueError(
            "--random chooses the shapes and measures every implementation: leave --quick, --shapes and --only out"
        )
    if random is not None:
        return bench_random(random, seed or 0, part, flex or "some")
    if page:
        write()
        return 0
    if quick and shapes:
        raise ValueError("--quick measures the first two shapes, --shapes the given ones: got both; leave one out")
    chosen = [Shape.parse(words) for words in shapes] or list(SHAPES[:2] if quick else SHAPES)
    known = list(dict.fromkeys(name for shape in chosen for name in implementations(shape)))
    if strange := [name for name in only if name not in known]:
        raise ValueError(f"--only takes names of implementations, {', '.join(known)}: got {', '.join(strange)}")
    if not torch.cuda.is_available():
        raise ValueError("bench attention needs a CUDA device and none is present; `flashspan check` runs anywhere")
    where = record.environment(torch.device("cuda"))
    rows: list[record.Row] = []
    cases = [
        (shape, name, make)
        for shape in chosen
        for name, make in implementations(shape).items()
        if not only or name in only
    ]
    with progress("bench attention", len(cases)) as line:
        for shape, name, make in cases:
            line.show(f"{name}, {shape}")
            try:
                measured = measure(shape, name, make(), where)
                record.append(measured, PATH)
                rows += measured
            except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
                line.print(f"{name} on {shape}: {str(error).splitlines()[0]}")
            line.advance()
    show_tables([table(rows)], f"{len(rows)} rows appended to {PATH}")
    return 0


def write() -> None:
    """The pages, their plots and the README's picture, from the recorded rows."""
    rows = record.read(PATH)
    PATH.with_suffix(".md").write_text(markdown(rows))
    PATH.with_suffix(".svg").write_text(chart(rows))
    PATH.with_name("speed.svg").write_text(speed.picture(rows))
    if RANDOM.exists():
        rows = record.read(RANDOM)
        RANDOM.with_suffix(".md").write_text(random_page.markdown(rows))
        RANDOM.with_suffix(".svg").write_text(random_page.chart(rows))
