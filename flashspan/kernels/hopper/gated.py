"""SwiGLU inside the products around it, for Hopper: silu(x Wg^T) * (x Wu^T), and the gradients of both.

Forward a tile is 128 columns of gate and the same 128 of up, one below the other in shared memory. Backward it is 256
columns of dh = dy Wd; 64 at a time of gate and up come by the copy engine, and leave as their gradients through the
same places.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flashspan.kernels.hopper.names import barrier, reciprocal, rounded
from flashspan.kernels.hopper.product import (
    COLUMNS,
    DEPTH,
    NUMBERS,
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
from flashspan.kernels.portable.arguments import LOG2E, Launch, on

MINUS_LOG2E = gl.constexpr(-LOG2E)


@gluon.jit
def _sigmoid(x):
    return reciprocal(1.0 + gl.exp2(x * MINUS_LOG2E))


@gluon.jit
def _forward(WG: gl.constexpr, desc, operands, rooms, bars, numbers, C: gl.constexpr):
    """A warpgroup's part of gate, up and silu(gate) * up."""
    desc_a, desc_gate_weight, desc_up_weight, desc_gate, desc_up, desc_h = desc
    a_s, b_s = operands
    full, empty = bars
    num_rows, num_columns, num_steps = numbers
    BM: gl.constexpr = a_s.shape[1] // 2
    BN: gl.constexpr = b_s.shape[1] // 2
    PIECE: gl.constexpr = rooms.shape[2]
    step = 0
    for tile in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        i_row, i_column = locate(tile, num_rows, num_columns, C[0])
        acc = multiply(WG, a_s, b_s, full, empty, step, num_steps, True)
        step += num_steps
        row = i_row * (2 * BM) + WG * BM
        column = i_column * BN
        pieces = quarters(acc)
        for i in gl.static_range(BN // PIECE):
            at = column + i * PIECE
            # Rounded first, as whoever makes h again will find them.
            g = rounded(pieces[i], desc_gate.dtype)
            u = rounded(pieces[i + 2], desc_up.dtype)
            # Three leave through two rooms: each waits for the one before the last.
            leave(desc_gate, row, at, g, rooms.index(WG * 2 + i % 2), 1)
            leave(desc_up, row, at, u, rooms.index(WG * 2 + (i + 1) % 2), 1)
            leave(desc_h, row, at, g * _sigmoid(g) * u, rooms.index(WG * 2 + i % 2), 1)
    tma.store_wait(0)


@gluon.jit
def _forward_feed(desc, operands, rooms, bars, numbers, C: gl.constexpr):
    """The warp that loads rows of x and of both weights."""
    desc_a, desc_gate_weight, desc_up_weight, desc_gate, desc_up, desc_h = desc
    a_s, b_s = operands
    full, empty = bars
    num_rows, num_columns, num_steps = numbers
    BM: gl.constexpr = a_s.shape[1]
    BK: gl.constexpr = a_s.shape[2]
    BN: gl.constexpr = b_s.shape[1] // 2
    step = 0
    for tile in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        i_row, i_column = locate(tile, num_rows, num_columns, C[0])
        for i in range(num_steps):
            stage, bar = free_place(step, full, empty, a_s.shape[0], (BM + 2 * BN) * BK * 2)
            both = b_s.index(stage)
            tma.async_copy_global_to_shared(desc_a, [i_row * BM, i * BK], bar, a_s.index(stage))
            tma.async_copy_global_to_shared(desc_gate_weight, [i_column * BN, i * BK], bar, both.slice(0, BN, dim=0))
            tma.async_copy_global_to_shared(desc_up_weight, [i_column * BN, i * BK], bar, both.slice(BN, BN, dim=0))
            step += 1


@gluon.jit
def _first_forward(desc, operands, rooms, bars, numbers, C: gl.constexpr):
    _forward(0, desc, operands, rooms, bars, numbers, C)


@gluon.jit
def _second_forward(desc, operands, rooms, bars, numbers, C: gl.constexpr):
    _forward(1, desc, operands, rooms, bars, numbers, C)


@gluon.jit(do_not_specialize=NUMBERS)
def gated_product_kernel(
    desc_a, desc_gate_weight, desc_up_weight, desc_gate, desc_up, desc_h, num_rows, num_columns, num_steps,
    STAGES: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr, FEED_REGISTERS: gl.constexpr,
):  # fmt: skip
    desc = (desc_a, desc_gate_weight, desc_up_weight, desc_gate, desc_up, desc_h)
    BM: gl.constexpr = desc_a.block_type.shape[0]
    BK: gl.constexpr = desc_a.block_type.shape[1]
    BN: gl.constexpr = desc_gate_weight.block_type.shape[0]
    a_s = gl.allocate_shared_memory(desc_a.dtype, [STAGES, BM, BK], desc_a.layout)
    b_s = gl.allocate_shared_memory(desc_a.dtype, [STAGES, 2 * BN, BK], desc_gate_weight.layout)
    rooms = gl.allocate_shared_memory(desc_h.dtype, [4, BM // 2, desc_h.block_type.shape[1]], desc_h.layout)
    C: gl.constexpr = (GROUP,)
    job = (desc, (a_s, b_s), rooms, barriers(STAGES), (num_rows, num_columns, num_steps), C)
    gl.warp_specialize(
        [(_first_forward, job), (_second_forward, job), (_forward_feed, job)], [4, 1], [REGISTERS, FEED_REGISTERS]
    )


@gluon.jit
def _fetch(desc_gate, desc_up, row, column, rooms, came, ROOM: gl.constexpr):
    """Ask for a piece of gate and of up, into rooms that nobody reads any more."""
    bar = came.index(ROOM)
    mbarrier.expect(bar, 2 * rooms.shape[1] * rooms.shape[2] * 2)
    tma.async_copy_global_to_shared(desc_gate, [row, column], bar, rooms.index(2 * ROOM))
    tma.async_copy_global_to_shared(desc_up, [row, column], bar, rooms.index(2 * ROOM + 1))


@gluon.jit
def _backward(WG: gl.constexpr, desc, operands, places, bars, numbers, C: gl.constexpr):
    """A warpgroup's part of dh, and of what it makes of gate and up: their gradients, and h again."""
    desc_a, desc_weight, desc_gate, desc_up, desc_dgate, desc_dup, desc_h = desc
    a_s, b_s = operands
    rooms, h_s = places
    full, empty, came = bars
    num_rows, num_columns, num_steps = numbers
    BM: gl.constexpr = a_s.shape[1] // 2
    BN: gl.constexpr = b_s.shape[2]
    PIECE: gl.constexpr = rooms.shape[2]
    step = 0
    for tile in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        i_row, i_column = locate(tile, num_rows, num_columns, C[0])
        row = i_row * (2 * BM) + WG * BM
        column = i_column * BN
        tma.store_wait(0)
        barrier()
        for i in gl.static_range(2):
            _fetch(desc_gate, desc_up, row, column + i * PIECE, rooms, came, WG * 2 + i)
        acc = multiply(WG, a_s, b_s, full, empty, step, num_steps, False)
        step += num_steps
        pieces = quarters(acc)
        for i in gl.static_range(4):
            at = column + i * PIECE
            gate_s = rooms.index((WG * 2 + i % 2) * 2)
            up_s = rooms.index((WG * 2 + i % 2) * 2 + 1)
            mbarrier.wait(came.index(WG * 2 + i % 2), i // 2)
            dh = pieces[i]
            g = gate_s.load(dh.type.layout).to(gl.float32)
            u = up_s.load(dh.type.layout).to(gl.float32)
            sigmoid = _sigmoid(g)
            silu = g * sigmoid
            if i == 3:
                tma.store_wait(0)
                barrier()
            h_s.index(WG).store((silu * u).to(desc_h.dtype))
            gate_s.store((dh * u * (sigmoid + silu * (1.0 - sigmoid))).to(desc_dgate.dtype))
            up_s.store((dh * silu).to(desc_dup.dtype))
            fence_async_shared()
            barrier()
            tma.async_copy_shared_to_global(desc_h, [row, at], h_s.index(WG))
            tma.async_copy_shared_to_global(desc_dgate, [row, at], gate_s)
            tma.async_copy_shared_to_global(desc_dup, [row, at], up_s)
            if i < 2:
                tma.store_wait(0)
                barrier()
                _fetch(desc_gate, desc_up, row, at + 2 * PIECE, rooms, came, WG * 2 + i)
    tma.store_wait(0)


@gluon.jit
def _backward_feed(desc, operands, places, bars, numbers, C: gl.constexpr):
    """The warp that loads rows of dy and of the weight."""
    desc_a, desc_weight, desc_gate, desc_up, desc_dgate, desc_dup, desc_h = desc
    a_s, b_s = operands
    full, empty, came = bars
    num_rows, num_columns, num_steps = numbers
    BM: gl.constexpr = a_s.shape[1]
    BK: gl.constexpr = a_s.shape[2]
    BN: gl.constexpr = b_s.shape[2]
    step = 0
    for tile in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        i_row, i_column = locate(tile, num_rows, num_columns, C[0])
        for i in range(num_steps):
            stage, bar = free_place(step, full, empty, a_s.shape[0], (BM + BN) * BK * 2)
            tma.async_copy_global_to_shared(desc_a, [i_row * BM, i * BK], bar, a_s.index(stage))
            tma.async_copy_global_to_shared(desc_weight, [i * BK, i_column * BN], bar, b_s.index(stage))
            step += 1


@gluon.jit
def _first_backward(desc, operands, places, bars, numbers, C: gl.constexpr):
    _backward(0, desc, operands, places, bars, numbers, C)


@gluon.jit
def _second_backward(desc, operands, places, bars, numbers, C: gl.constexpr):
    _backward(1, desc, operands, places, bars, numbers, C)


@gluon.jit(do_not_specialize=NUMBERS)
def gated_backward_product_kernel(
    desc_a, desc_weight, desc_gate, desc_up, desc_dgate, desc_dup, desc_h, num_rows, num_columns, num_steps,
    STAGES: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr, FEED_REGISTERS: gl.constexpr,
):  # fmt: skip
    desc = (desc_a, desc_weight, desc_gate, desc_up, desc_dgate, desc_dup, desc_h)
    BM: gl.constexpr = desc_a.block_type.shape[0]
    BK: gl.constexpr = desc_a.block_type.shape[1]
    BN: gl.constexpr = desc_weight.block_type.shape[1]
    PIECE: gl.constexpr = desc_h.block_type.shape[1]
    a_s = gl.allocate_shared_memory(desc_a.dtype, [STAGES, BM, BK], desc_a.layout)
    b_s = gl.allocate_shared_memory(desc_a.dtype, [STAGES, BK, BN], desc_weight.layout)
    rooms = gl.allocate_shared_memory(desc_h.dtype, [8, BM // 2, PIECE], desc_h.layout)
    h_s = gl.allocate_shared_memory(desc_h.dtype, [2, BM // 2, PIECE], desc_h.layout)
    full, empty = barriers(STAGES)
    came = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(came.index(i), count=1)
    C: gl.constexpr = (GROUP,)
    job = (desc, (a_s, b_s), (rooms, h_s), (full, empty, came), (num_rows, num_columns, num_steps), C)
    gl.warp_specialize(
        [(_first_backward, job), (_second_backward, job), (_backward_feed, job)], [4, 1], [REGISTERS, FEED_REGISTERS]
    )


def gated_launch(x: Tensor, gate_weight: Tensor, up_weight: Tensor, outs: tuple[Tensor, Tensor, Tensor]) -> Launch:
    """gate, up and h [M, F] of x [M, E] and weights [F, E]."""
    weights = [describe(weight, COLUMNS // 2, DEPTH) for weight in (gate_weight, up_weight)]
    pieces = [describe(out, ROWS // 2, PIECE) for out in outs]
    tiles = (cdiv(len(x), ROWS), cdiv(len(gate_weight), COLUMNS // 2))
    numbers = (*tiles, cdiv(x.shape[1], DEPTH))
    return launch(gated_product_kernel, (describe(x, ROWS, DEPTH), *weights, *pieces, *numbers), x, tiles, STAGES=4)


def gated_backward_launch(
    dy: Tensor, weight: Tensor, gate: Tensor, up: Tensor, outs: tuple[Tensor, Tensor, Tensor]
) -> Launch:
    """The gradients of gate and up and, again, h [M, F], of dy [M, E], a weight [E, F], gate and up."""
    operands = (describe(dy, ROWS, DEPTH), describe(weight, DEPTH, COLUMNS))
    pieces = [describe(x, ROWS // 2, PIECE) for x in (gate, up, *outs)]
    tiles = (cdiv(len(dy), ROWS), cdiv(weight.shape[1], COLUMNS))
    numbers = (*tiles, cdiv(dy.shape[1], DEPTH))
    return launch(gated_backward_product_kernel, (*operands, *pieces, *numbers), dy, tiles, STAGES=3)


def gated(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gate = x Wg^T, up = x Wu^T and silu(gate) * up, [M, F], of x [M, E]."""
    x, gate_weight, up_weight = ready(x, gate_weight, up_weight)
    gate, up, h = (x.new_empty(len(x), len(gate_weight)) for _ in range(3))
    if len(x):
        with on(x.device):
            gated_launch(x, gate_weight, up_weight, (gate, up, h))()
    return gate, up, h


def gated_backward(dy: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up, and silu(gate) * up again, of dy [M, E] and the weight [E, F] behind them."""
    dy, weight, gate, up = ready(dy, weight, gate, up)
    dgate, dup, h = (torch.empty_like(gate) for _ in range(3))
    if len(dy):
        with on(dy.device):
            gated_backward_launch(dy, weight, gate, up, (dgate, dup, h))()
    return dgate, dup, h
