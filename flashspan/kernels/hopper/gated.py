"""SwiGLU inside the products around it, for Hopper: silu(x Wg^T) * (x Wu^T), and the gradients of both.

Forward a tile is 128 columns of gate and the same 128 of up, one below the other in shared memory. Backward it is 256
columns of dh = dy Wd, in 16 bits as they would be anywhere. What follows takes half as long as the product: two
warps of their own do it, while those that multiply are at the next tile.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashspan.kernels.hopper.matmul import (
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
from flashspan.kernels.hopper.ptx import reciprocal, round_to
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
            g = round_to(pieces[i], desc_gate.dtype)
            u = round_to(pieces[i + 2], desc_up.dtype)
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
    STAGES: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
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
        [(_first_forward, job), (_second_forward, job), (_forward_feed, job)], [4, 1], [REGISTERS, PRODUCER_REGISTERS]
    )


@gluon.jit
def _backward(WG: gl.constexpr, desc, operands, dh_s, bars, numbers, outputs, C: gl.constexpr):
    """A warpgroup's part of dh, which it leaves to those who have nothing to multiply."""
    a_s, b_s = operands
    full, empty, dh_full, dh_empty = bars
    num_rows, num_columns, num_steps = numbers
    step = 0
    turn = 0
    for _ in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        acc = multiply(WG, a_s, b_s, full, empty, step, num_steps, False)
        step += num_steps
        mbarrier.wait(dh_empty.index(WG), (turn & 1) ^ 1)
        pieces = quarters(acc)
        for i in gl.static_range(4):
            dh_s.index(WG * 4 + i).store(pieces[i].to(dh_s.dtype))
        mbarrier.arrive(dh_full.index(WG), count=1)
        turn += 1  # noqa: SIM113


@gluon.jit
def _gradients(desc, operands, dh_s, bars, numbers, outputs, C: gl.constexpr):
    """Two warps that make of dh, gate and up their gradients, and h again, while the others are at the next tile."""
    full, empty, dh_full, dh_empty = bars
    num_rows, num_columns, num_steps = numbers
    gate, up, dgate, dup, h, M, F = outputs
    BM: gl.constexpr = dh_s.shape[1]
    PIECE: gl.constexpr = dh_s.shape[2]
    TALL: gl.constexpr = 32
    PARTS: gl.constexpr = BM // TALL
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    rows = gl.arange(0, TALL, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, PIECE, layout=gl.SliceLayout(0, L))
    parts_s = dh_s._reinterpret(dh_s.dtype, [8 * PARTS, TALL, PIECE], dh_s.layout)
    o = rows[:, None] * F + columns[None, :]
    turn = 0
    for tile in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        i_row, i_column = locate(tile, num_rows, num_columns, C[0])
        for w in range(2):
            m0 = (i_row * 2 + w) * BM
            n0 = i_column * (4 * PIECE)
            g, u = _load_both(gate, up, m0, n0, o, rows, columns, M, F)
            mbarrier.wait(dh_full.index(w), turn & 1)
            for i in range(4 * PARTS):
                dh = parts_s.index(w * (4 * PARTS) + i).load(L).to(gl.float32)
                x = g.to(gl.float32)
                y = u.to(gl.float32)
                m = m0 + i % PARTS * TALL
                n = n0 + i // PARTS * PIECE
                # The next are asked for before these are computed; after the last, none.
                after = i + 1
                g, u = _load_both(
                    gate, up, m0 + after % PARTS * TALL, gl.where(after < 4 * PARTS, n0 + after // PARTS * PIECE, F), o,
                    rows, columns, M, F,
                )  # fmt: skip
                to = m.to(gl.int64) * F + n
                here = (rows < M - m)[:, None] & (columns < F - n)[None, :]
                sigmoid = _sigmoid(x)
                silu = x * sigmoid
                gl.store(h + to + o, (silu * y).to(h.dtype.element_ty), mask=here)
                gl.store(dup + to + o, (dh * silu).to(h.dtype.element_ty), mask=here)
                slope = sigmoid + silu * (1.0 - sigmoid)
                gl.store(dgate + to + o, (dh * y * slope).to(h.dtype.element_ty), mask=here)
            mbarrier.arrive(dh_empty.index(w), count=1)
        turn += 1  # noqa: SIM113


@gluon.jit
def _load_both(gate, up, m, n, o, rows, columns, M, F):
    """Gate and up from row m and column n on."""
    at = m.to(gl.int64) * F + n
    here = (rows < M - m)[:, None] & (columns < F - n)[None, :]
    return gl.load(gate + at + o, mask=here, other=0.0), gl.load(up + at + o, mask=here, other=0.0)


@gluon.jit
def _backward_feed(desc, operands, dh_s, bars, numbers, outputs, C: gl.constexpr):
    """The warp that loads rows of dy and of the weight."""
    desc_a, desc_weight = desc
    a_s, b_s = operands
    full, empty, dh_full, dh_empty = bars
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
def _first_backward(desc, operands, dh_s, bars, numbers, outputs, C: gl.constexpr):
    _backward(0, desc, operands, dh_s, bars, numbers, outputs, C)


@gluon.jit
def _second_backward(desc, operands, dh_s, bars, numbers, outputs, C: gl.constexpr):
    _backward(1, desc, operands, dh_s, bars, numbers, outputs, C)


@gluon.jit(do_not_specialize=[*NUMBERS, "M", "eights"])
def gated_backward_product_kernel(
    desc_a, desc_weight, gate, up, dgate, dup, h, M, eights, num_rows, num_columns, num_steps, PIECE: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Rows of gate, up and what is made of them are so many eights: the compiler then knows they are aligned."""
    BM: gl.constexpr = desc_a.block_type.shape[0]
    BK: gl.constexpr = desc_a.block_type.shape[1]
    BN: gl.constexpr = desc_weight.block_type.shape[1]
    a_s = gl.allocate_shared_memory(desc_a.dtype, [STAGES, BM, BK], desc_a.layout)
    b_s = gl.allocate_shared_memory(desc_a.dtype, [STAGES, BK, BN], desc_weight.layout)
    DL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM // 2, PIECE], desc_a.dtype)
    dh_s = gl.allocate_shared_memory(desc_a.dtype, [8, BM // 2, PIECE], DL)
    full, empty = barriers(STAGES)
    dh_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dh_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(dh_full.index(i), count=1)
        mbarrier.init(dh_empty.index(i), count=1)
    C: gl.constexpr = (GROUP,)
    bars = (full, empty, dh_full, dh_empty)
    numbers = (num_rows, num_columns, num_steps)
    job = ((desc_a, desc_weight), (a_s, b_s), dh_s, bars, numbers, (gate, up, dgate, dup, h, M, eights * 8), C)
    gl.warp_specialize(
        [(_first_backward, job), (_second_backward, job), (_gradients, job), (_backward_feed, job)],
        [4, 2, 1],
        [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
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
    assert gate.shape[1] % 8 == 0, gate.shape
    operands = (describe(dy, ROWS, DEPTH), describe(weight, DEPTH, COLUMNS))
    tiles = (cdiv(len(dy), ROWS), cdiv(weight.shape[1], COLUMNS))
    numbers = (len(gate), gate.shape[1] // 8, *tiles, cdiv(dy.shape[1], DEPTH))
    arguments = (*operands, gate, up, *outs, *numbers)
    return launch(
        gated_backward_product_kernel,
        arguments,
        dy,
        tiles,
        PIECE=PIECE,
        STAGES=3,
        REGISTERS=168,
        PRODUCER_REGISTERS=168,
    )


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
