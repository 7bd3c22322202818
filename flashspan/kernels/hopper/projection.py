"""q, k and v of a layer in one product, for Hopper, q and k with their rotary positions, q times a unit.

A tile is of one of the three. Whoever holds a head's columns d and d + D / 2 holds both in one thread: a rotation takes
two loads for each pair of them, of angles that all heads of a token share, and no memory for anything between.
"""

from __future__ import annotations

from torch import Tensor
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

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
from flashspan.kernels.hopper.shared_memory import split_columns
from flashspan.kernels.hopper.tensors import describe
from flashspan.kernels.portable.arguments import Launch, on


@gluon.jit
def _turn(left, right, cos, sin):
    return left * cos - right * sin, right * cos + left * sin


@gluon.jit
def _together(left, right, like):
    """The two halves of a head side by side."""
    both = gl.join(left, right).permute((0, 2, 1)).reshape(like.shape)
    return gl.convert_layout(both, like.type.layout, assert_trivial=True)


@gluon.jit
def _angles(p, row, period, like):
    """cos or sin, [period, D / 2], of rows from this one on, in the registers of a product."""
    L: gl.constexpr = like.type.layout
    o_m = row + gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, L))
    o_d = gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, L))
    return gl.load(p + ((o_m % period) * like.shape[1])[:, None] + o_d[None, :])


@gluon.jit
def _rotated(acc, row, angles, unit, HEAD: gl.constexpr):
    """All heads of a tile rotated, times a unit, as four pieces."""
    p_cos, p_sin, period = angles
    a, b, c, d = quarters(acc)
    if HEAD == 64:
        a0, a1 = split_columns(a)
        cos = _angles(p_cos, row, period, a0) * unit
        sin = _angles(p_sin, row, period, a0) * unit
        b0, b1 = split_columns(b)
        c0, c1 = split_columns(c)
        d0, d1 = split_columns(d)
        a0, a1 = _turn(a0, a1, cos, sin)
        b0, b1 = _turn(b0, b1, cos, sin)
        c0, c1 = _turn(c0, c1, cos, sin)
        d0, d1 = _turn(d0, d1, cos, sin)
        a = _together(a0, a1, a)
        b = _together(b0, b1, b)
        c = _together(c0, c1, c)
        d = _together(d0, d1, d)
    else:
        cos = _angles(p_cos, row, period, a) * unit
        sin = _angles(p_sin, row, period, a) * unit
        a, b = _turn(a, b, cos, sin)
        c, d = _turn(c, d, cos, sin)
    return a, b, c, d


@gluon.jit
def _send(desc, row, column, pieces, rooms, WG: gl.constexpr):
    for i in gl.static_range(4):
        leave(desc, row, column + i * rooms.shape[2], pieces[i], rooms.index(WG * 2 + i % 2), 1)


@gluon.jit
def _project(WG: gl.constexpr, operands, outs, memory, bars, numbers, angles, C: gl.constexpr):
    """A warpgroup's part of each tile."""
    desc_q, desc_k, desc_v = outs
    a_s, b_s, rooms = memory
    full, empty = bars
    num_rows, q_columns, k_columns, num_steps = numbers
    BM: gl.constexpr = a_s.shape[1] // 2
    BN: gl.constexpr = b_s.shape[1]
    num_columns = q_columns + 2 * k_columns
    step = 0
    for tile in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        i_row, i_column = locate(tile, num_rows, num_columns, C[0])
        row = i_row * (2 * BM) + WG * BM
        acc = multiply(WG, a_s, b_s, full, empty, step, num_steps, True)
        step += num_steps
        if i_column < q_columns + k_columns:
            p_cos, p_sin, period, unit = angles
            unit = gl.where(i_column < q_columns, unit, 1.0)
            pieces = _rotated(acc, row, (p_cos, p_sin, period), unit, C[1])
            if i_column < q_columns:
                _send(desc_q, row, i_column * BN, pieces, rooms, WG)
            else:
                _send(desc_k, row, (i_column - q_columns) * BN, pieces, rooms, WG)
        else:
            _send(desc_v, row, (i_column - q_columns - k_columns) * BN, quarters(acc), rooms, WG)
    tma.store_wait(0)


@gluon.jit
def _feed(operands, outs, memory, bars, numbers, angles, C: gl.constexpr):
    """The warp that loads rows of x and of the weight that a tile is of."""
    desc_x, desc_wq, desc_wk, desc_wv = operands
    a_s, b_s, rooms = memory
    full, empty = bars
    num_rows, q_columns, k_columns, num_steps = numbers
    BM: gl.constexpr = a_s.shape[1]
    BN: gl.constexpr = b_s.shape[1]
    BK: gl.constexpr = a_s.shape[2]
    num_columns = q_columns + 2 * k_columns
    step = 0
    for tile in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        i_row, i_column = locate(tile, num_rows, num_columns, C[0])
        for i in range(num_steps):
            stage, bar = free_place(step, full, empty, a_s.shape[0], (BM + BN) * BK * 2)
            tma.async_copy_global_to_shared(desc_x, [i_row * BM, i * BK], bar, a_s.index(stage))
            if i_column < q_columns:
                tma.async_copy_global_to_shared(desc_wq, [i_column * BN, i * BK], bar, b_s.index(stage))
            elif i_column < q_columns + k_columns:
                at = (i_column - q_columns) * BN
                tma.async_copy_global_to_shared(desc_wk, [at, i * BK], bar, b_s.index(stage))
            else:
                at = (i_column - q_columns - k_columns) * BN
                tma.async_copy_global_to_shared(desc_wv, [at, i * BK], bar, b_s.index(stage))
            step += 1


@gluon.jit
def _first(operands, outs, memory, bars, numbers, angles, C: gl.constexpr):
    _project(0, operands, outs, memory, bars, numbers, angles, C)


@gluon.jit
def _second(operands, outs, memory, bars, numbers, angles, C: gl.constexpr):
    _project(1, operands, outs, memory, bars, numbers, angles, C)


@gluon.jit(do_not_specialize=["period", "num_rows", "q_columns", "k_columns", "num_steps"])
def projection_product_kernel(
    desc_x, desc_wq, desc_wk, desc_wv, desc_q, desc_k, desc_v, cos, sin, unit, period, num_rows, q_columns, k_columns,
    num_steps, HEAD: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BM: gl.constexpr = desc_x.block_type.shape[0]
    BK: gl.constexpr = desc_x.block_type.shape[1]
    BN: gl.constexpr = desc_wq.block_type.shape[0]
    a_s = gl.allocate_shared_memory(desc_x.dtype, [STAGES, BM, BK], desc_x.layout)
    b_s = gl.allocate_shared_memory(desc_x.dtype, [STAGES, BN, BK], desc_wq.layout)
    rooms = gl.allocate_shared_memory(desc_q.dtype, [4, BM // 2, desc_q.block_type.shape[1]], desc_q.layout)
    C: gl.constexpr = (GROUP, HEAD)
    operands = (desc_x, desc_wq, desc_wk, desc_wv)
    numbers = (num_rows, q_columns, k_columns, num_steps)
    outs = (desc_q, desc_k, desc_v)
    job = (operands, outs, (a_s, b_s, rooms), barriers(STAGES), numbers, (cos, sin, period, unit), C)
    gl.warp_specialize([(_first, job), (_second, job), (_feed, job)], [4, 1], [REGISTERS, PRODUCER_REGISTERS])


def projection_launch(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    unit: float,
    outs: tuple[Tensor, Tensor, Tensor],
) -> Launch:
    """q, k and v [M, heads * D] of x [M, E] and weights [heads * D, E], of angles [period, D / 2] for rows in turn."""
    operands = [describe(x, ROWS, DEPTH), *(describe(weight, COLUMNS, DEPTH) for weight in weights)]
    pieces = [describe(out, ROWS // 2, PIECE) for out in outs]
    q_columns, k_columns = (cdiv(weight.shape[0], COLUMNS) for weight in weights[:2])
    tiles = (cdiv(len(x), ROWS), q_columns + 2 * k_columns)
    numbers = (len(cos), tiles[0], q_columns, k_columns, cdiv(x.shape[1], DEPTH))
    arguments = (*operands, *pieces, cos, sin, unit, *numbers)
    return launch(projection_product_kernel, arguments, x, tiles, HEAD=2 * cos.shape[-1], STAGES=4)


def project(
    x: Tensor, weights: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, unit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, rotated, q times unit, and v, [M, heads * D], of x [M, E]; cos and sin [period, D / 2], for rows in
    turn."""
    x, wq, wk, wv = ready(x, *weights)
    outs = (x.new_empty(len(x), len(wq)), x.new_empty(len(x), len(wk)), x.new_empty(len(x), len(wv)))
    if len(x):
        with on(x.device):
            projection_launch(x, (wq, wk, wv), cos, sin, unit, outs)()
    return outs
