"""Invented rows for tests of the report, and functions that read a page."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flashspan.bench.measure.record import Row
from flashspan.bench.report import page as report_module
from flashspan.bench.report.page import contents
from flashspan.bench.suites.context import make_row
from flashspan.bench.suites.context_rank import ALONE, Workload

WHERE = {"device": "x86_64, 2 cores", "torch": "2", "triton": "3", "commit": "abc"}


GPU = {"device": "H200"}


TIME = r"\d\.250"


STEPS = "mean ± standard deviation, milliseconds, and the peak of training"


def rows(**changes: float) -> list[Row]:
    """Invented rows of one device and of two strategies on two ranks."""
    work = Workload(64, 2, 4, 2, 256, "float32")
    more = {
        "scaling": "strong", "tokens": 256, "tokens_per_second": 1000.0, "mfu": 0.3, "product_share": 0.6,
        "computing_ms": 48.0, "wire_ms": 10.0, "wire_to_computing": 0.2, "hidden": 0.8, "imbalance": 1.05, **changes,
    }  # fmt: skip
    found = []
    for kind in ("forward", "forward+backward"):
        alone = {**more, "computing_ms": 100.0, "wire_ms": 0.0, "hidden": math.nan, "imbalance": 1.0}
        found.append(make_row(WHERE, work, (ALONE, ""), kind, 1, samples_ms=[100.0], peak_mib=80.0, more=alone))
        for case, time in ((("ring", "zigzag"), 55.0), (("ring", "contiguous"), 75.0)):
            found.append(make_row(WHERE, work, case, kind, 2, samples_ms=[time], peak_mib=50.0, more=more))
    return found


def timed(time: float) -> dict[str, Any]:
    """The fields of a row whose repetitions all took this time, in milliseconds."""
    return {"p20_ms": time, "p50_ms": time, "p80_ms": time}


def timed_as(**times: float) -> list[Row]:
    """The same rows with other times, within 1% of those given for `alone`, `zigzag` and `contiguous`."""
    found = []
    for row in rows():
        word = "alone" if row.impl == ALONE else row.impl.split(" ")[1]
        time = times.get(word, row.p50_ms)
        found.append(replace(row, p20_ms=0.99 * time, p50_ms=time, p80_ms=1.01 * time))
    return found


def other_sweeps() -> list[Row]:
    """The same model in bfloat16 and a wider one, a thousand times as fast, each with a row of weak scaling."""
    found = []
    for row in rows():
        small = replace(row, shape=row.shape.replace("256 tokens", "128 tokens"), more={**row.more, "tokens": 128})
        small.more["scaling"] = "weak"
        for it in (row, small) if row.impl == ALONE else (row,):
            times = {name: getattr(it, name) / 1000 for name in ("p20_ms", "p50_ms", "p80_ms")}
            fast = replace(it, **times, tflops=1000 * it.tflops)
            found += [replace(fast, dtype="bfloat16"), replace(fast, shape=fast.shape.replace("2x64", "2x128"))]
    return found


def upgraded(row: Row, **changes: Any) -> Row:
    """A row measured again with a newer PyTorch, twice as fast."""
    times = {name: getattr(row, name) / 2 for name in ("p20_ms", "p50_ms", "p80_ms")}
    return replace(row, torch="3", **times, tflops=2 * row.tflops, **changes)


def studied(tokens: int, time: float, **place: Any) -> Row:
    """A row of `bench study flash`."""
    more = {"tokens": tokens, "head_dim": 64, "repeats": None}
    return replace(
        rows()[0], what="study flash", shape=f"1x{tokens}x64 causal", impl="flashspan", dtype="bfloat16", p50_ms=time,
        more=more, **place,
    )  # fmt: skip


def exchanged(size: int, time: float, bandwidth: float, **place: Any) -> Row:
    """A row of `bench collectives`."""
    return replace(
        rows()[0], what="collective", shape=f"{size} bytes", impl="all-reduce", ranks=2, bytes=float(size), p50_ms=time,
        more={"alpha_us": 3.0, "gb_per_s": bandwidth, "repeats": 20}, **place,
    )  # fmt: skip


def attended(tokens: int, time: float, **place: Any) -> Row:
    """A row of `bench attention`."""
    shape = f"1x8/8x{tokens}x64 causal"
    return replace(rows()[0], what="attention", shape=shape, impl="flashspan", kind="both", **timed(time), **place)


def trained(tokens: int, time: float, **place: Any) -> Row:
    """A row of `bench model`."""
    return replace(
        rows()[0], what="model", shape=f"tiny 4x{tokens}", impl="flashspan, eager", kind="forward", mean_ms=time,
        p50_ms=0.5, more={"warmup": 5, "steps": 10}, **place,
    )  # fmt: skip


def stepped(batch: int, time: float, **place: Any) -> Row:
    """A row of `bench data`."""
    shape = f"2x64 {batch}x128 per rank"
    return replace(rows()[0], what="data", shape=shape, impl="torch DDP", ranks=2, p50_ms=time, more={}, **place)


def masked(size: str, impl: str, forward: float, backward: float, **place: Any) -> list[Row]:
    """Rows of `bench sparse`, with a speed that follows from the time."""
    same = {"what": "sparse", "dtype": "bfloat16", "shape": size, "impl": impl, "more": {}, **place}
    times = {"forward": forward, "backward": backward}
    return [replace(rows()[0], kind=kind, **timed(time), tflops=60 / time, **same) for kind, time in times.items()]


def sparse_rows() -> list[Row]:
    """Two masks compared with other implementations, and a sweep over sparsity."""
    found = masked("1x16x16384x128 window 1024", "flashspan intervals", 1.0, 4.0)
    found += masked("1x16x16384x128 window 1024", "flashspan blocks", 2.0, 3.0)
    found += masked("1x16x16384x128 window 1024", "flex", 2.5, 6.0)
    found += masked("1x16x16384x128 window 1024", "flashspan causal", 0.25, 0.25)  # not compared: another mask
    found += masked("1x16x16384x64 random 10%", "flashspan blocks", 1.0, 2.0)
    found += masked("1x16x16384x64 random 10%", "flex", 1.5, 5.0)
    found += masked("1x16x8192x128 full", "flashspan intervals", 10.0, 20.0)
    found += masked("1x16x8192x128 random 50%", "flashspan blocks", 20.0, 25.0)
    found += masked("1x16x8192x128 random 2%", "flashspan blocks", 40.0, 80.0)
    return found


def page(found: Sequence[Row]) -> str:
    """The page that `flashspan report` writes for these rows."""
    return report_module.page(*contents(found))


def commands(text: str) -> list[str]:
    """The different commands that a page shows."""
    return list(dict.fromkeys(html.unescape(found) for found in re.findall("<code>(.*?)</code>", text)))


def drawn_and_listed(text: str, title: str) -> tuple[list[str], list[str], dict[str, str]]:
    """A section's figure captions, the commands of the figures, and its tables by title."""
    [section] = re.findall(rf"<section id=[^>]*><h2>{title}</h2>(.*?)</section>", text, flags=re.DOTALL)
    captions = re.findall("<figcaption>(.*?)(?: <code>(.*?)</code>)?</figcaption>", section)
    whole = re.findall("<code>(.*?)</code>", section.partition("</p>")[0]) if "<p>Made by" in section else []
    captions = [(caption, shown or ", ".join(whole)) for caption, shown in captions]  # a shared command is shown once
    tables = re.findall("<caption>(.*?)</caption>(.*?)</table>", section, flags=re.DOTALL)
    return [caption for caption, _ in captions], [shown for _, shown in captions], dict(tables)


def lines_of(table: str) -> list[list[str]]:
    """The cells of a page's table, headings first."""
    parts = re.findall("<tr>(.*?)</tr>", table, flags=re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall("<t[hd][^>]*>(.*?)</t[hd]>", part)] for part in parts]
