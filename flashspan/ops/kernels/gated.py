"""SwiGLU fused into the matmuls around it, for Hopper: silu(x Wg^T) * (x Wu^T), and the gradients of both.

In forward, a tile is 128 columns of gate and the same 128 columns of up, whose weights are one below the other in
shared memory. In backward, a tile is 256 columns of dh = dy Wd, rounded to 16 bits as without fusion. The gradients of
gate and up take half as long as the matmul: two separate warps compute them while the consumers multiply the next tile.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashspan.kernels.hopper.config import Descriptor, Shared
from flashspan.kernels.hopper.gluon_compat import aggregate
from flashspan.kernels.hopper.ptx import reciprocal, round_to
from flashspan.kernels.hopper.tensors import describe
from flashspan.kernels.portable.arguments import LOG2E
from flashspan.ops.kernels.matmul import (
    COLUMNS,
    DEPTH,
    NUMBERS,
    PIECE,
    ROWS,
    MatmulBuffers,
    MatmulSizes,
    allocate_barriers,
    free_stage,
    launch_matmul,
    load_steps,
    locate_tile,
    multiply,
    readable,
    split_quarters,
    store_piece,
)

MINUS_LOG2E = gl.constexpr(-LOG2E)


@aggregate
class ForwardTensors:
    """Descriptors: x, both weights, and the outputs."""

    desc_a: Descriptor
    desc_gate_weight: Descriptor
    desc_up_weight: Descriptor
    desc_gate: Descriptor
    desc_up: Descriptor
    desc_h: Descriptor


@aggregate
class BackwardTensors:
    """Descriptors: dy and the weight."""

    desc_a: Descriptor
    desc_weight: Descriptor


@aggregate
class BackwardBarriers:
    full: Shared  # of each stage
    empty: Shared
    dh_full: Shared  # of each consumer's part of dh
    dh_empty: Shared


@aggregate
class BackwardRows:
    """Pointers to [M, F]."""

    gate: gl.tensor
    up: gl.tensor
    dgate: gl.tensor
    dup: gl.tensor
    h: gl.tensor
    M: gl.tensor
    F: gl.tensor


@gluon.jit(do_not_specialize=NUMBERS)
def gated_kernel(
    desc_a, desc_gate_weight, desc_up_weight, desc_gate, desc_up, desc_h, num_rows, num_columns, num_steps,
    STAGES: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute gate, up and silu(gate) * up."""
    tensors = ForwardTensors(desc_a, desc_gate_weight, desc_up_weight, desc_gate, desc_up, desc_h)
    BM: gl.constexpr = desc_a.block_type.shape[0]
    BK: gl.constexpr = desc_a.block_type.shape[1]
    BN: gl.constexpr = desc_gate_weight.block_type.shape[0]
    a_s = gl.allocate_shared_memory(desc_a.dtype, [STAGES, BM, BK], desc_a.layout)
    b_s = gl.allocate_shared_memory(desc_a.dtype, [STAGES, 2 * BN, BK], desc_gate_weight.layout)
    pieces_s = gl.allocate_shared_memory(desc_h.dtype, [4, BM // 2, desc_h.block_type.shape[1]], desc_h.layout)
    sizes = MatmulSizes(num_rows, num_columns, num_steps, GROUP)
    job = (tensors, MatmulBuffers(a_s, b_s, pieces_s), allocate_barriers(STAGES), sizes)
    gl.warp_specialize(
        [(_forward_consume, (0,) + job), (_forward_consume, (1,) + job), (_forward_produce, job)],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _sigmoid(x):
    return reciprocal(1.0 + gl.exp2(x * MINUS_LOG2E))


@gluon.jit
def _forward_consume(WG: gl.constexpr, tensors, buffers, barriers, sizes):
    """A consumer: its part of gate, up and silu(gate) * up."""
    desc_gate, desc_up, desc_h = tensors.desc_gate, tensors.desc_up, tensors.desc_h
    num_rows, num_columns, num_steps = sizes.num_rows, sizes.num_columns, sizes.num_steps
    pieces_s = buffers.pieces_s
    BM: gl.constexpr = buffers.a_s.shape[1] // 2
    BN: gl.constexpr = buffers.b_s.shape[1] // 2
    PIECE: gl.constexpr = pieces_s.shape[2]
    step = 0
    for tile in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        i_row, i_column = locate_tile(tile, num_rows, num_columns, sizes.GROUP)
        acc = multiply(WG, buffers, barriers, step, num_steps, True)
        step += num_steps
        row = i_row * (2 * BM) + WG * BM
        column = i_column * BN
        pieces = split_quarters(acc)
        for i in gl.static_range(BN // PIECE):
            at = column + i * PIECE
            # Compute h from the rounded gate and up, because backward recomputes h from those.
            g = round_to(pieces[i], desc_gate.dtype)
            u = round_to(pieces[i + 2], desc_up.dtype)
            # Three pieces share two buffers: each one waits until the last but one piece has been read.
            store_piece(desc_gate, row, at, g, pieces_s.index(WG * 2 + i % 2), 1)
            store_piece(desc_up, row, at, u, pieces_s.index(WG * 2 + (i + 1) % 2), 1)
            store_piece(desc_h, row, at, g * _sigmoid(g) * u, pieces_s.index(WG * 2 + i % 2), 1)
    tma.store_wait(0)


@gluon.jit
def _forward_produce(tensors, buffers, barriers, sizes):
    """The producer warp: rows of x and of both weights, one below the other."""
    desc_gate, desc_up = tensors.desc_gate_weight, tensors.desc_up_weight
    a_s, b_s = buffers.a_s, buffers.b_s
    BM: gl.constexpr = a_s.shape[1]
    BK: gl.constexpr = a_s.shape[2]
    BN: gl.constexpr = b_s.shape[1] // 2
    step = 0
    for tile in range(gl.program_id(0), sizes.num_rows * sizes.num_columns, gl.num_programs(0)):
        i_row, i_column = locate_tile(tile, sizes.num_rows, sizes.num_columns, sizes.GROUP)
        for i in range(sizes.num_steps):
            stage, bar = free_stage(step, buffers, barriers, (BM + 2 * BN) * BK * 2)
            both = b_s.index(stage)
            tma.async_copy_global_to_shared(tensors.desc_a, [i_row * BM, i * BK], bar, a_s.index(stage))
            tma.async_copy_global_to_shared(desc_gate, [i_column * BN, i * BK], bar, both.slice(0, BN, dim=0))
            tma.async_copy_global_to_shared(desc_up, [i_column * BN, i * BK], bar, both.slice(BN, BN, dim=0))
            step += 1


@gluon.jit(do_not_specialize=[*NUMBERS, "M", "eights"])
def gated_backward_kernel(
    desc_a, desc_weight, gate, up, dgate, dup, h, M, eights, num_rows, num_columns, num_steps, PIECE: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of gate and up, and recompute h. Rows have 8 * eights numbers, so the compiler knows that
    they are aligned."""
    BM: gl.constexpr = desc_a.block_type.shape[0]
    BK: gl.constexpr = desc_a.block_type.shape[1]
    BN: gl.constexpr = desc_weight.block_type.shape[1]
    a_s = gl.allocate_shared_memory(desc_a.dtype, [STAGES, BM, BK], desc_a.layout)
    b_s = gl.allocate_shared_memory(desc_a.dtype, [STAGES, BK, BN], desc_weight.layout)
    DH: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM // 2, PIECE], desc_a.dtype)
    dh_s = gl.allocate_shared_memory(desc_a.dtype, [8, BM // 2, PIECE], DH)
    stages = allocate_barriers(STAGES)
    dh_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dh_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(dh_full.index(i), count=1)
        mbarrier.init(dh_empty.index(i), count=1)
    barriers = BackwardBarriers(stages.full, stages.empty, dh_full, dh_empty)
    sizes = MatmulSizes(num_rows, num_columns, num_steps, GROUP)
    rows = BackwardRows(gate, up, dgate, dup, h, M, eights * 8)
    job = (BackwardTensors(desc_a, desc_weight), MatmulBuffers(a_s, b_s, dh_s), barriers, sizes, rows)
    gl.warp_specialize(
        [(_backward_consume, (0,) + job), (_backward_consume, (1,) + job), (_gradients, job), (_backward_produce, job)],
        [4, 2, 1],
        [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _backward_consume(WG: gl.constexpr, tensors, buffers, barriers, sizes, rows):
    """A consumer: its part of dh, which it hands to the warps of `_gradients`."""
    dh_s, dh_full, dh_empty = buffers.pieces_s, barriers.dh_full, barriers.dh_empty
    step = 0
    turn = 0
    for _ in range(gl.program_id(0), sizes.num_rows * sizes.num_columns, gl.num_programs(0)):
        acc = multiply(WG, buffers, barriers, step, sizes.num_steps, False)
        step += sizes.num_steps
        mbarrier.wait(dh_empty.index(WG), (turn & 1) ^ 1)
        pieces = split_quarters(acc)
        for i in gl.static_range(4):
            dh_s.index(WG * 4 + i).store(pieces[i].to(dh_s.dtype))
        mbarrier.arrive(dh_full.index(WG), count=1)
        turn += 1  # noqa: SIM113


@gluon.jit
def _gradients(tensors, buffers, barriers, sizes, rows):
    """Two warps that compute the gradients of gate and up, and h again, while the others multiply the next tile."""
    dh_s = buffers.pieces_s
    dgate, dup, h, M, F = rows.dgate, rows.dup, rows.h, rows.M, rows.F
    num_rows, num_columns = sizes.num_rows, sizes.num_columns
    BM: gl.constexpr = dh_s.shape[1]
    PIECE: gl.constexpr = dh_s.shape[2]
    TALL: gl.constexpr = 32
    PARTS: gl.constexpr = BM // TALL
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    o_m = gl.arange(0, TALL, layout=gl.SliceLayout(1, L))
    o_n = gl.arange(0, PIECE, layout=gl.SliceLayout(0, L))
    parts_s = dh_s._reinterpret(dh_s.dtype, [8 * PARTS, TALL, PIECE], dh_s.layout)
    o = o_m[:, None] * F + o_n[None, :]
    turn = 0
    for tile in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        i_row, i_column = locate_tile(tile, num_rows, num_columns, sizes.GROUP)
        for w in range(2):
            m0 = (i_row * 2 + w) * BM
            n0 = i_column * (4 * PIECE)
            g, u = _load_both(rows, m0, n0, o, o_m, o_n)
            mbarrier.wait(barriers.dh_full.index(w), turn & 1)
            for i in range(4 * PARTS):
                dh = parts_s.index(w * (4 * PARTS) + i).load(L).to(gl.float32)
                x = g.to(gl.float32)
                y = u.to(gl.float32)
                m = m0 + i % PARTS * TALL
                n = n0 + i // PARTS * PIECE
                # Load the next gate and up before the current ones are used; after the last ones, load none.
                after = i + 1
                m_after = m0 + after % PARTS * TALL
                n_after = gl.where(after < 4 * PARTS, n0 + after // PARTS * PIECE, F)
                g, u = _load_both(rows, m_after, n_after, o, o_m, o_n)
                to = m.to(gl.int64) * F + n
                here = (o_m < M - m)[:, None] & (o_n < F - n)[None, :]
                sigmoid = _sigmoid(x)
                silu = x * sigmoid
                gl.store(h + to + o, (silu * y).to(h.dtype.element_ty), mask=here)
                gl.store(dup + to + o, (dh * silu).to(h.dtype.element_ty), mask=here)
                silu_derivative = sigmoid + silu * (1.0 - sigmoid)
                gl.store(dgate + to + o, (dh * y * silu_derivative).to(h.dtype.element_ty), mask=here)
            mbarrier.arrive(barriers.dh_empty.index(w), count=1)
        turn += 1  # noqa: SIM113


@gluon.jit
def _load_both(rows, m, n, o, o_m, o_n):
    """Load gate and up from row m and column n on."""
    at = m.to(gl.int64) * rows.F + n
    here = (o_m < rows.M - m)[:, None] & (o_n < rows.F - n)[None, :]
    return gl.load(rows.gate + at + o, mask=here, other=0.0), gl.load(rows.up + at + o, mask=here, other=0.0)


@gluon.jit
def _backward_produce(tensors, buffers, barriers, sizes, rows):
    """The producer warp: rows of dy and of the weight."""
    step = 0
    for tile in range(gl.program_id(0), sizes.num_rows * sizes.num_columns, gl.num_programs(0)):
        i_row, i_column = locate_tile(tile, sizes.num_rows, sizes.num_columns, sizes.GROUP)
        step = load_steps(
            tensors.desc_a, tensors.desc_weight, sizes.num_steps, i_row, i_column, step, buffers, barriers, False
        )


def gated(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate = x Wg^T, up = x Wu^T and silu(gate) * up, each [M, F], for x [M, E]."""
    x, *weights = readable(x, gate_weight, up_weight)
    gate, up, h = outs = tuple(x.new_empty(len(x), len(gate_weight)) for _ in range(3))
    if len(x):
        descriptors = [describe(weight, COLUMNS // 2, DEPTH) for weight in weights]
        descriptors += [describe(out, ROWS // 2, PIECE) for out in outs]
        tiles = (cdiv(len(x), ROWS), cdiv(len(gate_weight), COLUMNS // 2))
        arguments = (describe(x, ROWS, DEPTH), *descriptors, *tiles, cdiv(x.shape[1], DEPTH))
        launch_matmul(gated_kernel, arguments, tiles, x, STAGES=4)
    return gate, up, h


def gated_backward(dy: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up, and silu(gate) * up again, from dy [M, E] and the down weight [E, F]."""
    assert gate.shape[1] % 8 == 0, gate.shape
    dy, weight, gate, up = readable(dy, weight, gate, up)
    dgate, dup, h = (torch.empty_like(gate) for _ in range(3))
    if len(dy):
        tiles = (cdiv(len(dy), ROWS), cdiv(weight.shape[1], COLUMNS))
        numbers = (len(gate), gate.shape[1] // 8, *tiles, cdiv(dy.shape[1], DEPTH))
        operands = (describe(dy, ROWS, DEPTH), describe(weight, DEPTH, COLUMNS))
        options = {"PIECE": PIECE, "STAGES": 3, "REGISTERS": 168, "PRODUCER_REGISTERS": 168}
        launch_matmul(gated_backward_kernel, (*operands, gate, up, dgate, dup, h, *numbers), tiles, dy, **options)
    return dgate, dup, h
