"""Slices of columns in the forward kernel for Hopper.

Every dimension of a tensor in a kernel is a power of 2. Padded to 256 columns, heads of 160 and 192 would multiply and
store up to twice what they need. So for heads of 129 to 192, Q, K, V and the output consist of three slices of 64
columns. All other heads have one slice. Buffers hold the slices of a block one after another; the accumulators of the
output are a tuple with one for each slice.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from flashspan.kernels.hopper.ptx import rescale
from flashspan.kernels.hopper.row_values import scale_rows
from flashspan.kernels.hopper.shared_memory import matrix, split_columns, store_tile


@gluon.jit
def load_slices(desc, b, h, row, bar, buffers, block, SLICES: gl.constexpr):
    """Let the copy engine load the rows of a block from `row` on."""
    for i in gl.static_range(SLICES):
        tma.async_copy_global_to_shared(
            desc, [b, h, row, i * desc.block_type.shape[3]], bar, buffers.index(block * SLICES + i)
        )


@gluon.jit
def slices_of(buffers, block, config):
    """The slices of a block in shared memory, [rows, columns]."""
    found = ()
    for i in gl.static_range(config.SLICES):
        found += (matrix(buffers, block * config.SLICES + i),)
    return found


@gluon.jit
def transposed_slices_of(buffers, block, config):
    """The slices of a block in shared memory, [columns, rows]."""
    found = ()
    for i in gl.static_range(config.SLICES):
        found += (matrix(buffers, block * config.SLICES + i).permute((1, 0)),)
    return found


@gluon.jit
def load_operands(slices, config):
    """Load the slices of Q into registers, as operands of the matmuls for the scores."""
    loaded = ()
    for i in gl.static_range(len(slices)):
        loaded += (slices[i].load(gl.DotOperandLayout(0, config.SCORES, 2)),)
    return loaded


@gluon.jit
def start_scores(q, k, s, ADD: gl.constexpr = False):
    """Start the matmuls S = Q K^T (ADD: S += Q K^T), one for each slice of Q and of transposed K."""
    for i in gl.static_range(len(q)):
        s = warpgroup_mma(q[i], k[i], s, use_acc=ADD or i > 0, is_async=True)
    return s


@gluon.jit
def start_output(p, v, o):
    """Start the matmuls O += P V, one for each slice of V."""
    started = ()
    for i in gl.static_range(len(v)):
        started += (warpgroup_mma(p, v[i], o[i], is_async=True),)
    return started


@gluon.jit
def wait_for_output(o, read=()):
    """Wait for the matmuls that `start_output` has started. Returns O, then what is in `read`: registers that pass
    through the wait, because ptxas would otherwise reuse them while the matmuls still read them."""
    done = warpgroup_mma_wait(0, deps=o + read)
    return done if len(o) + len(read) > 1 else (done,)


@gluon.jit
def rescale_slices(o, alpha):
    """`rescale` of each slice."""
    scaled = ()
    for i in gl.static_range(len(o)):
        scaled += (rescale(o[i], alpha),)
    return scaled


@gluon.jit
def scale_slices(o, a):
    """`scale_rows` of each slice."""
    scaled = ()
    for i in gl.static_range(len(o)):
        scaled += (scale_rows(o[i], a),)
    return scaled


@gluon.jit
def multiply_slices(o, factor):
    """Each slice times a number for each row, [rows, 1]."""
    product = ()
    for i in gl.static_range(len(o)):
        product += (o[i] * factor,)
    return product


@gluon.jit
def store_slices(desc, b, h, row, o, buffers, block):
    """Write a finished tile with the copy engine, through the buffers of a block. A float32 tile is written in two
    halves of each slice; the second halves wait for the first. The copy engine reads the buffers until
    `tma.store_wait(0)`."""
    WIDE: gl.constexpr = desc.block_type.shape[3]
    HALVES: gl.constexpr = o[0].shape[1] // WIDE
    parts = ()
    for i in gl.static_range(len(o)):
        parts += (o[i],) if HALVES == 1 else split_columns(o[i])
    for half in gl.static_range(HALVES):
        for i in gl.static_range(len(o)):
            buffer = buffers.index(block * len(o) + i)
            store_tile(desc, b, h, row, (i * HALVES + half) * WIDE, parts[i * HALVES + half], buffer, False, i > 0)
