"""The ledger: the predicted memory is the memory that ranks hold."""

from __future__ import annotations

from dataclasses import asdict
from typing import get_args

import pytest

from flashspan.bench.measure.ledger import Ledger, Strategy, Transformer, predict
from flashspan.bench.suites.data_strategies import prepare

SIZES = Transformer(num_layers=3, width=48, num_heads=4, num_kv_heads=4, ffn_width=100, vocab_size=300)


def _held(strategy: Strategy, batch: int, length: int) -> Ledger:
    return prepare("bucketed" if strategy == "data" else strategy, SIZES, batch, length).ledger()


@pytest.mark.parametrize("strategy", get_args(Strategy))
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_predicted_ledger_is_the_measured_one(on_ranks, num_ranks: int, strategy: Strategy) -> None:
    want = asdict(predict(SIZES, strategy, num_ranks=num_ranks, tokens=num_ranks * 2 * 32))
    for held in on_ranks(num_ranks, _held, strategy, 2, 32):
        for part, size in asdict(held).items():
            assert abs(size - want[part]) <= 0.1 * want[part], (part, size, want[part])


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(ValueError, match="fully sharded"):
        predict(SIZES, "zero", num_ranks=2, tokens=8)  # type: ignore[arg-type]
