"""The sizes of the Hopper kernels' blocks, chosen by measurement on an H200 (docs/log/)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forward:
    """Warpgroups of 64 queries each, keys per block, pairs of K and V and tiles of queries in flight."""

    warpgroups: int
    block_k: int
    stages: int
    queries: int


@dataclass(frozen=True)
class Backward:
    """Warpgroups, queries per block, keys of each warpgroup."""

    warpgroups: int
    block_q: int
    block_k: int


FORWARD = {64: Forward(2, 128, 4, 2), 128: Forward(2, 128, 2, 2), 256: Forward(2, 64, 2, 1)}
BACKWARD = {64: Backward(2, 128, 64), 128: Backward(2, 64, 64)}
"""By padded head size. Past 128 dK and dV of two warpgroups no longer fit the registers: see two_pass.py."""

FORWARD_BY_THREE = {64: Forward(3, 64, 8, 2)}
"""Where blocks are many and one like the other: of a band, without a carry, with V in float16. Shorter tiles, and tiles
of 192 queries that two documents share, are slower so."""
BACKWARD_BY_THREE = {64: Backward(3, 64, 64)}
"""Of a band, where dQ is made in the same pass."""
THREE_FROM = {"queries": 257, "seen": 1024, "keys": 257}
"""From how many queries, and keys that one of them sees, forward is done by three, and from how many keys backward:
with fewer, tiles of 192 are a third empty, or most blocks at an edge."""

FINER = {64: 1024, 128: 2048}
"""By padded head size, how many queries must see a key, of all heads it serves, for forward to be faster with V in
float16, which has to be made, than with a maximum that is followed."""

WARPS = {"REGISTERS": 240, "PRODUCER_REGISTERS": 24, "num_warps": 4}
"""Registers of a thread of one of two consumers and of the producer, and warps of a warpgroup."""


def warps(warpgroups: int) -> dict[str, int]:
    """The same for two consumer warpgroups, or three."""
    return {**WARPS, "CONSUMERS": warpgroups, **({"REGISTERS": 160} if warpgroups == 3 else {})}


def forward_tile(wide: int, alike: bool, queries: int, seen: int) -> Forward:
    """Sizes for this number of queries that see `seen` keys each, in blocks that are `alike` or not."""
    many = queries >= THREE_FROM["queries"] and seen >= THREE_FROM["seen"]
    return FORWARD_BY_THREE[wide] if wide in FORWARD_BY_THREE and alike and many else FORWARD[wide]


def backward_tile(wide: int, alike: bool, keys: int) -> Backward:
    """Sizes for this number of keys, in blocks that are `alike` or not."""
    many = keys >= THREE_FROM["keys"]
    return BACKWARD_BY_THREE[wide] if wide in BACKWARD_BY_THREE and alike and many else BACKWARD[wide]


def dq_turns(warpgroups: int, wide: int, claimed: bool, far_and_grouped: bool = False) -> int:
    """How the warpgroups of backward make dQ: 0, two half of every one each; 1, by turns, each every second one whole;
    2, the same, with two places for them on their way out, as three do.

    By turns shared memory is read less, of which heads of 64 have enough. Two places are faster only where sums of dQ
    are not claimed one by one; and if they are, turns are slower where grouped heads see all keys behind them.
    """
    if warpgroups == 3:
        return 2
    if wide == 64:
        return 0
    return 2 if not claimed else 0 if far_and_grouped else 1
