"""Finds the command that measured some rows, from the rows' fields; a report shows it next to each figure."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flashspan.bench.measure.record import Row
from flashspan.bench.report.tables import MODEL_SHAPE
from flashspan.bench.suites import attention
from flashspan.bench.suites.collectives import bench_collectives
from flashspan.bench.suites.context import FULL, QUICK, QUICK_CASES, bench_context
from flashspan.bench.suites.context_rank import ALONE
from flashspan.bench.suites.model import bench_model
from flashspan.bench.suites.sparse import bench_sparse

SPARSE_CASES = {
    "hopper": r"1x\d+x16384x.*|1x.* (window 4096|documents \d+)",
    "seed": r"4x8x.*",
    "sweep": r"1x\d+x(?!16384x)\d+x\d+ (full|random .*)",
    "window": r".* window 1024",
}
"""--rows of `bench sparse` -> a pattern of the shapes that it measures. Two have the window at 16,384 tokens."""


def command(words: str, run: Callable[..., int], **options: Any) -> str:
    """The command line that calls `run` with these options; defaults and None (for unknown) are left out."""
    line = ["flashspan", *words.split()]
    for name, value in options.items():
        if value is None or value == inspect.signature(run).parameters[name].default:
            continue
        values = () if isinstance(value, bool) else value if isinstance(value, tuple) else (value,)
        line += [f"--{'no-' if value is False else ''}{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(line)


def every(values: Iterable[Any]) -> tuple[Any, ...] | None:
    """The distinct values other than None, sorted; None if there are none."""
    return tuple(sorted({value for value in values if value is not None})) or None


def only(values: Iterable[Any]) -> Any:
    """The value, if all values are equal; None if they differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def device_of(rows: Iterable[Row]) -> str | None:
    """The --device that measures these rows again: "cpu" for rows of a CPU, None for a GPU, which is the default."""
    return "cpu" if all(re.search(r", \d+ cores$", row.device) for row in rows) else None


def context_command(rows: Sequence[Row]) -> str:
    """The command that measured rows of `bench context` with one shape, dtype and device."""
    sizes = re.fullmatch(r"(\d+)x(\d+), (\d+)/(\d+) heads, (\d+) tokens", rows[0].shape)
    options: dict[str, Any] = {"ranks": every(row.ranks for row in rows), "dtype": rows[0].dtype}
    if sizes is not None:
        names = ("layers", "width", "heads", "kv_heads", "tokens")
        options |= dict(zip(names, map(int, sizes.groups()), strict=True))
    elif named := re.fullmatch(r"(\S+), (\d+) tokens", rows[0].shape):
        options |= {"preset": named[1], "tokens": int(named[2])}
    options["repeats"] = only(row.more.get("repeats") for row in rows)
    cases = {" ".join(case) for case in QUICK_CASES}
    done = {row.impl for row in rows} - {ALONE}
    sizes_of_quick = QUICK if options["repeats"] is not None else QUICK | {"repeats": None}  # older rows lack it
    # --quick: rows of all its cases with any options, or, from an interrupted run, of some cases with its sizes.
    quick = done == cases or (done < cases and sizes_of_quick.items() <= options.items())
    usual = QUICK if quick else FULL
    options = {name: value for name, value in options.items() if name not in usual or value != usual[name]}
    return command("bench context", bench_context, quick=quick, **options)


def collectives_commands(rows: Sequence[Row]) -> list[str]:
    """The command that measured rows of `bench collectives` on one device; none for rows of one size: it needs two."""
    sizes = every(int(row.bytes) for row in rows if row.bytes > 0)
    if sizes is not None and len(sizes) < 2:
        return []
    ranks, repeats = every(row.ranks for row in rows), only(row.more.get("repeats") for row in rows)
    return [command("bench collectives", bench_collectives, ranks=ranks, sizes=sizes, repeats=repeats)]


def attention_command(rows: Sequence[Row]) -> str:
    """The command that measured rows of `bench attention`, with their shapes unless these are the default ones."""
    found = dict.fromkeys(row.shape for row in rows)
    reads = (re.fullmatch(r"(\d+)x(\d+)/(\d+)x(\d+)x(\d+) (.+)", shape) for shape in found)
    shapes = tuple(",".join(read.groups()) for read in reads if read)
    own = found.keys() == {str(shape) for shape in attention.SHAPES}
    return command("bench attention", attention.bench_attention, shapes=None if own else shapes)


def sparse_commands(rows: Sequence[Row]) -> list[str]:
    """The commands that measured rows of `bench sparse`: few --rows that have all shapes, each with --others or not."""
    found = {name: [row for row in rows if re.fullmatch(like, row.shape)] for name, like in SPARSE_CASES.items()}
    shapes = {name: {row.shape for row in mine} for name, mine in found.items()}
    named = set[str]()
    for name in sorted(shapes, key=lambda name: -len(shapes[name])):
        if shapes[name] - set().union(*(shapes[other] for other in named)):
            named.add(name)
    # `--rows window` measures no other implementations.
    others = {name: name == "window" or any(row.impl == "flex" for row in found[name]) for name in named}
    return [command("bench sparse", bench_sparse, rows=name, others=others[name]) for name in found if name in named]


def model_commands(rows: Sequence[Row]) -> list[str]:
    """The commands that measured rows of `bench model`: one per batch and, except in the warm-up study, per warm-up."""
    runs: dict[tuple[str, str, Any], list[tuple[Row, re.Match[str]]]] = {}
    for row in rows:
        if read := MODEL_SHAPE.fullmatch(row.shape):
            warmup = row.more.get("warmup") if row.what == "model" else None
            runs.setdefault((row.what, read["batch"], warmup), []).append((row, read))
    return [
        command(
            "bench model",
            bench_model,
            presets=tuple(dict.fromkeys(read["preset"] for _, read in run)),
            tokens=every(int(read["tokens"]) for _, read in run),
            batch=int(batch),
            dtypes=tuple(dict.fromkeys(row.dtype for row, _ in run)),
            attentions=tuple(dict.fromkeys(row.impl.split(", ")[0] for row, _ in run)),
            compiled=any("compiled" in row.impl for row, _ in run),
            warmups=every(row.more.get("warmup") for row, _ in run),
            steps=only(row.more.get("steps") for row, _ in run),
            device=device_of(row for row, _ in run),
        )
        for (_, batch, _), run in runs.items()
    ]
