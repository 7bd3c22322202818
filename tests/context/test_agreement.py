"""What one rank does wrong is the same ValueError on every rank, long before the timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashspan.context import Placement, context_parallel
from flashspan.context.layout import contiguous
from flashspan.context.transport import ExchangeError

OnRanks = Callable[..., list[Any]]
TIMEOUT = 20.0


def _wrong_layout(num_tokens: int, num_ranks: int) -> Any:
    return 5 if dist.get_rank() == 1 else contiguous(num_tokens, num_ranks)


def _failing_layout(num_tokens: int, num_ranks: int) -> Placement:
    if dist.get_rank() == 1:
        raise KeyError(num_tokens)
    return contiguous(num_tokens, num_ranks)


def call(case: str, timeout: float = TIMEOUT) -> tuple[str, str, float]:
    """On a rank: the type, the message and the time of the error of a call that is wrong on rank 1."""
    odd, q = dist.get_rank() == 1, torch.randn(1, 2, 4, 8)
    options: dict[str, Any] = {"timeout": timeout}
    if case == "transport":
        options["transport"] = "symmetric" if odd else "group"
    if case == "scale later":
        options["num_tokens"] = 32  # the ranks compare the first such call, and gather nothing afterwards
    if "layout" in case:
        options["layout"] = _failing_layout if case == "failing layout" else _wrong_layout
    attend = context_parallel(dist.group.WORLD, **options)
    x = q.to("meta") if case == "device" and odd else q
    if case == "scale later":
        attend(q, q, q)
    started = time.monotonic()
    try:
        attend(x, x, x, scale="x" if case == "scale later" and odd else None)
    except (ValueError, ExchangeError) as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", 0.0


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("transport", "all ranks must agree on strategy, layout or options"),
        ("device", "all ranks must agree on kind of device"),
        ("wrong layout", "rank 1: a layout assigns 32 tokens to 8 ranks and must return a Placement: got int"),
        ("failing layout", "rank 1: the layout function failed: KeyError(32)"),
    ],
)
def test_what_differs_on_one_rank_is_one_error_on_all(on_ranks: OnRanks, case: str, says: str) -> None:
    for kind, text, seconds in on_ranks(call, case):
        assert kind == "ValueError"
        assert text.startswith(says)
        assert seconds < TIMEOUT / 2


def test_the_rank_with_a_wrong_argument_says_which(on_ranks: OnRanks) -> None:
    """The others have agreed on their call before, compare nothing, and wait for this rank until the timeout."""
    answers = on_ranks(call, "scale later", 3.0)
    assert answers[1][0] == "ValueError"
    assert answers[1][1].startswith("scale must be a finite number: got 'x'")
    assert {kind for kind, _, _ in answers} <= {"ValueError", "ExchangeError"}
