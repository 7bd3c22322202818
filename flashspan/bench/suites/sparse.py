"""Block-sparse attention compared with compiled FlexAttention, dense attention and PyTorch's with a mask tensor.

flashspan bench sparse --rows hopper                # five sparse rows; also: seed, sweep, window, build, all
flashspan bench sparse --rows sweep --no-others     # only flashspan: a minute instead of ten
flashspan bench sparse --page                       # docs/benchmarks/sparse.md and sparse.png from the rows

Rows are appended to docs/benchmarks/sparse.csv, those of build to masks.jsonl in the same folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from flashspan import attention, masks
from flashspan.bench.measure import memory, record
from flashspan.bench.measure.clock import percentiles, timed
from flashspan.bench.report.tables import Table, show_tables
from flashspan.kernels.masks import Blocks, Mask, count
from flashspan.kernels.masks.build import Rule

PASSES = ("forward", "backward")
PATH = Path("docs/benchmarks/sparse.csv")
MASKS = "masks.jsonl"
"""The file in the same folder that has rows with the time to make block maps."""
DENSE = {"flashspan dense": masks.full(), "flashspan causal": masks.causal()}
"""Our kernels with a full and with a causal mask, to show the time that skipped blocks save."""
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One row: a mask, its name and size, and the same mask as a rule for FlexAttention."""

    pattern: str
    T: int
    D: int
    mask: Mask = field(repr=False)
    rule: Rule = field(repr=False)
    B: int = 1
    H: int = 16

    def __str__(self) -> str:
        return f"{self.B}x{self.H}x{self.T}x{self.D} {self.pattern}"

    def flops(self) -> float:
        """FLOPs of one forward: two matmuls over the visible pairs."""
        return 4.0 * self.B * self.H * self.D * count(self.mask, self.T, self.T)


def window(width: int, T: int, D: int) -> Case:
    """A query sees the last `width` keys."""
    rule: Rule = lambda b, h, i, j: (i >= j) & (i - j < width)  # noqa: E731
    return Case(f"window {width}", T, D, masks.window(width - 1, 0), rule)


def documents(number: int, T: int, D: int) -> Case:
    """Documents of equal length, each causal."""
    length = T // number
    rule: Rule = lambda b, h, i, j: (i >= j) & (i // length == j // length)  # noqa: E731
    return Case(f"documents {number}", T, D, masks.documents([length] * number) & masks.causal(), rule)


def random_blocks(share: float, T: int, D: int) -> Case:
    """A random share of the 128 x 128 blocks, the same in every head."""
    mask = masks.random_blocks(T, share, device="cuda")
    coarse = mask.kinds()[0, 0] != 0
    return Case(f"random {share:.0%}", T, D, mask, lambda b, h, i, j: coarse[i // 128, j // 128])


def full(T: int, D: int) -> Case:
    """All blocks are visible: as intervals this is the dense kernel, as a block map it has lists of all blocks."""
    return Case("full", T, D, masks.full(), lambda b, h, i, j: i - i == j - j)


def band(width: int, T: int, D: int) -> Case:
    """A query sees this number of neighbours on each side."""
    return Case(f"band {width}", T, D, masks.window(width), lambda b, h, i, j: (i - j).abs() <= width)


def strided(width: int, step: int, T: int, D: int) -> Case:
    """A query sees `width` keys: every `step`-th key back from its own."""

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & ((i - j) % step == 0) & (i - j < width * step)

    return Case(f"strided {width} by {step}", T, D, masks.dilated(width, step, T), rule)


def seed_cases() -> list[Callable[[], Case]]:
    """The first cases of the project, batch 4 and 8 heads: a band at 128 tokens and more, other patterns at 4096."""
    first = [partial(band, 32, T, 64) for T in (128, 1024, 2048, 4096)]
    more = [partial(random_blocks, 0.1, 4096, 64), partial(documents, 8, 4096, 64), partial(strided, 32, 16, 4096, 64)]
    return [partial(_with_heads, make, 4, 8) for make in (*first, *more)]


def _with_heads(make: Callable[[], Case], B: int, H: int) -> Case:
    return replace(make(), B=B, H=H)


def hopper_cases() -> list[Callable[[], Case]]:
    return [
        lambda: window(1024, 16384, 128),
        lambda: window(4096, 32768, 128),
        lambda: documents(16, 32768, 128),
        lambda: random_blocks(0.1, 16384, 128),
        lambda: random_blocks(0.1, 16384, 64),
    ]


def sweep_cases() -> list[Callable[[], Case]]:
    """Lengths 128 to 64k, with 0 to 98 % of the blocks skipped."""
    shares, cases = (0.5, 0.2, 0.1, 0.05, 0.02), list[Callable[[], Case]]()
    for T in [128 * 4**n for n in range(5)] + [65536]:
        cases.append(partial(full, T, 128))
        cases += [partial(random_blocks, s, T, 128) for s in shares if T * s >= 128]
    return cases


def window_cases() -> list[Callable[[], Case]]:
    return [partial(window, 1024, T, 128) for T in (8192, 16384, 32768, 65536, 131072, 262144)]


Chosen: TypeAlias = Literal["hopper", "seed", "sweep", "window", "build", "all"]
CASES: dict[str, Callable[[], list[Callable[[], Case]]]] = {
    "hopper": hopper_cases,
    "seed": seed_cases,
    "sweep": sweep_cases,
    "window": window_cases,
}


def implementations(case: Case, *, others: bool) -> dict[str, Callable[[], Attend]]:
    """Name -> a function that makes attention on q, k, v: with the mask itself, and with a block map of it."""
    blocks = Blocks.of(case.mask, case.T, case.T, device="cuda")

    def ours(mask: Mask) -> Callable[[], Attend]:
        return lambda: lambda q, k, v: attention(q, k, v, mask=mask)

    makers: dict[str, Callable[[], Attend]] = {}
    if not isinstance(case.mask, Blocks):
        makers["flashspan intervals"] = ours(case.mask)
    makers["flashspan blocks"] = ours(blocks)
    if others:
        makers["flex"] = lambda: _flex(case)
        makers |= {name: ours(mask) for name, mask in DENSE.items() if mask != case.mask}
        makers["sdpa mask"] = lambda: _sdpa(blocks)
    return makers


def _flex(case: Case) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # above its limit of recompilations it would run uncompiled, without a warning
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    block_mask = create_block_mask(case.rule, None, None, case.T, case.T, device="cuda")
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def _sdpa(blocks: Blocks) -> Attend:
    visible = blocks.dense()
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def measure(case: Case, name: str, attend: Attend, where: dict[str, Any], expected: list[Tensor]) -> list[record.Row]:
    """Forward and backward rows of one implementation. `expected` receives the first one's gradients."""
    random = torch.Generator("cuda").manual_seed(0)
    size = (case.B, case.H, case.T, case.D)
    q, k, v, dout = (torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=random) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    error = float("nan")
    if name not in DENSE:  # these have another mask
        error = record.output_error(q[:1, :1], k[:1, :1], v[:1, :1], out[:1, :1], case.mask)
        if not expected:
            expected.extend(grads)
        apart = max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(grads, expected, strict=True))
        if not (error < 1e-2 and apart < 2e-2):
            raise RuntimeError(f"wrong result: error {error:.1e} in out, {apart:.1e} in gradients")
    del grads
    flops = replace(case, mask=DENSE.get(name, case.mask)).flops()
    rows = []
    for kind, call, weight in (
        ("forward", lambda: attend(*leaves), 1.0),
        ("backward", lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), 2.5),
    ):
        low, middle, high = percentiles(call)
        what: dict[str, Any] = {"what": "sparse", "shape": str(case), "impl": name, "kind": kind}
        what |= {"p20_ms": low, "p50_ms": middle, "p80_ms": high, "tflops": weight * flops / middle / 1e9}
        rows.append(record.Row(**where, **what, error=error, peak_mib=peak))
    return rows


def run(names: Sequence[str], *, others: bool = True) -> list[record.Row]:
    """Measure the cases with these names; append and print each row when it is measured."""
    if not torch.cuda.is_available():
        raise ValueError("bench sparse needs a CUDA device: found none; `flashspan check` runs anywhere")
    where = record.environment(torch.device("cuda"))
    rows: list[record.Row] = []
    for name in names:
        for make in CASES[name]():
            case = make()
            first: list[Tensor] = []
            for impl, maker in implementations(case, others=others and name != "window" and case.T <= 32768).items():
                try:
                    measured = measure(case, impl, maker(), where, first)
                except (RuntimeError, torch.cuda.OutOfMemoryError) as problem:
                    print(f"{case}: {impl}: {str(problem).splitlines()[0]}", flush=True)
                    continue
                record.append(measured, PATH)
                rows += measured
                there, back = measured
                print(
                    f"{case!s:34} {impl:20} {there.p50_ms:8.3f} {back.p50_ms:8.3f} ms  {there.tflops:5.0f} "
                    f"{back.tflops:5.0f} TFLOP/s  error {there.error:.1e}  {there.peak_mib:.0f} MiB",
                    flush=True,
                )
            compare([row for row in rows if row.shape == str(case)])
    return rows


def compare(rows: list[record.Row]) -> None:
    """Print the speed-up of our kernels over FlexAttention in this run."""
    by = {(row.impl, row.kind): row.p50_ms for row in rows}
    for ours in ("flashspan intervals", "flashspan blocks"):
        if (ours, "forward") in by and ("flex", "forward") in by:
            ratios = [by["flex", kind] / by[ours, kind] for kind in ("forward", "backward")]
            print(f"    {ours} compared with flex: forward {ratios[0]:.2f}x, backward {ratios[1]:.2f}x", flush=True)


def build(path: Path, device: torch.device, tokens: int = 65536, dense: int = 16384) -> list[record.Row]:
    """Time to make block maps: from a rule, the first time and later, and from a tensor, compared with reading it."""
    rule: Rule = lambda b, h, i, j: (i >= j) & (i - j < 4096)  # noqa: E731
    half = torch.rand(dense, dense, device=device, generator=torch.Generator(device).manual_seed(0)) < 0.5
    triangle = torch.ones(dense, dense, dtype=torch.bool, device=device).tril()
    by_rule = partial(Blocks.from_rule, rule, tokens, tokens, device=device)
    jobs: list[tuple[str, str, int, Callable[[], object]]] = [
        (f"{tokens}x{tokens} window 4096", "from_rule, first", 1, by_rule),
        (f"{tokens}x{tokens} window 4096", "from_rule", 5, by_rule),
        (f"{dense}x{dense} all tiles partial", "from_dense", 9, lambda: Blocks.from_dense(half)),
        (f"{dense}x{dense} causal", "from_dense", 9, lambda: Blocks.from_dense(triangle)),
        (f"{dense}x{dense} causal", "reading it", 9, lambda: triangle.any().item()),
    ]
    where, rows = record.environment(device), []
    for shape, impl, repeats, call in jobs:
        if repeats > 1:
            call()
        times = [timed(call, device)[0] for _ in range(repeats)]
        peak = memory.peak_of(call, device)[0] / 2**20
        what: dict[str, Any] = {"what": "masks", "shape": shape, "impl": impl, "kind": "build", "dtype": "bool"}
        rows.append(record.row(where, **what, samples_ms=times, peak_mib=peak))
    record.append(rows, path)
    return rows


def build_table(rows: Sequence[record.Row]) -> Table:
    """A table with a line for each way to make a block map."""
    cells = tuple((row.shape, row.impl, f"{row.p50_ms:.2f}", f"{row.peak_mib:.0f}") for row in rows)
    return Table("Time to make block maps", ("map", "made by", "ms", "peak MiB"), cells, num_names=2)


def write_page(rows: list[record.Row], path: Path) -> None:
    """Write a page with the newest row of each measurement, and a plot of time against sparsity in the same folder."""
    newest = rows[-1]
    by = {(row.shape, row.impl, row.kind): row for row in rows}
    impls = list(dict.fromkeys(row.impl for row in rows))
    lines = [
        "# Block-sparse attention, measured",
        "",
        f"{newest.device}, torch {newest.torch}, Triton {newest.triton}, bf16. `flashspan bench sparse` measured the "
        "rows; the same command with `--page` wrote this page.",
        "Median milliseconds, forward / backward; shapes are batch x heads x tokens x head size. flashspan intervals: "
        "the mask is an interval of keys per query; flashspan blocks: a block map; flashspan causal and dense: a "
        "causal and a full mask. The last column is FlexAttention's time divided by flashspan's shorter time, if both "
        "are of one commit. Calls shorter than about half a millisecond are limited by the launch on the host.",
        "",
        "| shape | " + " | ".join(impls) + " | vs flex |",
        "| --- " * (2 + len(impls)) + "|",
    ]
    for shape in dict.fromkeys(row.shape for row in rows):
        here = [i for i in impls if (shape, i, "forward") in by]
        times = {i: [by[shape, i, kind].p50_ms for kind in ("forward", "backward")] for i in here}
        cells = [" / ".join(f"{ms:.3f}" for ms in times[i]) if i in times else "-" for i in impls]
        commits = {i: by[shape, i, "forward"].commit for i in here}
        names = ("flashspan intervals", "flashspan blocks")
        ours = [times[i] for i in names if i in times and commits[i] == commits.get("flex")]
        ratio = "-"
        if ours:
            best = [min(ms) for ms in zip(*ours, strict=True)]
            ratio = " / ".join(f"{theirs / mine:.2f}x" for theirs, mine in zip(times["flex"], best, strict=True))
        lines.append(f"| {shape} | " + " | ".join([*cells, ratio]) + " |")
    for table in efficiency(rows):
        lines += ["", f"{table.title}:", "", table.markdown().rstrip()]
    if path.with_name(MASKS).exists():
        table = build_table(record.newest(record.read(path.with_name(MASKS))))
        note = "(`--rows build`); *first* is the first call, *reading it* only reads the bool tensor:"
        lines += ["", f"{table.title} {note}", "", table.markdown().rstrip()]
    picture = path.with_suffix(".png")
    if plot(rows, picture):
        lines += ["", f"![time against sparsity]({picture.name})"]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def by_share(rows: Sequence[record.Row]) -> dict[tuple[int, float, str], record.Row]:
    """Our rows of the sweep by tokens, share of blocks and pass; for a share of 1, those of the dense kernel."""
    found = {}
    for row in rows:
        size, _, pattern = row.shape.partition(" ")
        tokens, head_dim = size.split("x")[2:]
        if head_dim == "128" and pattern == "full" and row.impl == "flashspan intervals":
            found[int(tokens), 1.0, row.kind] = row
        elif head_dim == "128" and pattern.startswith("random") and row.impl == "flashspan blocks":
            found[int(tokens), float(pattern.split()[1].rstrip("%")) / 100, row.kind] = row
    return found


def efficiency(rows: Sequence[record.Row], where: str = "") -> list[Table]:
    """The speed per visited block at the sweep's longest length, relative to the dense kernel; empty without rows."""
    rates = {key: row.tflops for key, row in by_share([row for row in rows if row.ok]).items()}
    longest = max((tokens for tokens, share, _ in rates if share == 1), default=0)
    shares = sorted({share for tokens, share, _ in rates if tokens == longest and share < 1}, reverse=True)
    if not shares:
        return []

    def rate(share: float, kind: str) -> str:
        of_share, dense = rates.get((longest, share, kind)), rates.get((longest, 1.0, kind))
        return f"{of_share / dense:.0%}" if of_share and dense else ""

    sizes = f"TFLOP/s at {longest:,} tokens, counting visited blocks only"
    title = f"{sizes}, as a share of the dense kernel's, forward / backward{where}"
    cells = ("efficiency", *(pair(*(rate(share, kind) for kind in PASSES)) for share in shares))
    return [Table(title, ("blocks visited", *(f"{share:.0%}" for share in shares)), (cells,))]


def pair(forward: str, backward: str) -> str:
    """A table cell with two passes."""
    return f"{forward or '-'} / {backward or '-'}" if forward or backward else ""


def plot(rows: list[record.Row], path: Path) -> bool:
    """Plot forward time against the share of skipped blocks, with the ideal line: full time x share of kept blocks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times: dict[int, dict[float, float]] = {}
    for (tokens, share, kind), row in by_share(rows).items():
        if kind == "forward":
            times.setdefault(tokens, {})[share] = row.p50_ms
    times = {T: found for T, found in times.items() if 1.0 in found and len(found) > 2}
    if not times:
        return False
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for T, found in sorted(times.items()):
        shares = sorted(found)
        (line,) = axes.plot([1 - s for s in shares], [found[s] for s in shares], "o-", label=f"{T} tokens")
        axes.plot([1 - s for s in shares], [found[1.0] * s for s in shares], ":", color=line.get_color())
    axes.set(yscale="log", xlabel="sparsity: share of 128 x 128 blocks skipped", ylabel="forward, ms")
    axes.set_title("dotted: the full time, times the share of blocks kept", fontsize="medium")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    return True


def bench_sparse(*, rows: Chosen | None = None, others: bool = True, page: bool = False) -> int:
    """Block-sparse attention compared with compiled FlexAttention, dense attention, and SDPA with a mask tensor.

    Rows are printed, and appended to docs/benchmarks/sparse.csv (with --rows build, to docs/benchmarks/masks.jsonl).

    Args:
        rows: Rows to measure: hopper (the default): five sparse masks at 16k and 32k tokens; seed: seven masks at 128
            to 4096 tokens; sweep: 128 to 64k tokens and 0 to 98 % of the blocks skipped; window: 8k to 256k tokens;
            build: the time to build masks; or all.
        others: Comparison with FlexAttention, PyTorch, and flashspan under full and causal masks, up to 32k tokens.
        page: Page and plot in docs/benchmarks from the recorded rows, without a measurement.
    """
    if page and (rows is not None or not others):
        raise ValueError("--page uses all recorded rows: leave --rows and --no-others out")
    if page:
        write_page(record.read(PATH), PATH)
        return 0
    rows = rows or "hopper"
    run(list(CASES) if rows == "all" else [rows] if rows in CASES else [], others=others)
    if rows in ("build", "all"):
        show_tables([build_table(build(PATH.with_name(MASKS), torch.device("cuda")))])
    return 0
