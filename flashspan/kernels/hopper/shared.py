"""What the kernels do with a tile in shared memory: clear it of NaN, send it off."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
)

from flashspan.kernels.hopper.names import barrier, reduce_add


@gluon.jit
def clean(x_s, BN: gl.constexpr, BD: gl.constexpr):
    """Set inf and NaN in shared memory to 0: a key that some query does not see must not reach it as 0 * NaN. Those who
    do see it have NaN from their lse or delta. For one warpgroup, 64 columns at a time for want of registers."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LIMIT: gl.constexpr = 0x7C00 if x_s.dtype == gl.float16 else 0x7F80
    for i in gl.static_range(BD // 64):
        part = x_s.slice(64 * i, 64, dim=1)
        x = part.load(L)
        size = x.to(gl.int16, bitcast=True) & 0x7FFF
        if gl.max(gl.max(size, 1), 0) >= LIMIT:
            part.store(gl.where(size >= LIMIT, gl.zeros([BN, 64], x_s.dtype, layout=L), x))
    fence_async_shared()
    barrier()


@gluon.jit
def _send(desc, b, h, row, column, x, room, ADD: gl.constexpr, FREE: gl.constexpr):
    """Write a tile, or add it, by the copy engine, once it has read what left through this room before, unless it is
    FREE."""
    if not FREE:
        tma.store_wait(0)
        barrier()
    x_s = room._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    x_s.reshape((x.shape[0], x.shape[1])).store(x.to(desc.dtype))
    fence_async_shared()
    barrier()
    if ADD:
        reduce_add(desc, [b, h, row, column], x_s)
    else:
        tma.async_copy_shared_to_global(desc, [b, h, row, column], x_s)


@gluon.jit
def send_off(desc, b, h, row, x, room, ADD: gl.constexpr, FREE: gl.constexpr = False, spare=None):
    """Send off a finished tile through shared memory nobody uses any more; in float32 one half, then the other, which
    waits for the first unless there is a `spare` room. Until `tma.store_wait(0)` that memory is read. FREE: it is not
    being read now."""
    HALF: gl.constexpr = desc.block_type.shape[3]
    if x.shape[1] == HALF:
        _send(desc, b, h, row, 0, x, room, ADD, FREE)
    else:
        left, right = x.reshape((x.shape[0], 2, HALF)).permute((0, 2, 1)).split()
        _send(desc, b, h, row, 0, left, room, ADD, FREE)
        if spare is None:
            _send(desc, b, h, row, HALF, right, room, ADD, False)
        else:
            _send(desc, b, h, row, HALF, right, spare, ADD, True)
