"""Shared memory: barriers, and tiles that are cleared of NaN, loaded into registers, written to global memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flashspan.kernels.hopper.gluon_compat import barrier, reduce_add


@gluon.jit
def new_barrier(ARRIVALS: gl.constexpr):
    """A barrier whose phase ends after this many arrivals."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=ARRIVALS)
    return bar


@gluon.jit
def new_barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """A `new_barrier` for each stage."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def matrix(buffers, i):
    """Buffer number i, [1, 1, rows, columns], as a matrix."""
    x = buffers.index(i)
    return x.reshape((x.shape[2], x.shape[3]))


@gluon.jit
def clear_nonfinite(x_s):
    """Set inf and NaN in shared memory to 0, so that a key does not affect a query that does not see it, as 0 * NaN.
    Queries that see the key get NaN from their lse. For one warpgroup; 64 columns at a time, to save registers."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LIMIT: gl.constexpr = 0x7C00 if x_s.dtype == gl.float16 else 0x7F80
    ROWS: gl.constexpr = x_s.shape[0]
    for i in gl.static_range(x_s.shape[1] // 64):
        part = x_s.slice(64 * i, 64, dim=1)
        x = part.load(L)
        size = x.to(gl.int16, bitcast=True) & 0x7FFF
        if gl.max(gl.max(size, 1), 0) >= LIMIT:
            part.store(gl.where(size >= LIMIT, gl.zeros([ROWS, 64], x_s.dtype, layout=L), x))
    fence_async_shared()
    barrier()


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def clear_nonfinite_pair(own_s, PAIRS: gl.constexpr):
    """`clear_nonfinite` for K and V together. Each number is tested separately, so the layout does not matter.

    PAIRS: two 16-bit numbers at a time. The sign bits are cleared, and 1 is added to the exponents: if all bits of an
    exponent are 1, the carry sets the sign bit. Without FIRST_STEP_APART there are too few registers for PAIRS: it
    spilled 80 bytes more.
    """
    BN: gl.constexpr = own_s.shape[3]
    BD: gl.constexpr = own_s.shape[4]
    if PAIRS:
        PL: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
        ONE: gl.constexpr = 0x04000400 if own_s.dtype == gl.float16 else 0x00800080
        pairs_s = own_s._reinterpret(gl.int32, [BN * BD // 4, 4], gl.SwizzledSharedLayout(4, 1, 1, order=[1, 0]))
        pairs = pairs_s.load(PL)
        over = (pairs & 0x7FFF7FFF) + ONE
        if (gl.reduce(gl.reduce(over, 1, _either), 0, _either) >> 15) & 0x00010001 != 0:
            pairs_s.store(pairs & ~(((over >> 15) & 0x00010001) * 0xFFFF))
            fence_async_shared()
    else:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BD, BD // 8], [4, 1], [1, 0])
        LIMIT: gl.constexpr = 0x7C00 if own_s.dtype == gl.float16 else 0x7F80
        SL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * BN, BD], own_s.dtype)
        x_s = own_s._reinterpret(own_s.dtype, [2 * BN, BD], SL)
        x = x_s.load(L)
        size = x.to(gl.int16, bitcast=True) & 0x7FFF
        if gl.max(gl.max(size, 1), 0) >= LIMIT:
            x_s.store(gl.where(size >= LIMIT, gl.zeros([2 * BN, BD], own_s.dtype, layout=L), x))
            fence_async_shared()
    barrier()


@gluon.constexpr_function
def _swizzled_layout(rows, columns):
    """The copy engine's swizzled layout of float32 (the row determines the place of each 16 of 128 bytes), except that
    in odd rows columns c and c ^ 16 are exchanged."""
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 4 ^ 16], [2, 8], [4, 16]]
    bases += [[2**i, 0] for i in range(3, rows.bit_length() - 1)]
    return gl.SharedLinearLayout(bases + [[0, 2**i] for i in range(5, columns.bit_length() - 1)], [], 1024)


@gluon.jit
def swizzled(buffer, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A view of a buffer as float32 rows for the copy engine, to which `swizzle`d accumulators are stored.

    Without `swizzle`, rows 2i and 2i + 1 of an accumulator are stored to the same banks, which takes twice as long.
    """
    L: gl.constexpr = _swizzled_layout(ROWS, COLUMNS)
    return buffer._reinterpret(gl.float32, [ROWS, COLUMNS], L)


@gluon.jit
def swizzle(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """x, a float32 accumulator, with columns c and c ^ 16 of odd rows exchanged."""
    left, right = x.reshape((ROWS, COLUMNS // 32, 2, 16)).permute((0, 1, 3, 2)).split()
    L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, left.type.layout))
    odd = (gl.arange(0, ROWS, layout=L) & 1 == 1)[:, None, None]
    both = gl.join(gl.where(odd, right, left), gl.where(odd, left, right))
    return both.permute((0, 1, 3, 2)).reshape((ROWS, COLUMNS))


@gluon.jit
def split_columns(x):
    """Split an accumulator into its left and right columns."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def load_copied(desc, buffer, like):
    """Load a tile from a buffer that the copy engine has filled, in the layout of `like`."""
    x_s = buffer._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    return x_s.reshape((like.shape[0], like.shape[1])).load(like.type.layout)


@gluon.jit
def store_tile(desc, b, h, row, column, x, buffer, ADD: gl.constexpr, FREE: gl.constexpr):
    """Write a tile, or ADD it, through a buffer with the copy engine. First waits until the copy engine has read the
    buffer's earlier contents, unless the buffer is FREE."""
    if not FREE:
        tma.store_wait(0)
        barrier()
    x_s = buffer._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    # Not for a forward's carry (1% slower), nor for heads of 256 (no registers).
    if ADD and desc.dtype == gl.float32 and x.shape[1] <= 64:
        swizzled(buffer, x.shape[0], x.shape[1]).store(swizzle(x, x.shape[0], x.shape[1]))
    else:
        x_s.reshape((x.shape[0], x.shape[1])).store(x.to(desc.dtype))
    fence_async_shared()
    barrier()
    if ADD:
        reduce_add(desc, [b, h, row, column], x_s)
    else:
        tma.async_copy_shared_to_global(desc, [b, h, row, column], x_s)


@gluon.jit
def store_output(desc, b, h, row, x, buffer, ADD: gl.constexpr, FREE: gl.constexpr = False, second=None):
    """Write a finished tile, or ADD it, through a buffer with the copy engine. A float32 tile is written in two halves;
    the second half waits for the first unless there is a `second` buffer. The copy engine reads the buffers until
    `tma.store_wait(0)`. FREE: the buffer is free already."""
    HALF: gl.constexpr = desc.block_type.shape[3]
    if x.shape[1] == HALF:
        store_tile(desc, b, h, row, 0, x, buffer, ADD, FREE)
    else:
        left, right = split_columns(x)
        store_tile(desc, b, h, row, 0, left, buffer, ADD, FREE)
        store_tile(desc, b, h, row, HALF, right, buffer if second is None else second, ADD, second is not None)
