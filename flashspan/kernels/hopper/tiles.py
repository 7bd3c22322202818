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


FORWARD = {64: Forward(2, 128, 4, 2), 128: Forward(2, 128, 2, 2), 192: Forward(2, 64, 2, 2), 256: Forward(2, 64, 2, 1)}
BACKWARD = {64: Backward(2, 128, 64), 128: Backward(2, 64, 64)}
"""By padded head size. Above 128, dK and dV of two warpgroups do not fit the registers: see two_pass.py."""

FORWARD_FLOAT16 = {192: Forward(2, 64, 3, 1)}
"""With V in float16, if other sizes are faster then: with many blocks, a third pair is worth more than the next Q."""
FORWARD_BY_THREE = {64: Forward(3, 64, 8, 2)}
"""Three consumers, for many blocks of one kind: a band, without a carry, with V in float16. They are slower for tiles
with few keys, and for `Rows`, because a tile of 192 queries often contains two documents."""
BACKWARD_BY_THREE = {64: Backward(3, 64, 64)}
"""Three consumers, for a band, if dQ is computed in the same pass."""
THREE_FROM = {"queries": 257, "seen": 1024, "keys": 257}
"""The least numbers for three consumers. In forward: queries, and keys that a query sees (seen); in backward: keys.
With smaller numbers, a tile of 192 is a third empty, or most blocks are edge blocks."""

FLOAT16_FROM = {64: 1024, 128: 2048, 192: 2048}
"""By padded head size: if at least this many queries see a key, over all heads that share it, forward is faster with V
converted to float16 than with TRACK_MAXIMUM (softmax.py), if the call also is long enough."""
FLOAT16_BLOCKS = {64: 96, 128: 48, 192: 192}
"""By padded head size: the least number of blocks of 128 x 128 scores for a multiprocessor. With fewer, the launch that
converts V takes longer than the kernel gains."""

WARPS = {"REGISTERS": 240, "PRODUCER_REGISTERS": 24, "num_warps": 4}
"""Registers per thread of two consumers and of the producer, and warps of a warpgroup."""


def warps(warpgroups: int) -> dict[str, int]:
    """WARPS for two or three consumer warpgroups, and the number of warpgroups."""
    return {**WARPS, "CONSUMERS": warpgroups, **({"REGISTERS": 160} if warpgroups == 3 else {})}


def forward_tile(wide: int, in_float16: bool, alike: bool, queries: int, seen: int) -> Forward:
    """The sizes for this number of queries, which see `seen` keys each. in_float16: V was converted. alike: blocks are
    of one kind, so three consumers are allowed."""
    many = queries >= THREE_FROM["queries"] and seen >= THREE_FROM["seen"]
    if in_float16 and alike and many and wide in FORWARD_BY_THREE:
        return FORWARD_BY_THREE[wide]
    return FORWARD_FLOAT16[wide] if in_float16 and wide in FORWARD_FLOAT16 else FORWARD[wide]


def backward_tile(wide: int, alike: bool, keys: int) -> Backward:
    """The sizes for this number of keys. alike: three consumers are allowed."""
    many = keys >= THREE_FROM["keys"]
    return BACKWARD_BY_THREE[wide] if wide in BACKWARD_BY_THREE and alike and many else BACKWARD[wide]


def dq_turns(warpgroups: int, wide: int, claimed: bool, far_and_grouped: bool = False) -> int:
    """Return WHOLE_DQ_STAGES: how the warpgroups of backward compute dQ.

    0: each of two warpgroups computes half of every dQ. 1: in turn, each computes every second dQ as a whole. 2: also
    in turn, with two buffers for finished dQs; three warpgroups always use this. Turns read less shared memory, which
    is not the limit for heads of 64. Two buffers are faster only if sums of dQ are not claimed. If they are claimed,
    turns are slower if heads are grouped and queries see all keys before them.
    """
    if warpgroups == 3:
        return 2
    if wide == 64:
        return 0
    return 2 if not claimed else 0 if far_and_grouped else 1
