"""The sizes of the Hopper kernels' blocks, chosen by measurement on an H200 (docs/kernels.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forward:
    """Keys per block, warpgroups of 64 queries, pairs of K and V and tiles of Q in flight, registers of a thread that
    multiplies and of one that feeds."""

    block_k: int
    warpgroups: int
    stages: int
    queries: int
    registers: int
    feed_registers: int


@dataclass(frozen=True)
class Backward:
    """Queries per block, keys of each of the two warpgroups, registers of a thread that multiplies."""

    block_q: int
    block_k: int
    registers: int


FORWARD = {64: Forward(128, 3, 4, 2, 160, 32), 128: Forward(128, 2, 2, 2, 240, 24), 256: Forward(64, 2, 2, 1, 240, 24)}
BACKWARD = {64: Backward(128, 64, 240), 128: Backward(64, 64, 240)}
"""By padded head size. Past 128 dK and dV of two warpgroups no longer fit the registers: see two_pass.py."""

LISTS = {64: Forward(128, 2, 4, 2, 240, 24), 128: FORWARD[128]}
"""Forward over a block map, whose lines have 128 queries: two warpgroups at 64 too. Past 128 a block of 128 keys does
not fit shared memory twice."""
