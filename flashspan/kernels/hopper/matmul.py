"""Matrix products for Hopper with what follows them in a layer done on their way out.

By itself each such thing (SwiGLU, rotations, a residual's sum) reads and writes whole tensors and computes next to
nothing. Here it is done on what a product holds in its registers; what more it reads and writes goes by while the
tensor cores are busy. The products themselves are as fast as cuBLAS's, whose every bit they have: at the power limit
multiplying is what costs.

A program takes tile after tile, 128 rows by 256 columns. One warp feeds operands through the copy engine, 64 deep at a
time, two warpgroups multiply 64 rows each, whose part leaves in pieces of 64 columns. Rows and columns past the
end read as zero and are not written.

This is what such kernels share; what they make of a tile is in gated.py, residual.py and projection.py.
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

from flashspan.kernels.hopper.gluon_compat import barrier
from flashspan.kernels.hopper.shared_memory import split_columns
from flashspan.kernels.hopper.tensors import multiprocessors
from flashspan.kernels.portable.arguments import Launch

ROWS, COLUMNS, DEPTH, PIECE = 128, 256, 64, 64
"""A tile, how much of its operands' depth is in one place of shared memory, and columns that leave together."""
GROUP = 16
"""Tiles below one another that are under way together, so that what they read of the weights is read once."""


@gluon.jit
def locate(tile, num_rows, num_columns, GROUP: gl.constexpr):
    """The row and the column of a tile: all columns of GROUP rows, then the next rows."""
    first = tile // (GROUP * num_columns) * GROUP
    size = gl.minimum(num_rows - first, GROUP)
    within = tile - first * num_columns
    return first + within % size, within // size


@gluon.jit
def place_of(step, STAGES: gl.constexpr):
    """Which place the step's operands are in, of any number of them, and the parity its barrier has when they are
    there."""
    return step % STAGES, (step // STAGES) & 1


@gluon.jit
def free_place(step, full, empty, STAGES: gl.constexpr, BYTES: gl.constexpr):
    """Wait for the step's place, and say how much will come: the place and the barrier to tell."""
    stage, phase = place_of(step, STAGES)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, BYTES)
    return stage, bar


@gluon.jit
def multiply(WG: gl.constexpr, a_s, b_s, full, empty, step, num_steps, TURNED: gl.constexpr):
    """The 64 rows of a tile that this warpgroup has, [64, 256] float32, over `num_steps` places. B comes as
    [256, DEPTH] if TURNED, else as [DEPTH, 256]."""
    STAGES: gl.constexpr = a_s.shape[0]
    BM: gl.constexpr = a_s.shape[1] // 2
    BN: gl.constexpr = b_s.shape[1] if TURNED else b_s.shape[2]
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc = gl.zeros([BM, BN], gl.float32, layout=L)
    before = 0
    for i in range(num_steps):
        stage, phase = place_of(step + i, STAGES)
        mbarrier.wait(full.index(stage), phase)
        a = a_s.index(stage).slice(WG * BM, BM, dim=0)
        b = b_s.index(stage)
        if TURNED:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=i > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1, pred=i > 0)
        before = stage
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(before), count=1)
    return acc


@gluon.jit
def quarters(x):
    """x, in the registers of a product, as four parts of a quarter of its columns each."""
    left, right = split_columns(x)
    a, b = split_columns(left)
    c, d = split_columns(right)
    return a, b, c, d


@gluon.jit
def leave(desc, row, column, x, room, BUSY: gl.constexpr):
    """Send a piece off through a room, once no more than BUSY of those sent before are still being read."""
    tma.store_wait(BUSY)
    barrier()
    room.store(x.to(desc.dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(desc, [row, column], room)


@gluon.jit
def barriers(STAGES: gl.constexpr):
    """Of places for operands: that they are full, and that both warpgroups have read them."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return full, empty


def ready(*tensors: Tensor) -> list[Tensor]:
    """Matrices of one dtype of 16 bits as the copy engine can read them: rows of whole 16 bytes, each in order."""
    assert {x.dtype for x in tensors} in ({torch.bfloat16}, {torch.float16}), [x.dtype for x in tensors]
    dense = [x.contiguous() for x in tensors]
    return [x if x.data_ptr() % 16 == 0 else x.clone() for x in dense]


NUMBERS = ["num_rows", "num_columns", "num_steps"]


def launch(kernel: Any, tensors: tuple[Any, ...], like: Tensor, tiles: tuple[int, int], **constants: Any) -> Launch:
    """A launch of programs that stay, over so many rows and columns of tiles."""
    grid = (min(multiprocessors(like.device), tiles[0] * tiles[1]),)
    shape = {"GROUP": GROUP, "REGISTERS": 232, "PRODUCER_REGISTERS": 40, "num_warps": 4}
    return Launch(kernel, grid, tensors, {**shape, **constants})
