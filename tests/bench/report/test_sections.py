"""The figures and tables of a report: machines are separate, and each model is one line."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashspan.bench.measure import record
from flashspan.bench.measure.record import Row
from flashspan.bench.report.findings import find
from flashspan.bench.suites import leaderboard, model, sparse
from flashspan.cli import main
from tests.bench.report.made_up import (
    GPU,
    STEPS,
    TIME,
    WHERE,
    attended,
    commands,
    drawn_and_listed,
    exchanged,
    lines_of,
    masked,
    page,
    rows,
    sparse_rows,
    stepped,
    studied,
    timed,
    trained,
)


def test_studies_of_two_machines_are_drawn_and_listed_apart() -> None:
    both = [studied(128, 7.25), studied(256, 8.25), studied(256, 1.25, **GPU), studied(512, 2.25, **GPU)]
    captions, shown, tables = drawn_and_listed(page(both), "Attention over lengths and head sizes")
    cpu = WHERE["device"]
    assert captions == [f"Median time, {cpu}.", "Median time, H200."]
    assert shown == [
        "flashspan bench study flash --lengths 128 256 --head-dims 64 --device cpu",
        "flashspan bench study flash --lengths 256 512 --head-dims 64",
    ]
    slow, fast = (tables[f"study flash, {name}: median milliseconds"] for name in (cpu, "H200"))
    assert re.findall(TIME, slow) == ["7.250", "8.250"]
    assert re.findall(TIME, fast) == ["1.250", "2.250"]


def test_collectives_of_two_machines_are_drawn_listed_and_spoken_of_apart() -> None:
    both = [exchanged(1024, 7.25, 1.0), exchanged(4096, 8.25, 1.0)]
    both += [exchanged(4096, 1.25, 9.0, **GPU), exchanged(8192, 2.25, 9.0, **GPU)]
    captions, shown, tables = drawn_and_listed(page(both), "Communication")
    cpu = WHERE["device"]
    assert captions == [f"Median time, {cpu}.", "Median time, H200."]
    assert shown == [f"flashspan bench collectives --sizes {sizes}" for sizes in ("1024 4096", "4096 8192")]
    assert re.findall(TIME, tables[f"collectives, {cpu}"]) == ["7.250", "8.250"]
    assert re.findall(TIME, tables["collectives, H200"]) == ["1.250", "2.250"]
    fit = "all-reduce on 2 ranks, {}: 3.000 µs and {} GB/s fit the measured times."
    assert find(both) == [fit.format(cpu, "1.000"), fit.format("H200", "9.000")]


def test_lengths_and_sizes_that_only_an_older_pytorch_measured_stand_apart() -> None:
    # If both versions measured a length, the older row is left out. Its other rows are not joined to the newer line.
    lengths = [studied(128, 7.25), studied(256, 8.25), studied(256, 1.25, torch="3")]
    captions, _, tables = drawn_and_listed(page(lengths), "Attention over lengths and head sizes")
    assert captions == ["Median time, torch 2.", "Median time, torch 3."]
    assert [re.findall(TIME, table) for table in tables.values()] == [["7.250"], ["1.250"]]
    sizes = [exchanged(1024, 7.25, 1.0), exchanged(4096, 8.25, 1.0), exchanged(4096, 1.25, 9.0, torch="3")]
    captions, _, tables = drawn_and_listed(page(sizes), "Communication")
    assert captions == ["Median time, torch 2.", "Median time, torch 3."]
    assert [re.findall(TIME, table) for table in tables.values()] == [["7.250"], ["1.250"]]


def test_attention_of_two_machines_is_listed_apart() -> None:
    both = [attended(128, 7.25), attended(256, 8.25), attended(256, 1.25, **GPU), attended(512, 2.25, **GPU)]
    text = page(both)
    _, _, tables = drawn_and_listed(text, "Attention on one device")
    slow, fast = (tables[f"median milliseconds, both passes, {name}"] for name in (WHERE["device"], "H200"))
    assert re.findall(TIME, slow) == ["7.250", "8.250"]
    assert re.findall(TIME, fast) == ["1.250", "2.250"]
    shapes = "flashspan bench attention --shapes 1,8,8,{},64,causal 1,8,8,{},64,causal"
    assert commands(text) == [shapes.format(128, 256), shapes.format(256, 512)]


def test_models_of_two_machines_are_drawn_and_listed_apart() -> None:
    both = [trained(128, 7.25), trained(256, 8.25), trained(256, 1.25, **GPU), trained(512, 2.25, **GPU)]
    captions, shown, tables = drawn_and_listed(page(both), "Models")
    cpu = WHERE["device"]
    words = "Median time of forward, backward and optimizer, {}."
    assert captions == [words.format(cpu), words.format("H200")]
    common = "flashspan bench model --presets tiny --tokens {} --dtypes float32"
    assert shown == [f"{common.format('128 256')} --device cpu", common.format("256 512")]
    slow, fast = (tables[f"{STEPS}, {name}"] for name in (cpu, "H200"))
    assert re.findall(r"\d\.25 ± 0", slow) == ["7.25 ± 0", "8.25 ± 0"]
    assert re.findall(r"\d\.25 ± 0", fast) == ["1.25 ± 0", "2.25 ± 0"]


def test_data_parallelism_of_two_machines_is_listed_apart() -> None:
    text = page([stepped(2, 7.25), stepped(2, 1.25, **GPU), stepped(4, 2.25, **GPU)])
    _, _, tables = drawn_and_listed(text, "Data, optimizer and tensor parallelism")
    assert re.findall(TIME, tables[f"a step, {WHERE['device']}"]) == ["7.250"]
    assert re.findall(TIME, tables["a step, H200"]) == ["1.250", "2.250"]
    common = "flashspan bench data --ranks 2 {}--only 'torch DDP'"
    sizes = "--layers 2 --width 64 --batch 2 "
    assert commands(text) == [common.format(sizes), common.format("")]  # the GPU's rows came from two commands


def test_one_machine_is_not_named_beside_its_rows() -> None:
    made = (studied, attended, trained)
    text = page(
        [make(size, 7.25) for make in made for size in (128, 256)] + [exchanged(1024, 7.25, 1.0), stepped(2, 7.25)]
    )
    for title, caption, table in (
        ("Attention over lengths and head sizes", ["Median time."], "study flash: median milliseconds"),
        ("Communication", ["Median time."], "collectives"),
        ("Attention on one device", [], "median milliseconds, both passes"),
        ("Models", ["Median time of forward, backward and optimizer."], STEPS),
        ("Data, optimizer and tensor parallelism", [], "a step"),
    ):
        captions, _, tables = drawn_and_listed(text, title)
        assert captions == caption
        assert list(tables) == [table]


def test_collectives_that_all_ran_out_of_memory_are_a_table_of_that() -> None:
    lost = replace(rows()[0], what="collective", impl="all-reduce", status=record.OUT_OF_MEMORY, bytes=4e11, more={})
    text = page([*rows(), lost])
    assert "Communication" in text
    assert 'data-heading="ms">out of memory</td>' in text


def test_models_are_a_line_each_from_the_smallest_on() -> None:
    def measured(shape: str, dtype: str, impl: str, warmup: int = 5, what: str = "model") -> list[Row]:
        same: dict[str, Any] = {"what": what, "shape": shape, "dtype": dtype, "impl": impl, "std_ms": 0.5}
        same["more"] = {"warmup": warmup, "steps": 10}
        peaks = {"inference": 100.0, "training": 2048.0}
        found = [
            replace(rows()[0], kind=kind, mean_ms=10.0 + number, peak_mib=peaks.get(kind, math.nan), **same)
            for number, kind in enumerate(model.KINDS)
        ]
        return found[::-1]

    wanted = [
        ("tiny 4x512", "flashspan, eager", "float32"),
        ("small 4x128", "flashspan, eager", "bfloat16"),
        ("small 4x128", "plain, eager", "bfloat16"),
        ("small 4x128", "flashspan, eager", "float32"),
        ("small 4x1024", "flashspan, eager", "float32"),
        ("xl 4x128", "flashspan, eager", "float32"),
        ("2.7B 4x128", "flashspan, eager", "float32"),
        ("of-another-version 4x128", "flashspan, eager", "float32"),
    ]
    found = [row for shape, impl, dtype in reversed(wanted) for row in measured(shape, dtype, impl)]
    lost = next(row for row in found if row.shape.startswith("xl") and row.kind == "training")
    found[found.index(lost)] = replace(lost, status=record.OUT_OF_MEMORY, mean_ms=math.nan)
    unknown = next(row for row in found if row.shape.startswith("2.7B") and row.kind == "inference")
    found[found.index(unknown)] = replace(unknown, mean_ms=math.nan, std_ms=math.nan)
    for warmup in (10, 2):
        study = f"flashspan, eager, {warmup} warm-ups"
        found += measured("tiny 4x512", "float32", study, warmup, "warm-up")
        wanted.insert(1, ("tiny 4x512", study, "float32"))
    _, _, tables = drawn_and_listed(page(found), "Models")
    headings, *cells = lines_of(tables[STEPS])
    assert headings == ["model", "implementation", "dtype", *model.KINDS, "peak MiB"]
    assert [tuple(line[:3]) for line in cells] == wanted
    assert cells[0][3:] == ["10 ± 0.5", "11 ± 0.5", "12 ± 0.5", "13 ± 0.5", "14 ± 0.5", "2,048"]
    by_model = {line[0]: line for line in cells}
    assert by_model["xl 4x128"][-2:] == ["OOM", ""]
    slow = replace(found[0], mean_ms=12345.6, std_ms=678.9)
    assert model.table([slow]).cells[0][3] == "12,346 ± 679"  # not 1.235e+04 ± 6.8e+02
    assert by_model["2.7B 4x128"][3:5] == ["", "11 ± 0.5"]


def test_sparse_masks_and_the_leaderboard_are_read_listed_drawn_and_spoken_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = [replace(row, **timed(99.0)) for row in sparse_rows()]  # rows of an earlier run
    record.append([*slow, *sparse_rows()], tmp_path / sparse.PATH.name)
    earlier, now = attended(16384, 5.25), attended(16384, 4.25)
    record.append([earlier, now], tmp_path / leaderboard.PATH.name)
    step = replace(now, shape="1.24B 1x8192", kind="step", **timed(130.0))
    record.append([replace(step, impl="another", **timed(195.0)), step], tmp_path / "trainer.csv")
    assert main(["report", str(tmp_path)]) == 0
    found = capsys.readouterr().out
    assert (
        "flashspan compared with FlexAttention on 2 masks: forward 1.50 (1x16x16384x64 random 10%) to 2.50 "
        "(1x16x16384x128 window 1024) times as fast (faster on 2), backward 2.00 (1x16x16384x128 window 1024) to 2.50 "
        "(1x16x16384x64 random 10%) times as fast (faster on 2)."
    ) in found
    assert "the fastest other" not in found
    assert "flashspan compared with another: step of 1.24B 1x8192 1.50 times as fast." in found
    text = (tmp_path / "report.html").read_text()
    captions, shown, tables = drawn_and_listed(text, "Block-sparse attention")
    assert captions == ["Median time. Ideal: the time of the dense kernel at 8,192 tokens, times the share."]
    assert shown == ["flashspan bench sparse --rows sweep --no-others"]
    times, rates = map(lines_of, tables.values())
    assert times == [
        ["shape", "flashspan intervals", "flashspan blocks", "flex", "vs flex"],
        ["1x16x16384x128 window 1024", "1.000 / 4.000", "2.000 / 3.000", "2.500 / 6.000", "2.50x / 2.00x"],
        ["1x16x16384x64 random 10%", "", "1.000 / 2.000", "1.500 / 5.000", "1.50x / 2.50x"],
        ["1x16x8192x128 full", "10.00 / 20.00", "", "", ""],
        ["1x16x8192x128 random 50%", "", "20.00 / 25.00", "", ""],
        ["1x16x8192x128 random 2%", "", "40.00 / 80.00", "", ""],
    ]
    assert rates == [["blocks visited", "50%", "2%"], ["efficiency", "50% / 80%", "25% / 25%"]]
    _, _, tables = drawn_and_listed(text, "Leaderboard")
    [table] = tables.values()
    assert [line[:4] for line in lines_of(table)[1:]] == [[now.shape, now.impl, now.kind, "4.250"]]
    assert commands(text)[0] == "flashspan bench leaderboard"
    _, _, tables = drawn_and_listed(text, "Training and generating compared with transformers")
    [table] = tables.values()
    assert lines_of(table)[2][:4] == ["1.24B 1x8192", "flashspan", "step", "130.0"]
    assert "flashspan bench training" in text
    assert "Attention on one device" not in text


def test_a_sparse_sweep_without_its_dense_kernel_is_a_table_alone() -> None:
    left = [row for row in sparse_rows() if "full" not in row.shape]
    captions, _, tables = drawn_and_listed(page(left), "Block-sparse attention")
    assert captions == []
    assert len(tables) == 1
    one_pass = [row for row in sparse_rows() if row.kind == "forward"]  # killed between the two
    _, _, tables = drawn_and_listed(page(one_pass), "Block-sparse attention")
    assert lines_of(list(tables.values())[1])[1] == ["efficiency", "50% / -", "25% / -"]
    with pytest.raises(ValueError, match=r"has no shape like .*: another version wrote it"):
        page([replace(left[0], shape="1x16x16384 random")])


def test_sparse_masks_of_two_machines_are_compared_and_listed_apart() -> None:
    size = "1x16x16384x128 window 1024"
    both = [*masked(size, "flashspan blocks", 1.0, 1.0), *masked(size, "flex", 2.0, 2.0, **GPU)]
    assert not any("FlexAttention" in text for text in find(both))
    _, _, tables = drawn_and_listed(page(both), "Block-sparse attention")
    assert len(tables) == 2
    both += masked(size, "flashspan blocks", 1.0, 0.5, **GPU)
    assert f"on 1 mask: forward 2.00 ({size}) times as fast (faster on 1), backward 4.00" in find(both)[0]
