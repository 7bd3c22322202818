"""The benchmark of strategies runs, prints its results, and writes rows like every other benchmark."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from flashspan.bench.measure import record, trace
from flashspan.bench.measure.ledger import Transformer
from flashspan.bench.suites import data
from flashspan.bench.suites.data import bench_data, measure_ranks, shape_of, table
from flashspan.bench.suites.data_strategies import STRATEGIES, prepare

ROOT = Path(__file__).parents[3]
SIZES = Transformer(num_layers=2, width=32, num_heads=4, num_kv_heads=2, ffn_width=64, vocab_size=100)


@pytest.mark.slow
def test_every_strategy_is_measured_in_one_run(tmp_path: Path) -> None:
    rows = measure_ranks(2, STRATEGIES, rounds=3, batch=1, length=16, sizes=SIZES)
    assert [row.impl for row in rows] == list(STRATEGIES)
    for row in rows:
        assert (row.what, row.ranks, row.kind) == ("data", 2, "step")
        assert 0 < row.p20_ms <= row.p50_ms <= row.p80_ms
        assert 0 < row.more["communication_ms"] < 1e4
        assert 0.0 <= row.more["hidden"] <= 1.0
        held = sum(row.more[f"{name}_mib"] for name in ("parameters", "gradients", "optimizer", "activations"))
        assert row.peak_mib == pytest.approx(held)
        assert abs(row.more["predicted_mib"] - held) <= 0.1 * held
    assert all(row.more["hidden"] == 0.0 for row in rows if row.impl in ("naive", "flat"))
    path = tmp_path / "data.jsonl"
    record.append(rows, path)
    record.append(rows[:1], path)
    assert [row.impl for row in record.read(path)] == [*STRATEGIES, "naive"]
    shown, back = table(rows), table(record.newest(record.read(path)))
    assert shown == back
    assert len(shown.cells) == len(STRATEGIES)
    assert all(line[5] and line[6] for line in shown.cells)


class Happened:
    """An event of a profile: its name, start, end and thread."""

    def __init__(self, name: str, begin: int, end: int, thread: int = 1) -> None:
        self.name, self.start_ns, self.start_thread_id = lambda: name, lambda: begin, lambda: thread
        self.duration_ns, self.device_type = lambda: end - begin, lambda: torch._C._autograd.DeviceType.CPU


def test_what_computing_hides_of_the_wire_is_read_from_a_profile() -> None:
    reduced = [Happened("gloo:all_reduce", 10, 30, 2), Happened("gloo:all_reduce", 20, 40, 3)]  # 30 ns together
    # One operator that waits inside, one in it that computes for 15 ns during communication, and one before.
    ops = [Happened("aten::linear", 0, 50), Happened("aten::mm", 5, 25), Happened("aten::add", 0, 5)]
    spent, hidden = trace.wire_of([*reduced, *ops], torch.device("cpu"))
    assert (spent, hidden) == (30e-6, 0.5)
    assert all(math.isnan(value) for value in trace.wire_of(ops, torch.device("cpu")))


def test_the_table_in_docs_is_made_from_the_rows_there() -> None:
    rows = [row for row in record.newest(record.read(ROOT / "docs" / "benchmarks" / "data.jsonl")) if row.ranks == 4]
    assert [row.impl for row in rows] == list(STRATEGIES)
    made = table(rows)
    assert made.markdown() in (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    assert all(0.9 < float(line[-1].removesuffix("x")) < 1.1 for line in made.cells)  # as predicted


def test_tensor_parallelism_is_left_out_where_heads_do_not_divide() -> None:
    rows = measure_ranks(3, ["bucketed", "tensor"], rounds=2, batch=1, length=8, sizes=SIZES)
    assert [row.impl for row in rows] == ["bucketed"]


@pytest.mark.parametrize(("num_gpus", "device_type"), [(0, "cpu"), (3, "cpu"), (4, "cuda")])
def test_gpus_are_used_where_there_are_enough_for_all_of_a_run(
    num_gpus: int, device_type: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[int, str]] = []

    def note(num_ranks: int, *_: object, device_type: str, **__: object) -> list[record.Row]:
        asked.append((num_ranks, device_type))
        return record.read(ROOT / "docs" / "benchmarks" / "data.jsonl")

    monkeypatch.setattr(data, "measure_ranks", note)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    assert bench_data(ranks=(2, 4), folder=tmp_path) == 0
    assert asked == [(2, device_type), (4, device_type)]


def test_sizes_that_are_given_are_measured_and_rows_tell_them_apart(tmp_path: Path) -> None:
    only, sizes = ("bucketed", "hybrid"), {"width": 32, "heads": 4, "kv_heads": 2, "layers": 1, "tokens": 16}
    assert bench_data(ranks=(2,), rounds=2, only=only, folder=tmp_path, window=8, **sizes) == 0
    rows = record.read(tmp_path / "data.jsonl")
    assert [row.shape for row in rows] == ["1x32, 4/2 heads, window 8, 1x16 per rank"] * 2
    assert data.sizes_of(256, 6, 8, 4) == data.SIZES
    # The usual sizes keep the name that rows of earlier versions have.
    kept = record.read(ROOT / "docs" / "benchmarks" / "data.jsonl")[0]
    assert shape_of(data.SIZES, data.WINDOW, 1, data.LENGTH) == kept.shape


def test_an_unknown_strategy_is_named() -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="torch DDP"):
            prepare("fastest", SIZES, 1, 4)
    finally:
        dist.destroy_process_group()
