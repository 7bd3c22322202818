"""The findings of a report: only differences beyond the noise of repeated measurements, without contradictions."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from flashspan.bench.measure import record
from flashspan.bench.measure.record import Row
from flashspan.bench.report.findings import compare, find
from flashspan.bench.report.workloads import PARTS, split
from flashspan.bench.suites.context_rank import ALONE
from flashspan.cli import main
from tests.bench.report.made_up import other_sweeps, page, rows, timed, timed_as, upgraded


def test_findings_are_computed_from_the_rows() -> None:
    text = " ".join(find(rows()))
    assert "ring zigzag is fastest" in text
    assert "1.82 times as fast as one device" in text
    assert "ring zigzag is matmuls" in text
    assert "zigzag is 1.36 times faster" in text
    assert "80% of it is hidden" in text
    slow = " ".join(find([replace(row, p50_ms=1000 * row.p50_ms) for row in rows()]))
    assert "is fastest, 55,000 ms" in slow


@pytest.mark.parametrize("alone", [40.7, 55.0, 56.0])
def test_where_one_device_is_as_fast_more_of_them_are_no_advice(alone: float) -> None:
    """One device is faster (as in a first run on a small machine), equally fast, or slower by no more than noise."""
    text = " ".join(find(timed_as(alone=alone)))
    assert "is matmuls" in text
    assert "does not pay" in text
    assert "more devices" not in text
    assert "1.00 times as fast as one device" not in text
    assert ("no measurable difference from one device" in text) == (alone > 50)


@pytest.mark.parametrize("changes", [{}, {"alone": 58.0}])
def test_where_splitting_is_faster_nothing_speaks_against_it(changes: dict[str, float]) -> None:
    text = " ".join(find(timed_as(**changes)))
    assert "does not pay" not in text
    assert "more devices, or bfloat16" in text


@pytest.mark.parametrize("contiguous", [53.5, 55.0, 56.5])
def test_times_that_noise_could_have_made_are_not_told_apart(contiguous: float) -> None:
    text = " ".join(find(timed_as(contiguous=contiguous)))
    assert "no measurable difference between zigzag and contiguous" in text
    assert "The choice does not matter" in text
    assert not re.search(r"times (faster|slower)|is fastest", text)


@pytest.mark.parametrize(("contiguous", "said"), [(58.0, "1.05 times faster"), (52.0, "1.06 times slower")])
def test_times_beyond_noise_are_told_apart(contiguous: float, said: str) -> None:
    text = " ".join(find(timed_as(contiguous=contiguous)))
    assert f"zigzag is {said} than contiguous tokens" in text
    assert "The choice matters: ring " in text
    assert "no measurable difference" not in text


@pytest.mark.parametrize(("spread", "outcome"), [(0.01, 1), (0.05, 1), (0.2, 0)])
def test_a_difference_is_stated_where_percentiles_do_not_overlap(spread: float, outcome: int) -> None:
    fast, slow = (
        replace(rows()[0], p20_ms=(1 - spread) * time, p50_ms=time, p80_ms=(1 + spread) * time) for time in (55.0, 75.0)
    )
    assert compare(fast, slow) == outcome
    assert compare(slow, fast) == -outcome
    assert compare(fast, fast) == 0
    unknown = replace(slow, p20_ms=math.nan, p80_ms=math.nan)
    assert compare(replace(fast, p80_ms=math.nan), unknown) == 1


@pytest.mark.parametrize(("zigzag", "contiguous"), [(55.0, 75.0), (75.0, 55.0), (55.0, 55.0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bound", [{"computing_ms": 10.0}, {"imbalance": 4.0}, {"product_share": 0.1}, {}])
def test_advice_contradicts_no_other_finding(
    zigzag: float, contiguous: float, dtype: str, bound: dict[str, float]
) -> None:
    made = [
        replace(row, dtype=dtype, more={**row.more, **bound}) for row in timed_as(zigzag=zigzag, contiguous=contiguous)
    ]
    [step] = [text for text in find(made) if "shortens" in text]
    means = step.split("shortens")[1]
    assert "zigzag" not in means  # it was measured, so it is in use or not faster
    assert ("the helper strategy" in means) == (bound == {"imbalance": 4.0})  # not measured
    if dtype == "bfloat16":
        assert "bfloat16" not in means
        assert "16-bit" not in means


def test_a_second_sweep_does_not_change_what_is_said_of_the_first(tmp_path: Path) -> None:
    both = find([*rows(), *other_sweeps()])
    firsts = [text.split(" on 2 ranks")[0] for text in both if "is fastest" in text]
    assert firsts == [
        f"2x{w}, 4/2 heads, 256 tokens, {d}:" for w, d in ((64, "float32"), (64, "bfloat16"), (128, "float32"))
    ]
    assert (
        "zigzag is fastest, 55.00 ms forward and backward, 1.82 times as fast as one device (91% of ideal)" in both[0]
    )
    assert both.count("Weak scaling from 1 to 2 ranks (zigzag ring): each rank keeps 91% of one device's speed.") == 2
    figures = tmp_path / "figures"
    record.append([*rows(), *other_sweeps()], tmp_path / "context.jsonl")
    assert main(["report", str(tmp_path), "--figures", str(figures)]) == 0
    drawn = {file.name for file in figures.iterdir()}
    assert {"latency.svg", "latency-2.svg", "latency-3.svg", "ring.svg", "ring-forward.svg"} <= drawn
    text = (tmp_path / "report.html").read_text()
    assert text.count("one device against every strategy: ") == 3


def test_a_row_of_weak_scaling_is_the_one_device_of_a_shorter_sequence() -> None:
    weak = [replace(row, more={**row.more, "scaling": "weak"}) if row.impl == ALONE else row for row in rows()]
    assert find(weak) == find(rows())


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"computing_ms": 10.0}, "wire"),
        ({"imbalance": 4.0}, "imbalance"),
        ({"product_share": 0.1}, "memory"),
        ({"product_share": 0.9}, "compute"),
    ],
)
def test_what_bounds_a_run_is_its_largest_part(changes: dict[str, float], bound: str) -> None:
    best = next(row for row in rows(**changes) if row.impl == "ring zigzag" and row.kind == "forward+backward")
    shares = split(best)
    assert shares is not None
    assert shares.bound == bound
    assert sum(vars(shares).values()) == pytest.approx(best.p50_ms)
    assert f"is {PARTS[bound]}: " in " ".join(find(rows(**changes)))


def test_a_busy_machine_is_said_to_be_one() -> None:
    loud = [replace(row, p20_ms=0.1 * row.p50_ms, p80_ms=3 * row.p50_ms) for row in rows()]
    assert "Take the times with care" in find(loud)[0]
    assert "Take the times" not in find(rows())[0]


def test_an_upgrade_is_not_taken_for_a_speed_up() -> None:
    # The second run was killed before it measured the contiguous ring.
    both = [*rows(), *(upgraded(row) for row in rows() if row.impl != "ring contiguous")]
    found = find(both)
    assert "is fastest, 27.50 ms forward and backward, 1.82 times as fast as one device" in found[0]
    assert "Left out: 6 rows (context) of torch 2. " in found[-1]
    assert not any("contiguous" in text for text in found)
    text = page(both)
    assert "1.82x" in text
    assert "3.64x" not in text
    # Only the strategies were measured again: nothing to compare them with.
    assert not any("one device" in text for text in find([*rows(), *(upgraded(r) for r in rows() if r.ranks == 2)]))
    # The older version was measured last.
    assert "55.00 ms" in find([*(upgraded(row) for row in rows()), *rows()])[0]


def test_attention_and_models_are_compared_on_one_device_only() -> None:
    def attention(impl: str, time: float, device: str) -> Row:
        return replace(rows()[0], what="attention", kind="both", impl=impl, **timed(time), device=device)

    found = find([attention("flashspan", 1.0, "old"), attention("flex", 2.0, "old"), attention("flex", 0.1, "new")])
    assert "flashspan runs at 2.00 times the speed of the fastest other on 1 shape " in found[0]
    step = replace(rows()[0], what="model", kind="training", impl="flashspan, eager")
    assert "autocast" not in find([step, replace(step, dtype="bfloat16", device="new")])[0]
    half = replace(step, dtype="bfloat16", **timed(step.p50_ms / 2))
    assert find([step, half])[0] == "bfloat16 autocast: a training step is 2.00 times as fast."


def test_our_own_variants_are_not_others() -> None:
    def attention(impl: str, time: float, shape: str) -> Row:
        return replace(rows()[0], what="attention", kind="both", impl=impl, **timed(time), shape=shape)

    one = [attention("flashspan", 1.0, "A"), attention("flashspan-repeatable", 1.1, "A")]
    assert not any("the fastest other" in text for text in find(one))
    one += [attention("sdpa-cudnn", 2.0, "A"), attention("flex", 3.0, "A")]
    two = [attention("flashspan", 1.0, "B"), attention("flex", 8.0, "B"), attention("flashspan-portable", 0.5, "B")]
    [found] = find([*one, *two])
    assert "flashspan runs at 4.00 times the speed of the fastest other on 2 shapes" in found
    assert "from 2.00 (A, sdpa-cudnn) to 8.00 (B, flex); it is faster on 2." in found


def test_a_device_of_more_threads_is_another_device() -> None:
    def with_threads(row: Row, threads: int) -> Row:
        return replace(row, more={**row.more, "threads": threads})

    same = [with_threads(row, 1) for row in rows()]
    assert find(same) == find(rows())
    other = [with_threads(row, 2 if row.impl == ALONE else 1) for row in rows()]
    assert find(other)[0].startswith("2x64, 4/2 heads, 256 tokens, threads per rank 1: on 2 ranks ring zigzag")
    assert not any("one device" in text for text in find(other))
    assert "x</td>" not in page(other).replace("1.00x</td>", "")  # no strategy has a speed-up


def test_what_was_not_measured_is_not_spoken_of() -> None:
    bare = {"hidden": None, "mfu": None, "product_share": None}
    unknown = [replace(r, peak_mib=math.nan, tflops=math.nan, more={**r.more, **bare}) for r in rows()]
    unknown.append(replace(rows()[0], what="collective", impl="all-reduce", more={"alpha_us": 3.0, "gb_per_s": None}))
    assert "1.82 times as fast" in find(unknown)[0]
    words = ("nan", "memory", "bound by", "hidden", "scaling", "fit the measured")
    assert not [text for text in find(unknown) if any(word in text for word in words)]
    assert "nan" not in re.sub("<svg.*?</svg>", "", page(unknown), flags=re.DOTALL)
