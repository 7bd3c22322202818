"""c + a1 b1 + a2 b2 + a3 b3 in one matmul, for Hopper: it adds a residual, or several gradients of one input.

The sum stays in float32 registers until it is complete, and is rounded once.
"""

from __future__ import annotations

from torch import Tensor
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flashspan.kernels.hopper.config import Descriptor, Shared
from flashspan.kernels.hopper.gluon_compat import aggregate, barrier
from flashspan.kernels.hopper.tensors import describe
from flashspan.ops.kernels.matmul import (
    COLUMNS,
    DEPTH,
    PIECE,
    ROWS,
    MatmulBuffers,
    allocate_barriers,
    launch_matmul,
    load_steps,
    locate_tile,
    multiply,
    readable,
    split_quarters,
    store_piece,
)


@aggregate
class SumTensors:
    """Descriptors of up to three pairs of operands, c and the output."""

    desc_a1: Descriptor
    desc_b1: Descriptor
    desc_a2: Descriptor
    desc_b2: Descriptor
    desc_a3: Descriptor
    desc_b3: Descriptor
    desc_c: Descriptor
    desc_out: Descriptor


@aggregate
class SumBarriers:
    full: Shared  # of each stage
    empty: Shared
    c_full: Shared  # of each consumer's c, if ADD


@aggregate
class SumSizes:
    """Numbers of tiles in a launch and of steps for each pair, and constants."""

    num_rows: gl.tensor
    num_columns: gl.tensor
    num_steps1: gl.tensor
    num_steps2: gl.tensor
    num_steps3: gl.tensor
    GROUP: gl.constexpr
    TRANSPOSED: gl.constexpr  # b is [N, K], otherwise [K, N]
    ADD: gl.constexpr  # there is a c


@gluon.jit(do_not_specialize=["num_rows", "num_columns", "num_steps1", "num_steps2", "num_steps3"])
def sum_kernel(
    desc_a1, desc_b1, desc_a2, desc_b2, desc_a3, desc_b3, desc_c, desc_out, num_rows, num_columns, num_steps1,
    num_steps2, num_steps3, TRANSPOSED: gl.constexpr, ADD: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out = c, if ADD, + a1 b1 + a2 b2 + a3 b3."""
    BM: gl.constexpr = desc_a1.block_type.shape[0]
    BK: gl.constexpr = desc_a1.block_type.shape[1]
    BN: gl.constexpr = desc_b1.block_type.shape[0] if TRANSPOSED else desc_b1.block_type.shape[1]
    PIECE: gl.constexpr = desc_out.block_type.shape[1]
    a_s = gl.allocate_shared_memory(desc_a1.dtype, [STAGES, BM, BK], desc_a1.layout)
    if TRANSPOSED:
        b_s = gl.allocate_shared_memory(desc_a1.dtype, [STAGES, BN, BK], desc_b1.layout)
    else:
        b_s = gl.allocate_shared_memory(desc_a1.dtype, [STAGES, BK, BN], desc_b1.layout)
    PIECES: gl.constexpr = 2 * (BN // PIECE) if ADD else 4
    pieces_s = gl.allocate_shared_memory(desc_out.dtype, [PIECES, BM // 2, PIECE], desc_out.layout)
    stages = allocate_barriers(STAGES)
    c_full = stages.full  # a placeholder: not used unless ADD
    if ADD:
        c_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(c_full.index(i), count=1)
    job = (
        SumTensors(desc_a1, desc_b1, desc_a2, desc_b2, desc_a3, desc_b3, desc_c, desc_out),
        MatmulBuffers(a_s, b_s, pieces_s),
        SumBarriers(stages.full, stages.empty, c_full),
        SumSizes(num_rows, num_columns, num_steps1, num_steps2, num_steps3, GROUP, TRANSPOSED, ADD),
    )
    gl.warp_specialize(
        [(_consume, (0,) + job), (_consume, (1,) + job), (_produce, job)], [4, 1], [REGISTERS, PRODUCER_REGISTERS]
    )


@gluon.jit
def _consume(WG: gl.constexpr, tensors, buffers, barriers, sizes):
    """A consumer: its part of each tile."""
    desc_c, desc_out = tensors.desc_c, tensors.desc_out
    pieces_s, c_full = buffers.pieces_s, barriers.c_full
    num_rows, num_columns = sizes.num_rows, sizes.num_columns
    BM: gl.constexpr = buffers.a_s.shape[1] // 2
    BN: gl.constexpr = buffers.b_s.shape[1] if sizes.TRANSPOSED else buffers.b_s.shape[2]
    PIECE: gl.constexpr = pieces_s.shape[2]
    num_steps = sizes.num_steps1 + sizes.num_steps2 + sizes.num_steps3
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        i_row, i_column = locate_tile(tile, num_rows, num_columns, sizes.GROUP)
        row = i_row * (2 * BM) + WG * BM
        column = i_column * BN
        if sizes.ADD:  # c is loaded during the main loop, into buffers from which the previous tile has been written
            tma.store_wait(0)
            barrier()
            bar = c_full.index(WG)
            mbarrier.expect(bar, BM * BN * 2)
            for i in gl.static_range(BN // PIECE):
                piece = pieces_s.index(WG * (BN // PIECE) + i)
                tma.async_copy_global_to_shared(desc_c, [row, column + i * PIECE], bar, piece)
        acc = multiply(WG, buffers, barriers, step, num_steps, sizes.TRANSPOSED)
        step += num_steps
        pieces = split_quarters(acc)
        if sizes.ADD:
            mbarrier.wait(c_full.index(WG), turn & 1)
            for i in gl.static_range(BN // PIECE):
                piece = pieces_s.index(WG * (BN // PIECE) + i)
                piece.store((pieces[i] + piece.load(pieces[i].type.layout).to(gl.float32)).to(desc_out.dtype))
            fence_async_shared()
            barrier()
            for i in gl.static_range(BN // PIECE):
                piece = pieces_s.index(WG * (BN // PIECE) + i)
                tma.async_copy_shared_to_global(desc_out, [row, column + i * PIECE], piece)
            turn += 1
        else:
            for i in gl.static_range(BN // PIECE):
                store_piece(desc_out, row, column + i * PIECE, pieces[i], pieces_s.index(WG * 2 + i % 2), 1)
    tma.store_wait(0)


@gluon.jit
def _produce(tensors, buffers, barriers, sizes):
    """The producer warp: one pair of operands after the other."""
    n1, n2, n3 = sizes.num_steps1, sizes.num_steps2, sizes.num_steps3
    step = 0
    for tile in range(gl.program_id(0), sizes.num_rows * sizes.num_columns, gl.num_programs(0)):
        i_row, i_column = locate_tile(tile, sizes.num_rows, sizes.num_columns, sizes.GROUP)
        step = load_steps(
            tensors.desc_a1, tensors.desc_b1, n1, i_row, i_column, step, buffers, barriers, sizes.TRANSPOSED
        )
        step = load_steps(
            tensors.desc_a2, tensors.desc_b2, n2, i_row, i_column, step, buffers, barriers, sizes.TRANSPOSED
        )
        step = load_steps(
            tensors.desc_a3, tensors.desc_b3, n3, i_row, i_column, step, buffers, barriers, sizes.TRANSPOSED
        )


def sum_of_products(c: Tensor | None, *pairs: tuple[Tensor, Tensor], transposed: bool) -> Tensor:
    """Return c [M, N], if given, plus the sum of up to three pairs: a [M, K] times b [K, N] (transposed: [N, K])."""
    given = readable(*(x for pair in pairs for x in pair), *([] if c is None else [c]))
    size, absent = 2 * len(pairs), 3 - len(pairs)
    made, added = list(zip(given[:size:2], given[1:size:2], strict=True)), given[size:]
    a, b = made[0]
    out = a.new_empty(len(a), b.shape[0 if transposed else 1])
    if len(out):
        shape = (COLUMNS, DEPTH) if transposed else (DEPTH, COLUMNS)
        num_steps = [*(cdiv(a.shape[1], DEPTH) for a, _ in made), *[0] * absent]
        made += made[:1] * absent
        operands = [x for a, b in made for x in (describe(a, ROWS, DEPTH), describe(b, *shape))]
        outs = [describe(x, ROWS // 2, PIECE) for x in (added[0] if added else out, out)]
        tiles = (cdiv(out.shape[0], ROWS), cdiv(out.shape[1], COLUMNS))
        stages = 3 if added else 4  # c needs the memory of the fourth stage
        constants = {"TRANSPOSED": transposed, "ADD": bool(added), "STAGES": stages}
        launch_matmul(sum_kernel, (*operands, *outs, *tiles, *num_steps), tiles, out, **constants)
    return out
