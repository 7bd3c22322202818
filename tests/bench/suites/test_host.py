"""The host time of a call: the minimum over rounds in which all implementations take turns."""

import time

import torch

from flashspan.bench.suites.host import microseconds


def test_all_take_turns_and_one_busy_moment_spoils_no_minimum() -> None:
    order = []

    def quick() -> None:
        order.append("quick")
        if len(order) == 5:  # in the second round
            time.sleep(0.2)

    least = microseconds({"quick": quick, "slow": lambda: order.append("slow")}, 2, torch.device("cpu"), rounds=3)
    assert order == ["quick", "quick", "slow", "slow"] * 4
    assert 0 < least["quick"] < 1e5
    assert 0 < least["slow"] < 1e5
