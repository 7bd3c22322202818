"""The write-up is made from rows: with none it says what is missing, with all it answers every question."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from flashspan.bench import precision, record, writeup
from flashspan.bench.record import Row

ROOT = Path(__file__).parent.parent.parent


def made_up(row: Row, number: int) -> Row:
    """An expected row as if it had been measured."""
    more = dict(row.more)
    if row.what == "profile":
        parts = {"attention scores": 2.0, "attention softmax": 1.0, "attention values": 2.0}
        more |= {"product_share": 0.7, "other_share": 0.3, "top": [["gemm", 3.0, 12]], "parts": parts}
        more["others"] = [["elementwise", 1.0], ["reduce", 0.5]]
    if row.what == "precision":
        pairs = [["logits", "float16"]]
        more |= {"sums": precision.accumulate(), "float16": pairs, "bfloat16": pairs, "squares": [["float16", "inf"]]}
    status = record.OUT_OF_MEMORY if row.what == "study eager" and more["tokens"] == 16384 else "ok"
    time = 1.0 + number % 7
    return replace(
        row, p20_ms=time, p50_ms=time, p80_ms=time, mean_ms=time, std_ms=0.1, peak_mib=2048.0, status=status, more=more
    )


def test_without_rows_it_says_what_is_missing(tmp_path: Path) -> None:
    text = writeup.Writer([], tmp_path).page()
    assert text.count("Not measured yet") == 9
    assert not re.search(r"\d+ ms|times as fast", text)


def test_eager_rows_do_not_stand_for_compiled_ones(tmp_path: Path) -> None:
    jobs = writeup.measurements(torch.device("cpu"))
    eager = [row for job in jobs for row in job.expected if row.what == "model" and row.impl == writeup.EAGER]
    text = writeup.Writer([made_up(row, i) for i, row in enumerate(eager)], tmp_path).page()
    assert "Not measured yet" in text.split("## 1.3.1")[1].split("##")[0]


def test_with_all_rows_every_question_is_answered(tmp_path: Path) -> None:
    jobs = writeup.measurements(torch.device("cpu"))
    expected = [row for job in jobs for row in job.expected]
    assert len({row.key for row in expected}) == len(expected)
    record.append([made_up(row, i) for i, row in enumerate(expected)], tmp_path / "writeup.jsonl")
    writeup.write(tmp_path, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "Not measured yet" not in text
    for words in (
        "Backward takes",
        "Without warm-up",
        "Matrix products take 70%",
        "softmax takes 0.25",
        "A training step in bfloat16",
        "4 x 512 x 2560 x 4 / 1024² = 20 MiB",
        "The smallest that runs out of memory is 8x16384x16",
        "Both passes: ours is",
    ):
        assert words in text
    assert "OOM" in text
    assert (tmp_path / "flash-bfloat16.svg").exists()
    for line in text.splitlines():
        if line.startswith("| ---"):
            assert line.endswith("|")


def test_the_page_in_docs_is_the_one_the_rows_make(tmp_path: Path) -> None:
    file = ROOT / writeup.FOLDER / "writeup.jsonl"
    rows = record.read(file) if file.exists() else []
    assert (ROOT / writeup.PAGE).read_text(encoding="utf-8") == writeup.Writer(rows, tmp_path).page()
