"""Named values that the kernels for Hopper pass to their partitions: constants, sizes, buffers, barriers, masks.

A partition is the code that some of a program's warps run: a producer warp loads, consumer warpgroups of four warps
multiply. Fields in capitals are known at compile time. A name that ends in _s is shared memory; a name that begins with
desc_ is a descriptor of the copy engine (TMA). Letters of sizes: H query heads, K key heads, G = H / K, T queries, S
keys.
"""

from __future__ import annotations

from typing import TypeAlias

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from flashspan.kernels.hopper.gluon_compat import aggregate

Shared: TypeAlias = gl.shared_memory_descriptor
Descriptor: TypeAlias = tma.tensor_descriptor
Number: TypeAlias = gl.tensor | gl.constexpr
"""A number of the launch, or a constant in its place."""


@aggregate
class IntervalMask:
    """Each index of one axis sees an interval of the other. Intervals come from `lo` and `hi` in the sizes or, with the
    constant TABLE, from two tables with a row for each sequence."""

    start: gl.tensor  # first index seen [B, stride]
    end: gl.tensor  # index after the last one seen
    stride: Number  # from one sequence's row to the next; 0 if all share one row


@aggregate
class BlockMask:
    """A block map (`Blocks`) in blocks of 128 x 128: for each line of 128 indices a list of blocks."""

    desc_words: Descriptor  # bits of partial blocks
    words_s: Shared  # [STAGES * 2, 256]: in each stage, 64 lines of 128 bits for each of two warpgroups
    spans: gl.tensor  # for each line: where its list begins, where its partial blocks begin, where it ends
    index: gl.tensor  # the listed blocks
    numbers: gl.tensor  # for each listed block that is partial: the index of its tile of bits
    order: gl.tensor  # lines, longest first
    stride_batch: Number
    stride_head: Number
    num_lines: gl.tensor
    num_long: gl.tensor  # lines much longer than the mean, which come before all others


@aggregate
class ForwardConfig:
    """Constants of a forward kernel."""

    BLOCK_Q: gl.constexpr  # queries of a consumer in a tile: 64
    BLOCK_K: gl.constexpr  # keys of a block
    BLOCK_D: gl.constexpr  # head size as the kernel holds it: 64, 128, 192 or 256
    SLICES: gl.constexpr  # slices of columns that Q, K, V and the output consist of: 1, or 3 for 192 (slices.py)
    SLICE_D: gl.constexpr  # columns of a slice: BLOCK_D / SLICES
    HEAD_DIM: gl.constexpr  # head size of the caller, at most BLOCK_D
    CONSUMERS: gl.constexpr  # consumer warpgroups: 2, or 3 for heads of 64 and long bands
    STAGES: gl.constexpr  # pairs (K of block i, V of block i - 1) in flight
    Q_STAGES: gl.constexpr  # tiles of Q in flight: 2, or 1 if there is no room (heads of 256; three STAGES of 192)
    HIDDEN_SIDES: gl.constexpr  # hidden keys: 0 none, 1 those after a row's interval, 2 also those before it
    TABLE: gl.constexpr  # intervals come from tables, which only the producer reads: documents; else lo and hi
    BLOCK_MAP: gl.constexpr  # the mask is a BlockMask, not an IntervalMask
    CARRY: gl.constexpr  # the caller gives a carry, which out and lse continue
    CARRY_LAST: gl.constexpr  # the carry joins at a tile's end, by the copy engine: if CARRY and OUTPUT_BUFFER
    OUTPUT_BUFFER: gl.constexpr  # half of a float32 output has a separate buffer: heads up to 128, no block map
    FLOAT16_VALUES: (
        gl.constexpr
    )  # V is converted from bfloat16 to float16: if enough queries see a key (float16_values.py)
    TRACK_MAXIMUM: gl.constexpr  # m follows every block's maximum: unless FLOAT16_VALUES or a bfloat16 block map
    FREE_K_FIRST: gl.constexpr  # K's stage is freed before V's: block maps; if there are two: 192, FLOAT16_VALUES
    Q_IN_REGISTERS: gl.constexpr  # Q is loaded from shared memory once: heads of 64, and of 192 with FLOAT16_VALUES
    REPAIR: gl.constexpr  # what happens to rows that are not finite: KEEP_ROWS, NOTE_ROWS, MARK_ROWS (repair.py)
    TURNS: gl.constexpr  # tile numbers that a program keeps: 4, or with NOTE_ROWS all of them
    UNIT_SCALE: gl.constexpr  # the scale in base 2 is 1: scores are not multiplied (heads of 64)
    SCORES: gl.constexpr  # layout of S and P [BLOCK_Q, BLOCK_K] in registers
    OUTPUT: gl.constexpr  # layout of an accumulator of the output [BLOCK_Q, SLICE_D] in registers


@aggregate
class ForwardSizes:
    """Numbers of a forward launch."""

    H: gl.tensor
    G: gl.tensor
    T: gl.tensor
    S: gl.tensor
    lo: Number  # query i sees keys i + lo to i + hi, unless the mask is a table or a block map
    hi: Number
    scale: gl.tensor  # factor of scores that makes them exponents of 2: the caller's scale times log2(e)
    num_heads: gl.tensor  # of all sequences: B H
    num_blocks: gl.tensor  # tiles of a head
    section: gl.tensor  # number of heads computed together, whose K and V fit the L2 cache
    num_tiles: gl.tensor
    counter: gl.tensor  # pointer: how many tiles were taken, how many programs have ended


@aggregate
class ForwardTensors:
    """Descriptors, and pointers for rows that are computed again (repair.py)."""

    desc_q: Descriptor
    desc_k: Descriptor
    desc_v: Descriptor
    desc_out: Descriptor
    q: gl.tensor
    k: gl.tensor
    v: gl.tensor


@aggregate
class ForwardBuffers:
    """Shared memory. Stages come first in each shape, then slices."""

    q_s: Shared  # [Q_STAGES * CONSUMERS * SLICES, 1, 1, BLOCK_Q, SLICE_D]
    k_s: Shared  # [STAGES * SLICES, 1, 1, BLOCK_K, SLICE_D]
    v_s: Shared
    output_s: Shared  # [CONSUMERS, ...] half of a float32 output, if OUTPUT_BUFFER
    ones_s: Shared  # operand of parts.py, if UNIT_SCALE


@aggregate
class ForwardBarriers:
    """Barriers, and the numbers that the producer publishes under q_full."""

    q_full: Shared  # of each Q stage
    q_empty: Shared
    full: Shared  # of each stage
    empty: Shared  # [STAGES], K and V have been read; if FREE_K_FIRST [2 * STAGES]: V's, then K's
    tile_s: Shared  # numbers of the last TURNS tiles
    work_s: Shared  # four numbers that describe each of the last four tiles
    notes_s: Shared  # [TURNS * CONSUMERS, 4] which warps had a row that is not finite, with NOTE_ROWS
    q_read: Shared  # Q was read for the last time, if CARRY_LAST
    carry_full: Shared  # of each half of a carry, if CARRY_LAST


@aggregate
class ForwardOutputs:
    """Pointers, and strides of out in units of 8 elements: the compiler then knows that 8 divides them."""

    out: gl.tensor
    lse: gl.tensor
    invalid: gl.tensor  # a mark for each 64 rows: if it is not 0, the portable kernel recomputes them
    stride_b: Number
    stride_h: Number
    stride_t: Number


@aggregate
class BackwardConfig:
    """Constants of the backward kernel in one pass."""

    BLOCK_Q: gl.constexpr  # queries of a block
    BLOCK_K: gl.constexpr  # keys of a consumer in a tile: 64
    BLOCK_D: gl.constexpr  # head size as the kernel holds it: 64 or 128
    CONSUMERS: gl.constexpr  # consumer warpgroups: 2, or 3 for heads of 64 and a band
    STAGES: gl.constexpr  # blocks of Q and dO in flight
    TABLE: gl.constexpr  # intervals come from tables, which only the producer reads: documents; else lo and hi
    BLOCK_MAP: gl.constexpr  # the mask is a BlockMask, not an IntervalMask
    HAS_EDGES: gl.constexpr  # some blocks have scores to hide: of the mask, or of keys past the last
    WITH_DQ: gl.constexpr  # dQ is computed in the same pass; unset for deterministic gradients (two_pass.py)
    ACCUMULATE: gl.constexpr  # the gradients are added into the caller's float32: the caller asks for it
    FIRST_STORES: gl.constexpr  # sums of dQ are not cleared, the first program stores: if a query sees few keys
    SPLIT_TILES: gl.constexpr  # tiles from num_whole on are split by queries: if every query sees every key
    SPLIT_HEADS: gl.constexpr  # several key heads share K and V: to fill the GPU (portable/gradient_parts.py)
    FIRST_STEP_APART: gl.constexpr  # a tile's first step is separate code: three consumers, block maps, heads of 128
    DV_BUFFER: gl.constexpr  # dV is written from a separate buffer: heads of 128, one dQ stage, nothing accumulated
    WHOLE_DQ_STAGES: gl.constexpr  # buffers of whole dQs, computed in turn; 0: two consumers compute halves (tiles.py)
    UNIT_SCALE: gl.constexpr  # the scale in base 2 is 1: scores are not multiplied (heads of 64)
    SCORES: gl.constexpr  # layout of S^T and dP^T [BLOCK_K, BLOCK_Q] in registers
    GRADIENTS: gl.constexpr  # layout of dK and dV [BLOCK_K, BLOCK_D]
    HALF_DQ: gl.constexpr  # layout of half of a dQ [64, 64]


@aggregate
class BackwardSizes:
    """Numbers of a backward launch."""

    H: gl.tensor
    K: Number  # with SPLIT_HEADS, more heads than K and V have; not used in the pass for dQ
    G: gl.tensor
    T: gl.tensor
    S: gl.tensor
    padded_T: gl.tensor  # rows of a head in lse and delta
    lo: Number  # query i sees keys i + lo to i + hi, unless the mask is a table or a block map
    hi: Number
    scale: gl.tensor  # factor of scores that makes them exponents of 2
    sm_scale: gl.tensor  # the caller's scale: factor of dQ and dK
    section: gl.tensor  # key heads computed at a time


@aggregate
class BackwardTensors:
    """Descriptors. lse and delta are negative, and float32 or three bfloat16 parts (parts.py)."""

    desc_q: Descriptor
    desc_do: Descriptor
    desc_k: Descriptor
    desc_v: Descriptor
    desc_dq: Descriptor | gl.constexpr  # None in the pass over keys of two_pass.py
    desc_dk: Descriptor
    desc_dv: Descriptor
    desc_lse: Descriptor
    desc_delta: Descriptor


@aggregate
class BackwardBuffers:
    """Shared memory. Stages come first in each shape."""

    q_s: Shared  # [STAGES, 1, 1, BLOCK_Q, BLOCK_D]
    do_s: Shared
    kv_s: gl.tuple  # of each consumer, K and V [2, 1, 1, BLOCK_K, BLOCK_D]
    ds_s: gl.tuple  # of each consumer, dS^T [2 or 4, BLOCK_K, BLOCK_Q]
    dq_s: Shared  # [1 or WHOLE_DQ_STAGES, ...] dQ, from the consumers to the dQ warp
    lse_s: Shared
    delta_s: Shared
    dv_s: Shared  # [2, BLOCK_K, BLOCK_D] if DV_BUFFER
    ones_s: Shared  # operand of parts.py, if there are three consumers


@aggregate
class BackwardBarriers:
    kv_full: Shared
    kv_empty: Shared
    full: Shared  # of each stage of Q, dO, lse and delta
    empty: Shared  # [STAGES]; with a block map [2 * STAGES]: Q's, then dO's, which are freed earlier
    ds_full: Shared  # of each stage of dS
    ds_empty: Shared  # with three consumers
    dq_full: Shared  # of each stage of dQ
    dq_empty: Shared


@aggregate
class BackwardSchedule:
    """The order of tiles, and the tiles that the producer has published."""

    num_tiles: gl.tensor
    num_whole: Number  # if SPLIT_TILES, tiles from this one on are parts
    num_parts: Number  # number of parts of a tile that is split
    counter: gl.tensor  # pointer: how many tiles were taken, how many programs have ended
    dq_states: gl.tensor  # pointer, if FIRST_STORES: for each block of dQ 0, 1 while the first program stores, then 2
    work_s: Shared  # for each of the last four tiles, its number and the seven numbers that describe it
    work_full: Shared  # barriers of the last four tiles


@aggregate
class PassConfig:
    """Constants of a pass of the backward in two passes (two_pass.py)."""

    BLOCK_Q: gl.constexpr  # queries of a block, or of a consumer: 64
    BLOCK_K: gl.constexpr  # keys of a tile: 64 with heads of 256, else 128
    BLOCK_D: gl.constexpr  # head size as the kernel holds it
    TABLE: gl.constexpr  # intervals come from tables (documents), else from lo and hi
    ACCUMULATE: gl.constexpr  # the gradients are added into the caller's float32: the caller asks for it
    HAS_EDGES: gl.constexpr  # the mask hides some scores: all masks but a full one
    SPLIT_HEADS: gl.constexpr  # several key heads share K and V: as in BackwardConfig
    SCORES: gl.constexpr  # layout of S and dP, or S^T and dP^T, in registers
    GRADIENTS: gl.constexpr  # layout of dQ, or dK and dV


@aggregate
class KeyPassBuffers:
    """Shared memory. Stages come first in each shape."""

    q_s: Shared  # [2, 1, 1, BLOCK_Q, BLOCK_D]
    do_s: Shared
    k_s: Shared  # [1, 1, 1, BLOCK_K, BLOCK_D]
    v_s: Shared
    p_s: Shared  # [BLOCK_K, BLOCK_Q] float32, from one consumer to the other
    lse_s: Shared  # [2, BLOCK_Q]
    delta_s: Shared


@aggregate
class KeyPassBarriers:
    k_full: Shared
    v_full: Shared
    q_full: Shared  # of each stage, with lse
    q_empty: Shared
    do_full: Shared  # of each stage, with delta
    do_empty: Shared
    p_full: Shared
    p_empty: Shared


@aggregate
class QueryPassTensors:
    """Descriptors, and pointers to -lse and -delta."""

    desc_q: Descriptor
    desc_do: Descriptor
    desc_k: Descriptor
    desc_v: Descriptor
    desc_dq: Descriptor
    minus_lse: gl.tensor
    minus_delta: gl.tensor


@aggregate
class QueryPassBuffers:
    """Shared memory. Stages or consumers come first in each shape."""

    q_s: Shared  # [2, 1, 1, BLOCK_Q, BLOCK_D]
    do_s: Shared
    k_s: Shared  # [2, 1, 1, BLOCK_K, BLOCK_D]
    v_s: Shared  # [1 or 2, ...]


@aggregate
class QueryPassBarriers:
    q_full: Shared
    do_full: Shared
    k_full: Shared  # of each stage
    k_empty: Shared
    v_full: Shared
    v_empty: Shared
