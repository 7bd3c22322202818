"""c + a1 b1 + a2 b2 + a3 b3 in one product, for Hopper: what joins a residual, or several gradients of one input.

Sums are float32 until the end, and nothing on the way is written or read.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flashspan.kernels.hopper.gluon_compat import barrier
from flashspan.kernels.hopper.matmul import (
    COLUMNS,
    DEPTH,
    PIECE,
    ROWS,
    barriers,
    free_place,
    launch,
    leave,
    locate,
    multiply,
    quarters,
    ready,
)
from flashspan.kernels.hopper.tensors import describe
from flashspan.kernels.portable.arguments import Launch, on


@gluon.jit
def _sum(WG: gl.constexpr, operands, outs, memory, bars, numbers, C: gl.constexpr):
    """A warpgroup's part of each tile."""
    desc_c, desc_out = outs
    a_s, b_s, rooms = memory
    full, empty, came = bars
    num_rows, num_columns, num_steps1, num_steps2, num_steps3 = numbers
    GROUP: gl.constexpr = C[0]
    TURNED: gl.constexpr = C[1]
    ADD: gl.constexpr = C[2]
    BM: gl.constexpr = a_s.shape[1] // 2
    BN: gl.constexpr = b_s.shape[1] if TURNED else b_s.shape[2]
    PIECE: gl.constexpr = rooms.shape[2]
    num_steps = num_steps1 + num_steps2 + num_steps3
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        i_row, i_column = locate(tile, num_rows, num_columns, GROUP)
        row = i_row * (2 * BM) + WG * BM
        column = i_column * BN
        if ADD:  # c comes while the product is made, into rooms that all of the tile before has left
            tma.store_wait(0)
            barrier()
            bar = came.index(WG)
            mbarrier.expect(bar, BM * BN * 2)
            for i in gl.static_range(BN // PIECE):
                room = rooms.index(WG * (BN // PIECE) + i)
                tma.async_copy_global_to_shared(desc_c, [row, column + i * PIECE], bar, room)
        acc = multiply(WG, a_s, b_s, full, empty, step, num_steps, TURNED)
        step += num_steps
        pieces = quarters(acc)
        if ADD:
            mbarrier.wait(came.index(WG), turn & 1)
            for i in gl.static_range(BN // PIECE):
                room = rooms.index(WG * (BN // PIECE) + i)
                room.store((pieces[i] + room.load(pieces[i].type.layout).to(gl.float32)).to(desc_out.dtype))
            fence_async_shared()
            barrier()
            for i in gl.static_range(BN // PIECE):
                room = rooms.index(WG * (BN // PIECE) + i)
                tma.async_copy_shared_to_global(desc_out, [row, column + i * PIECE], room)
            turn += 1
        else:
            for i in gl.static_range(BN // PIECE):
                leave(desc_out, row, column + i * PIECE, pieces[i], rooms.index(WG * 2 + i % 2), 1)
    tma.store_wait(0)


@gluon.jit
def _load(desc_a, desc_b, num_steps, i_row, i_column, step, memory, bars, TURNED: gl.constexpr):
    a_s, b_s, rooms = memory
    full, empty, came = bars
    BM: gl.constexpr = a_s.shape[1]
    BK: gl.constexpr = a_s.shape[2]
    BN: gl.constexpr = b_s.shape[1] if TURNED else b_s.shape[2]
    for i in range(num_steps):
        stage, bar = free_place(step + i, full, empty, a_s.shape[0], (BM + BN) * BK * 2)
        tma.async_copy_global_to_shared(desc_a, [i_row * BM, i * BK], bar, a_s.index(stage))
        if TURNED:
            tma.async_copy_global_to_shared(desc_b, [i_column * BN, i * BK], bar, b_s.index(stage))
        else:
            tma.async_copy_global_to_shared(desc_b, [i * BK, i_column * BN], bar, b_s.index(stage))
    return step + num_steps


@gluon.jit
def _feed(operands, outs, memory, bars, numbers, C: gl.constexpr):
    """The warp that loads: one pair of operands after the other."""
    desc_a1, desc_b1, desc_a2, desc_b2, desc_a3, desc_b3 = operands
    num_rows, num_columns, num_steps1, num_steps2, num_steps3 = numbers
    step = 0
    for tile in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        i_row, i_column = locate(tile, num_rows, num_columns, C[0])
        step = _load(desc_a1, desc_b1, num_steps1, i_row, i_column, step, memory, bars, C[1])
        step = _load(desc_a2, desc_b2, num_steps2, i_row, i_column, step, memory, bars, C[1])
        step = _load(desc_a3, desc_b3, num_steps3, i_row, i_column, step, memory, bars, C[1])


@gluon.jit
def _first(operands, outs, memory, bars, numbers, C: gl.constexpr):
    _sum(0, operands, outs, memory, bars, numbers, C)


@gluon.jit
def _second(operands, outs, memory, bars, numbers, C: gl.constexpr):
    _sum(1, operands, outs, memory, bars, numbers, C)


@gluon.jit(do_not_specialize=["num_rows", "num_columns", "num_steps1", "num_steps2", "num_steps3"])
def sum_product_kernel(
    desc_a1, desc_b1, desc_a2, desc_b2, desc_a3, desc_b3, desc_c, desc_out, num_rows, num_columns, num_steps1,
    num_steps2, num_steps3, TURNED: gl.constexpr, ADD: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BM: gl.constexpr = desc_a1.block_type.shape[0]
    BK: gl.constexpr = desc_a1.block_type.shape[1]
    BN: gl.constexpr = desc_b1.block_type.shape[0] if TURNED else desc_b1.block_type.shape[1]
    PIECE: gl.constexpr = desc_out.block_type.shape[1]
    a_s = gl.allocate_shared_memory(desc_a1.dtype, [STAGES, BM, BK], desc_a1.layout)
    if TURNED:
        b_s = gl.allocate_shared_memory(desc_a1.dtype, [STAGES, BN, BK], desc_b1.layout)
    else:
        b_s = gl.allocate_shared_memory(desc_a1.dtype, [STAGES, BK, BN], desc_b1.layout)
    ROOMS: gl.constexpr = 2 * (BN // PIECE) if ADD else 4
    rooms = gl.allocate_shared_memory(desc_out.dtype, [ROOMS, BM // 2, PIECE], desc_out.layout)
    full, empty = barriers(STAGES)
    came = full
    if ADD:
        came = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(came.index(i), count=1)
    C: gl.constexpr = (GROUP, TURNED, ADD)
    operands = (desc_a1, desc_b1, desc_a2, desc_b2, desc_a3, desc_b3)
    numbers = (num_rows, num_columns, num_steps1, num_steps2, num_steps3)
    job = (operands, (desc_c, desc_out), (a_s, b_s, rooms), (full, empty, came), numbers, C)
    gl.warp_specialize([(_first, job), (_second, job), (_feed, job)], [4, 1], [REGISTERS, PRODUCER_REGISTERS])


def sum_launch(out: Tensor, c: Tensor | None, pairs: Sequence[tuple[Tensor, Tensor]], *, turned: bool) -> Launch:
    """out = c + the sum of a b, or a b^T if `turned`, over up to three pairs."""
    M, N = out.shape
    absent = [(*pairs[0], 0)] * (3 - len(pairs))
    full = [(a, b, cdiv(a.shape[1], DEPTH)) for a, b in pairs] + absent
    shape = (COLUMNS, DEPTH) if turned else (DEPTH, COLUMNS)
    operands = [x for a, b, _ in full for x in (describe(a, ROWS, DEPTH), describe(b, *shape))]
    outs = [describe(x, ROWS // 2, PIECE) for x in (out if c is None else c, out)]
    tiles = (cdiv(M, ROWS), cdiv(N, COLUMNS))
    numbers = (*tiles, *(num_steps for _, _, num_steps in full))
    stages = 4 if c is None else 3  # whose places c takes
    arguments = (*operands, *outs, *numbers)
    return launch(sum_product_kernel, arguments, out, tiles, TURNED=turned, ADD=c is not None, STAGES=stages)


def sum_of_products(c: Tensor | None, *pairs: tuple[Tensor, Tensor], turned: bool) -> Tensor:
    """c [M, N], if any, plus the sum of a [M, K] times b [K, N], or [N, K] if `turned`, over up to three pairs."""
    added = ready(*(x for pair in pairs for x in pair), *([] if c is None else [c]))
    a, b = added[:2]
    out = a.new_empty(len(a), b.shape[0 if turned else 1])
    if len(out):
        size = 2 * len(pairs)
        made = list(zip(added[:size:2], added[1:size:2], strict=True))
        with on(out.device):
            sum_launch(out, None if c is None else added[-1], made, turned=turned)()
    return out
