"""The command that a report shows for rows measures those rows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashspan import masks
from flashspan.bench.measure import record, sweep
from flashspan.bench.measure.record import Row
from flashspan.bench.suites import attention, data, sparse
from flashspan.cli import main
from tests.bench.report.made_up import commands, drawn_and_listed, exchanged, masked, other_sweeps, page, rows


@pytest.mark.parametrize(
    "made",
    [
        "context --quick",
        "context --quick --dtype bfloat16 --heads 4",
        "context --quick --ranks 1 3 --tokens 512 --repeats 5",
        "context --ranks 1 2 --width 256 --layers 2 --tokens 1024",  # the model of --quick, but every strategy
        "context --ranks 2 3 --tokens 96 --width 64 --layers 1 --heads 4 --kv-heads 4 --repeats 7",
        "study eager --lengths 16 32 --head-dims 8 --repeats 2 --device cpu",
        "study flash --lengths 16 --device cpu",
        "collectives --ranks 2 3 --sizes 1024 4096 --repeats 1",
        "model --presets tiny small --tokens 8 16 --batch 2 --compiled --steps 3 --device cpu",
        "model --presets tiny --dtypes float32 --attentions plain --warmups 0 2 --device cpu",
    ],
)
def test_the_command_beside_rows_measures_the_same_rows(
    made: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted: list[Row] = []

    def note(jobs: list[sweep.Job], *_: Any, **__: Any) -> sweep.Outcome:
        wanted.extend(row for job in jobs for row in job.expected)
        return sweep.Outcome([], 0, 0)

    def asked_for(line: str) -> list[tuple[object, ...]]:
        wanted.clear()
        assert main([*shlex.split(line), "--folder", str(tmp_path)]) == 0
        return sorted((*row.key, row.more.get("repeats"), row.more.get("steps")) for row in wanted)

    monkeypatch.setattr(sweep, "run", note)
    first = asked_for(f"bench {made}")
    [shown] = commands(page([replace(row, status=record.OUT_OF_MEMORY) for row in wanted]))
    assert asked_for(shown.removeprefix("flashspan ")) == first


@pytest.mark.parametrize(
    "shapes",
    [
        ("2,4,2,512,64,causal", "1,16,16,16384,128,window 1024", "1,8,8,4096,128,documents 16"),
        tuple(",".join(map(str, vars(shape).values())) for shape in attention.SHAPES[:2]),
    ],
)
def test_the_command_of_attention_names_the_shapes_of_its_rows(
    shapes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(*, shapes: tuple[str, ...] = (), **_: Any) -> int:
        asked.extend(shapes)
        return 0

    monkeypatch.setattr(attention, "bench_attention", note)
    measured = [replace(rows()[0], what="attention", shape=str(attention.Shape.parse(words))) for words in shapes]
    [shown] = commands(page(measured))
    assert main(shlex.split(shown)[1:]) == 0
    assert asked == list(shapes)


def test_the_command_of_attention_on_its_own_shapes_names_none() -> None:
    own = [replace(rows()[0], what="attention", shape=str(shape)) for shape in attention.SHAPES]
    assert commands(page(own)) == ["flashspan bench attention"]


def test_a_command_that_would_be_refused_is_not_shown() -> None:
    # No line can be fitted to one size, so `bench collectives` needs two.
    left = [exchanged(1024, 7.25, 1.0), exchanged(4096, 8.25, 1.0), exchanged(4096, 1.25, 9.0, torch="3")]
    text = page(left)
    captions, shown, _ = drawn_and_listed(text, "Communication")
    assert captions == ["Median time, torch 2.", "Median time, torch 3."]
    assert shown == ["", ""]
    assert not commands(text)
    [shown] = commands(page(left[:2]))
    assert shown == "flashspan bench collectives --sizes 1024 4096"


def test_each_figure_shows_the_command_of_its_own_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = page([*rows(), *other_sweeps()])
    common = "flashspan bench context --ranks 1 2 --dtype {} --layers 2 --width {} --heads 4 --tokens 256"
    assert commands(text) == [
        common.format("float32", 64).replace("--dtype float32 ", ""),
        common.format("bfloat16", 64),
        common.format("float32", 128).replace("--dtype float32 ", ""),
        "flashspan plan draw --strategy ring --layout zigzag --ranks 2 --tokens 256",
    ]
    captions = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert all(("--width 128" in caption) == ("2x128" in caption) for caption in captions)
    monkeypatch.chdir(tmp_path)  # pictures are written here
    assert main(shlex.split(commands(text)[-1])[1:]) == 0


def test_the_command_of_data_parallelism_is_the_one_that_made_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def measure(num_ranks: int, only: Sequence[str], *, batch: int, **_: Any) -> list[Row]:
        asked.append((num_ranks, only, batch))
        return record.read(Path(__file__).parents[3] / "docs" / "benchmarks" / "data.jsonl")

    monkeypatch.chdir(tmp_path)  # rows are written here
    monkeypatch.setattr(data, "measure_ranks", measure)
    found = [
        replace(rows()[0], what="data", impl=name, shape="2x64 3x128 per rank", ranks=2)
        for name in ("context", "torch DDP")
    ]
    [shown] = commands(page(found))
    assert main(shlex.split(shown)[1:]) == 0
    assert asked == [(2, ("torch DDP", "context"), 3)]


@pytest.mark.parametrize("name", list(sparse.CASES))
def test_the_command_of_sparse_masks_measures_those(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = masks.random_blocks
    monkeypatch.setattr(masks, "random_blocks", lambda T, share, **_: on_cpu(T, share, device="cpu"))
    shapes = [str(make()) for make in sparse.CASES[name]()]
    asked: list[tuple[list[str], bool]] = []
    monkeypatch.setattr(sparse, "run", lambda names, *, others: asked.append((names, others)))
    for impl in ("flex", "flashspan blocks"):
        [shown] = commands(page([row for shape in shapes for row in masked(shape, impl, 1.0, 1.0)]))
        assert main(shlex.split(shown)[1:]) == 0
    assert asked == [([name], True), ([name], name == "window")]
