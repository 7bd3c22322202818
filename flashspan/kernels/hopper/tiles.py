"""The sizes of the Hopper kernels' blocks, chosen by measurement on an H200 (docs/kernels.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forward:
    """Keys per block, pairs of K and V and tiles of 128 queries in flight."""

    block_k: int
    stages: int
    queries: int


@dataclass(frozen=True)
class Backward:
    """Queries per block, keys of each of the two warpgroups."""

    block_q: int
    block_k: int


FORWARD = {64: Forward(128, 4, 2), 128: Forward(128, 2, 2), 256: Forward(64, 2, 1)}
BACKWARD = {64: Backward(128, 64), 128: Backward(64, 64)}
"""By padded head size. Past 128 dK and dV of two warpgroups no longer fit the registers: see two_pass.py."""

FINER = {64: 1024, 128: 2048}
"""By padded head size, how many queries must see a key, of all heads it serves, for forward to be faster with V in
float16, which has to be made, than with a maximum that is followed."""

WARPS = {"REGISTERS": 240, "FEED_REGISTERS": 24, "num_warps": 4}
"""Registers of a thread that multiplies and of one that feeds, and warps of a warpgroup: the same everywhere."""


def dq_turns(wide: int, claimed: bool, far_and_grouped: bool = False) -> int:
    """How the two warpgroups of backward make dQ: 0, each half of every one; 1, by turns, each every second one whole;
    2, the same, with two places for them on their way out.

    By turns shared memory is read less, of which heads of 64 have enough. Two places are faster only where sums of dQ
    are not claimed one by one; and if they are, turns are slower where grouped heads see all keys behind them.
    """
    if wide == 64:
        return 0
    return 2 if not claimed else 0 if far_and_grouped else 1
