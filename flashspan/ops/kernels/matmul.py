"""Matmuls for Hopper with an epilogue: the functions that gated.py, residual.py and projection.py share.

As a separate kernel, each of these epilogues (SwiGLU, rotations, adding a residual) would read and write whole tensors
and compute next to nothing. Here the epilogue works on the accumulator in registers; its other reads and writes happen
while the tensor cores are busy. The matmuls are as fast as those of cuBLAS, and their results are bitwise equal.

A program computes tile after tile, 128 rows by 256 columns. A producer warp loads operands through the copy engine, 64
columns of A and rows of B at a time. Two consumer warpgroups multiply 64 rows each and write them in pieces of 64
columns. Rows and columns past the end are read as zero and are not written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashspan.kernels.hopper.config import Shared
from flashspan.kernels.hopper.gluon_compat import aggregate, barrier
from flashspan.kernels.hopper.shared_memory import split_columns
from flashspan.kernels.hopper.tensors import multiprocessors
from flashspan.kernels.launch.launch import Launch, on

ROWS, COLUMNS, DEPTH, PIECE = 128, 256, 64, 64
"""Rows and columns of a tile, depth of the operands in a stage, and columns that are written together."""
GROUP = 16
"""Rows of tiles that are computed together, so that each column of weights is read from memory once for all of them."""


@aggregate
class MatmulBuffers:
    """Shared memory."""

    a_s: Shared  # [STAGES, rows, depth]
    b_s: Shared  # [STAGES, columns, depth] if TRANSPOSED, else [STAGES, depth, columns]
    pieces_s: Shared  # [4 or 8, rows / 2, PIECE] pieces of the result to be written, some for each consumer


@aggregate
class MatmulBarriers:
    """Barriers of each stage."""

    full: Shared
    empty: Shared


@aggregate
class MatmulSizes:
    """Numbers of tiles in a launch, and of steps of DEPTH."""

    num_rows: gl.tensor
    num_columns: gl.tensor
    num_steps: gl.tensor
    GROUP: gl.constexpr


@gluon.jit
def locate_tile(tile, num_rows, num_columns, GROUP: gl.constexpr):
    """The row and the column of tile number `tile`: all columns of GROUP rows come first, then the next rows."""
    first = tile // (GROUP * num_columns) * GROUP
    size = gl.minimum(num_rows - first, GROUP)
    within = tile - first * num_columns
    return first + within % size, within // size


@gluon.jit
def _stage_and_phase(step, STAGES: gl.constexpr):
    """A step's stage, for any number of stages, and the phase of its barriers."""
    return step % STAGES, (step // STAGES) & 1


@gluon.jit
def free_stage(step, buffers, barriers, BYTES: gl.constexpr):
    """Wait until a step's stage is free, and set how many bytes its barrier expects. Returns stage and barrier."""
    stage, phase = _stage_and_phase(step, buffers.a_s.shape[0])
    mbarrier.wait(barriers.empty.index(stage), phase ^ 1)
    bar = barriers.full.index(stage)
    mbarrier.expect(bar, BYTES)
    return stage, bar


@gluon.jit
def load_steps(desc_a, desc_b, num_steps, i_row, i_column, step, buffers, barriers, TRANSPOSED: gl.constexpr):
    """Load A and B of a tile: `num_steps` steps, from `step` on. Returns the next step."""
    a_s, b_s = buffers.a_s, buffers.b_s
    BM: gl.constexpr = a_s.shape[1]
    BK: gl.constexpr = a_s.shape[2]
    BN: gl.constexpr = b_s.shape[1] if TRANSPOSED else b_s.shape[2]
    for i in range(num_steps):
        stage, bar = free_stage(step + i, buffers, barriers, (BM + BN) * BK * 2)
        tma.async_copy_global_to_shared(desc_a, [i_row * BM, i * BK], bar, a_s.index(stage))
        if TRANSPOSED:
            tma.async_copy_global_to_shared(desc_b, [i_column * BN, i * BK], bar, b_s.index(stage))
        else:
            tma.async_copy_global_to_shared(desc_b, [i * BK, i_column * BN], bar, b_s.index(stage))
    return step + num_steps


@gluon.jit
def multiply(WG: gl.constexpr, buffers, barriers, step, num_steps, TRANSPOSED: gl.constexpr):
    """A consumer's main loop, over `num_steps` steps from `step` on. Returns its rows of a tile, [64, 256] float32."""
    a_s, b_s, full, empty = buffers.a_s, buffers.b_s, barriers.full, barriers.empty
    STAGES: gl.constexpr = a_s.shape[0]
    BM: gl.constexpr = a_s.shape[1] // 2
    BN: gl.constexpr = b_s.shape[1] if TRANSPOSED else b_s.shape[2]
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc = gl.zeros([BM, BN], gl.float32, layout=L)
    before = 0
    for i in range(num_steps):
        stage, phase = _stage_and_phase(step + i, STAGES)
        mbarrier.wait(full.index(stage), phase)
        a = a_s.index(stage).slice(WG * BM, BM, dim=0)
        b = b_s.index(stage)
        if TRANSPOSED:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=i > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1, pred=i > 0)
        before = stage
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(before), count=1)
    return acc


@gluon.jit
def split_quarters(x):
    """Split an accumulator into four quarters of its columns."""
    left, right = split_columns(x)
    a, b = split_columns(left)
    c, d = split_columns(right)
    return a, b, c, d


@gluon.jit
def store_piece(desc, row, column, x, piece_s, BUSY: gl.constexpr):
    """Write a piece through a buffer with the copy engine. First waits until at most BUSY earlier pieces are unread."""
    tma.store_wait(BUSY)
    barrier()
    piece_s.store(x.to(desc.dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(desc, [row, column], piece_s)


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr):
    """Barriers of each stage, initialised."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return MatmulBarriers(full, empty)


def readable(*tensors: Tensor) -> list[Tensor]:
    """Matrices of one 16-bit dtype, copied if the copy engine cannot read them: contiguous, 16-byte aligned."""
    assert {x.dtype for x in tensors} in ({torch.bfloat16}, {torch.float16}), [x.dtype for x in tensors]
    dense = [x.contiguous() for x in tensors]
    return [x if x.data_ptr() % 16 == 0 else x.clone() for x in dense]


NUMBERS = ["num_rows", "num_columns", "num_steps"]


def launch_matmul(
    kernel: Any, arguments: tuple[Any, ...], tiles: tuple[int, int], like: Tensor, **constants: Any
) -> None:
    """Launch persistent programs over `tiles` (rows, columns) of tiles, on the device of `like`."""
    grid = (min(multiprocessors(like.device), tiles[0] * tiles[1]),)
    shape = {"GROUP": GROUP, "REGISTERS": 232, "PRODUCER_REGISTERS": 40, "num_warps": 4}
    with on(like.device):
        Launch(kernel, grid, arguments, {**shape, **constants})()
