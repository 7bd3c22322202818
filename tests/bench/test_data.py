"""The benchmark of strategies runs, says what it should, and its rows are those of every other measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashspan.bench import record
from flashspan.bench.data import CONTENDERS, measure_ranks, prepare, table
from flashspan.parallel.memory import Transformer

ROOT = Path(__file__).parent.parent.parent
SIZES = Transformer(num_layers=2, width=32, num_heads=4, num_kv_heads=2, ffn_width=64, vocab_size=100)


def test_every_contender_is_measured_in_one_run(tmp_path: Path) -> None:
    rows = measure_ranks(2, CONTENDERS, rounds=3, batch=1, length=16, sizes=SIZES)
    assert [row.impl for row in rows] == list(CONTENDERS)
    for row in rows:
        assert (row.what, row.ranks, row.kind) == ("data", 2, "step")
        assert 0 < row.p20_ms <= row.p50_ms <= row.p80_ms
        ours = row.impl in ("naive", "flat", "overlapped", "bucketed", "sharded optimizer", "context")
        assert ours == (0.0 <= row.more["hidden"] <= 1.0)
        held = sum(row.more[f"{name}_mib"] for name in ("parameters", "gradients", "optimizer", "activations"))
        assert row.peak_mib == pytest.approx(held)
        assert abs(row.more["predicted_mib"] - held) <= 0.1 * held
    assert all(row.more["hidden"] == 0.0 for row in rows if row.impl in ("naive", "flat"))
    path = tmp_path / "data.jsonl"
    record.append(rows, path)
    record.append(rows[:1], path)
    assert [row.impl for row in record.read(path)] == [*CONTENDERS, "naive"]
    # What is not known, a wire that is not ours, is an empty cell, measured now or read back.
    shown, back = table(rows), table(record.newest(record.read(path)))
    assert shown == back
    assert len(shown.cells) == len(CONTENDERS)
    assert shown.cells[CONTENDERS.index("torch DDP")][5:7] == ("", "")


def test_the_table_in_docs_is_made_from_the_rows_there() -> None:
    rows = [row for row in record.newest(record.read(ROOT / "docs" / "benchmarks" / "data.jsonl")) if row.ranks == 4]
    assert [row.impl for row in rows] == list(CONTENDERS)
    made = table(rows)
    assert made.markdown() in (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    assert all(0.9 < float(line[-1].removesuffix("x")) < 1.1 for line in made.cells)  # what was predicted


def test_tensor_parallelism_is_left_out_where_heads_do_not_divide() -> None:
    rows = measure_ranks(3, ["bucketed", "tensor"], rounds=2, batch=1, length=8, sizes=SIZES)
    assert [row.impl for row in rows] == ["bucketed"]


def test_an_unknown_contender_is_named() -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="torch DDP"):
            prepare("fastest", SIZES, 1, 4)
    finally:
        dist.destroy_process_group()
