"""The page of docs/benchmarks/trainer.csv, which `flashspan bench training` writes after its rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flashspan.bench.measure import record
from flashspan.bench.measure.record import Row

PATH = Path("docs/benchmarks/trainer.csv")
WORDS = {"step": "a training step", "prefill": "a prompt", "decode": "new tokens, one after another"}


def markdown(rows: Iterable[Row]) -> str:
    """The page as Markdown. It has the newest run of each kind and length: the baseline, and our rows of that run."""
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if not row.impl.startswith("flashspan") and "Liger" not in row.impl:  # the first row of a run
            runs[row.kind, row.shape] = []
        runs[row.kind, row.shape].append(row)
    where = next(iter(runs.values()))[0]
    lines = [
        "# Training and generating, measured",
        "",
        f"{where.device}, torch {where.torch}, Triton {where.triton}, bf16, one sequence, the shape of Llama-3.2-1B;",
        "`flashspan bench training` measured the rows and wrote this page. Median milliseconds; flashspan's rows run",
        "the code of `flashspan train` and `flashspan generate`. Mixed: weights, gradients and moments in float32;",
        "in the other rows they have 16 bits. The last two columns compare with transformers + SDPA in the same run;",
        "trainer.csv has the commit of each run.",
        "",
        "| what | tokens | by | ms | tokens/s | GiB | times as fast | times the memory |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, words in WORDS.items():
        shapes = [shape for each, shape in runs if each == kind]
        for shape in sorted(shapes, key=_num_tokens):
            theirs, *ours = runs[kind, shape]
            lines.append(_line(words, theirs, "- | -"))
            for row in ours:
                beside = f"{theirs.p50_ms / row.p50_ms:.2f} | {row.peak_mib / theirs.peak_mib:.2f}"
                lines.append(_line(words, row, beside))
    return "\n".join(lines) + "\n"


def _line(words: str, row: Row, beside: str) -> str:
    tokens, speed = row.shape.partition(" 1x")[2], 1e3 * _num_tokens(row.shape) / row.p50_ms
    return (
        f"| {words} | {tokens} | {row.impl} | {row.p50_ms:.1f} | {speed:,.0f} | {row.peak_mib / 1024:.1f} | {beside} |"
    )


def _num_tokens(shape: str) -> int:
    """The number of tokens in a shape: 255 in "1.24B 1x255 after 8192"."""
    return int(shape.partition(" 1x")[2].split()[0])


def write() -> None:
    """Write the page from the recorded rows."""
    PATH.with_suffix(".md").write_text(markdown(record.read(PATH)), encoding="utf-8")
