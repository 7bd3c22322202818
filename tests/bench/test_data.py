"""The benchmark of strategies runs, says what it should, and its file can be read back."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from flashspan.bench.data import CONTENDERS, append, measure_ranks, prepare, table
from flashspan.parallel.memory import Transformer

SIZES = Transformer(num_layers=2, width=32, num_heads=4, num_kv_heads=2, ffn_width=64, vocab_size=100)


def test_every_contender_is_measured_in_one_run(tmp_path: Path) -> None:
    rows = measure_ranks(2, CONTENDERS, rounds=3, batch=1, length=16, sizes=SIZES)
    assert [row.contender for row in rows] == list(CONTENDERS)
    for row in rows:
        assert 0 < row.p20_ms <= row.p50_ms <= row.p80_ms
        ours = row.contender in ("naive", "flat", "overlapped", "bucketed", "sharded optimizer", "context")
        assert ours == (0.0 <= row.hidden <= 1.0)
        held = row.parameters_mib + row.gradients_mib + row.optimizer_mib + row.activations_mib
        assert abs(row.predicted_mib - held) <= 0.1 * held
    assert all(row.hidden == 0.0 for row in rows if row.contender in ("naive", "flat"))
    path = tmp_path / "data.csv"
    append(rows, path)
    append(rows[:1], path)
    with path.open() as file:
        read = list(csv.DictReader(file))
    assert [line["contender"] for line in read] == [*CONTENDERS, "naive"]
    assert table(rows).row_count == len(CONTENDERS)


def test_tensor_parallelism_is_left_out_where_heads_do_not_divide() -> None:
    rows = measure_ranks(3, ["bucketed", "tensor"], rounds=2, batch=1, length=8, sizes=SIZES)
    assert [row.contender for row in rows] == ["bucketed"]


def test_an_unknown_contender_is_named() -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="torch DDP"):
            prepare("fastest", SIZES, 1, 4)
    finally:
        dist.destroy_process_group()
