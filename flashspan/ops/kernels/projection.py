"""q, k and v of a layer in one matmul, for Hopper, with RoPE on q and k, and q times `unit`.

A tile belongs to q, k or v. One thread has both columns d and d + D / 2 of a head, so it rotates the pair in registers;
it loads one cos and one sin per pair, which all heads of a token share.
"""

from __future__ import annotations

from torch import Tensor
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from flashspan.kernels.hopper.config import Descriptor
from flashspan.kernels.hopper.gluon_compat import aggregate
from flashspan.kernels.hopper.shared_memory import split_columns
from flashspan.kernels.hopper.tensors import describe
from flashspan.ops.kernels.matmul import (
    COLUMNS,
    DEPTH,
    PIECE,
    ROWS,
    MatmulBuffers,
    allocate_barriers,
    free_stage,
    launch_matmul,
    locate_tile,
    multiply,
    readable,
    split_quarters,
    store_piece,
)


@aggregate
class ProjectionTensors:
    """Descriptors: x, the three weights, and the outputs."""

    desc_x: Descriptor
    desc_wq: Descriptor
    desc_wk: Descriptor
    desc_wv: Descriptor
    desc_q: Descriptor
    desc_k: Descriptor
    desc_v: Descriptor


@aggregate
class ProjectionSizes:
    """Numbers of tiles in a launch and of steps of DEPTH, and constants."""

    num_rows: gl.tensor
    q_columns: gl.tensor
    k_columns: gl.tensor
    num_steps: gl.tensor
    GROUP: gl.constexpr
    HEAD_DIM: gl.constexpr


@aggregate
class Angles:
    cos: gl.tensor  # pointers [period, HEAD_DIM / 2]
    sin: gl.tensor
    period: gl.tensor  # number of rows after which cos and sin repeat
    unit: gl.tensor  # factor of q


@gluon.jit(do_not_specialize=["period", "num_rows", "q_columns", "k_columns", "num_steps"])
def projection_kernel(
    desc_x, desc_wq, desc_wk, desc_wv, desc_q, desc_k, desc_v, cos, sin, unit, period, num_rows, q_columns, k_columns,
    num_steps, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute q, k and v from x. q and k are rotated, and q is multiplied by `unit`."""
    BM: gl.constexpr = desc_x.block_type.shape[0]
    BK: gl.constexpr = desc_x.block_type.shape[1]
    BN: gl.constexpr = desc_wq.block_type.shape[0]
    a_s = gl.allocate_shared_memory(desc_x.dtype, [STAGES, BM, BK], desc_x.layout)
    b_s = gl.allocate_shared_memory(desc_x.dtype, [STAGES, BN, BK], desc_wq.layout)
    pieces_s = gl.allocate_shared_memory(desc_q.dtype, [4, BM // 2, desc_q.block_type.shape[1]], desc_q.layout)
    job = (
        ProjectionTensors(desc_x, desc_wq, desc_wk, desc_wv, desc_q, desc_k, desc_v),
        MatmulBuffers(a_s, b_s, pieces_s),
        allocate_barriers(STAGES),
        ProjectionSizes(num_rows, q_columns, k_columns, num_steps, GROUP, HEAD_DIM),
        Angles(cos, sin, period, unit),
    )
    gl.warp_specialize(
        [(_consume, (0,) + job), (_consume, (1,) + job), (_produce, job)], [4, 1], [REGISTERS, PRODUCER_REGISTERS]
    )


@gluon.jit
def _rotate(left, right, cos, sin):
    return left * cos - right * sin, right * cos + left * sin


@gluon.jit
def _rotate_head(x, cos, sin):
    """Rotate a piece that is one head of 64."""
    left, right = split_columns(x)
    left, right = _rotate(left, right, cos, sin)
    both = gl.join(left, right).permute((0, 2, 1)).reshape(x.shape)
    return gl.convert_layout(both, x.type.layout, assert_trivial=True)


@gluon.jit
def _load_angles(p, row, period, like):
    """Load cos or sin, [period, D / 2], of the rows from `row` on, in the layout of an accumulator."""
    L: gl.constexpr = like.type.layout
    o_m = row + gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, L))
    o_d = gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, L))
    return gl.load(p + ((o_m % period) * like.shape[1])[:, None] + o_d[None, :])


@gluon.jit
def _rotated(acc, row, angles, unit, HEAD_DIM: gl.constexpr):
    """All heads of a tile, rotated and multiplied by `unit`, as four pieces."""
    p_cos, p_sin, period = angles.cos, angles.sin, angles.period
    a, b, c, d = split_quarters(acc)
    if HEAD_DIM == 64:
        left, _ = split_columns(a)
        cos = _load_angles(p_cos, row, period, left) * unit
        sin = _load_angles(p_sin, row, period, left) * unit
        a = _rotate_head(a, cos, sin)
        b = _rotate_head(b, cos, sin)
        c = _rotate_head(c, cos, sin)
        d = _rotate_head(d, cos, sin)
    else:
        cos = _load_angles(p_cos, row, period, a) * unit
        sin = _load_angles(p_sin, row, period, a) * unit
        a, b = _rotate(a, b, cos, sin)
        c, d = _rotate(c, d, cos, sin)
    return a, b, c, d


@gluon.jit
def _store(desc, row, column, pieces, pieces_s, WG: gl.constexpr):
    for i in gl.static_range(4):
        store_piece(desc, row, column + i * pieces_s.shape[2], pieces[i], pieces_s.index(WG * 2 + i % 2), 1)


@gluon.jit
def _consume(WG: gl.constexpr, tensors, buffers, barriers, sizes, angles):
    """A consumer: its part of each tile."""
    q_columns, k_columns = sizes.q_columns, sizes.k_columns
    BM: gl.constexpr = buffers.a_s.shape[1] // 2
    BN: gl.constexpr = buffers.b_s.shape[1]
    num_columns = q_columns + 2 * k_columns
    step = 0
    for tile in range(gl.program_id(0), sizes.num_rows * num_columns, gl.num_programs(0)):
        i_row, i_column = locate_tile(tile, sizes.num_rows, num_columns, sizes.GROUP)
        row = i_row * (2 * BM) + WG * BM
        acc = multiply(WG, buffers, barriers, step, sizes.num_steps, True)
        step += sizes.num_steps
        if i_column < q_columns + k_columns:
            unit = gl.where(i_column < q_columns, angles.unit, 1.0)
            pieces = _rotated(acc, row, angles, unit, sizes.HEAD_DIM)
            if i_column < q_columns:
                _store(tensors.desc_q, row, i_column * BN, pieces, buffers.pieces_s, WG)
            else:
                _store(tensors.desc_k, row, (i_column - q_columns) * BN, pieces, buffers.pieces_s, WG)
        else:
            column = (i_column - q_columns - k_columns) * BN
            _store(tensors.desc_v, row, column, split_quarters(acc), buffers.pieces_s, WG)
    tma.store_wait(0)


@gluon.jit
def _produce(tensors, buffers, barriers, sizes, angles):
    """The producer warp: rows of x and of the weight of q, k or v."""
    a_s, b_s = buffers.a_s, buffers.b_s
    q_columns, k_columns = sizes.q_columns, sizes.k_columns
    BM: gl.constexpr = a_s.shape[1]
    BN: gl.constexpr = b_s.shape[1]
    BK: gl.constexpr = a_s.shape[2]
    num_columns = q_columns + 2 * k_columns
    step = 0
    for tile in range(gl.program_id(0), sizes.num_rows * num_columns, gl.num_programs(0)):
        i_row, i_column = locate_tile(tile, sizes.num_rows, num_columns, sizes.GROUP)
        for i in range(sizes.num_steps):
            stage, bar = free_stage(step, buffers, barriers, (BM + BN) * BK * 2)
            tma.async_copy_global_to_shared(tensors.desc_x, [i_row * BM, i * BK], bar, a_s.index(stage))
            if i_column < q_columns:
                tma.async_copy_global_to_shared(tensors.desc_wq, [i_column * BN, i * BK], bar, b_s.index(stage))
            elif i_column < q_columns + k_columns:
                at = (i_column - q_columns) * BN
                tma.async_copy_global_to_shared(tensors.desc_wk, [at, i * BK], bar, b_s.index(stage))
            else:
                at = (i_column - q_columns - k_columns) * BN
                tma.async_copy_global_to_shared(tensors.desc_wv, [at, i * BK], bar, b_s.index(stage))
            step += 1


def project(
    x: Tensor, weights: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, unit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (rotated and multiplied by `unit`), k (rotated) and v, each [M, heads * D], for x [M, E]. cos and sin
    are [period, D / 2]; row i uses row i % period of them."""
    x, *operands = readable(x, *weights)
    q, k, v = outs = tuple(x.new_empty(len(x), len(weight)) for weight in weights)
    if len(x):
        descriptors = [describe(weight, COLUMNS, DEPTH) for weight in operands]
        descriptors += [describe(out, ROWS // 2, PIECE) for out in outs]
        q_columns, k_columns = (cdiv(len(weight), COLUMNS) for weight in weights[:2])
        tiles = (cdiv(len(x), ROWS), q_columns + 2 * k_columns)
        numbers = (len(cos), tiles[0], q_columns, k_columns, cdiv(x.shape[1], DEPTH))
        arguments = (describe(x, ROWS, DEPTH), *descriptors, cos, sin, unit, *numbers)
        launch_matmul(projection_kernel, arguments, tiles, x, HEAD_DIM=2 * cos.shape[-1], STAGES=4)
    return q, k, v
