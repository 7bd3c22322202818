"""`flashspan bench rounding` refuses numbers of tokens that it cannot measure."""

from __future__ import annotations

import pytest

from flashspan.bench.suites.rounding import bench_rounding


@pytest.mark.parametrize("tokens", [-1, 0, 2**40, 2**63])
def test_bad_numbers_of_tokens_are_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"{tokens}"):
        bench_rounding(tokens=tokens, device="cpu")
