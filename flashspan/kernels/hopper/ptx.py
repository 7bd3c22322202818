"""GPU instructions that Gluon does not have, as inline assembly."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashspan.kernels.hopper.row_values import across


@gluon.jit
def opaque(x):
    """Hide a scalar from the compiler and return it. The compiler then does not move computations with x out of a loop,
    where their results would occupy registers."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


def _rescaling(elements: int) -> str:
    """PTX of o = x * alpha, or of o = x if all alphas of the warp are 1, for this many numbers per thread."""
    out, x, alpha = ([f"${i * elements + j}" for j in range(elements)] for i in range(3))
    lines = [
        "{ .reg .pred some;",
        f"setp.neu.f32 some, {alpha[0]}, 0f3F800000;",
        f"setp.neu.or.f32 some, {alpha[2]}, 0f3F800000, some;",
        "vote.sync.any.pred some, some, 0xffffffff;",
        *(f"mov.f32 {o}, {a};" for o, a in zip(out, x, strict=True)),
        "@!some bra.uni DONE;",
        *(f"mul.rn.f32 {o}, {o}, {a};" for o, a in zip(out, alpha, strict=True)),
        "DONE:",
        "}",
    ]
    return "\n".join(lines)


_RESCALING = gl.constexpr(_rescaling(32))
_OPERANDS = gl.constexpr(",".join(["=&f"] * 32 + ["f"] * 64))


@gluon.jit
def rescale(o, alpha):
    """The accumulator o times alpha [rows, 4]. A warp whose alphas are all 1 skips the multiplication."""
    x = o.reshape((o.shape[0], o.shape[1] // 8, 4, 2))
    alpha, _ = gl.broadcast(across(alpha, x), x)
    alpha = gl.convert_layout(alpha.reshape(o.shape), o.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(_RESCALING, _OPERANDS, [o, alpha], dtype=gl.float32, is_pure=True, pack=32)


@gluon.jit
def declare_vote():
    """Declare the register that `all_below` uses. Call it once in a kernel, before the first use."""
    asm: gl.constexpr = ".reg .pred flashspan_some; mov.u32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def all_below(x, LIMIT: gl.constexpr):
    """Return x, and whether all of this warp's numbers of x are below LIMIT. A thread has two numbers of x.

    The second result is a scalar that may differ from warp to warp. Gluon has no such scalar, so it is passed from one
    piece of assembly to the next in the register of `declare_vote`. Even if code depends on it, all warps of a
    warpgroup must execute the same barriers and matmuls in the same order. A loop that one warp ends early and starts
    again satisfies this, if there is no barrier and no matmul between the end and the start.
    """
    some: gl.constexpr = """{ .reg .pred here;
        setp.geu.f32 here, $2, $4;
        setp.geu.or.f32 here, $3, $5, here;
        vote.sync.any.pred flashspan_some, here, 0xffffffff;
        mov.f32 $0, $2;
        mov.f32 $1, $3; }"""
    limit = gl.full(x.shape, LIMIT, gl.float32, layout=x.type.layout)
    x = gl.inline_asm_elementwise(some, "=&f,=&f,f,f,f,f", [x, limit], dtype=gl.float32, is_pure=False, pack=2)
    none: gl.constexpr = "selp.u32 $0, 0, 1, flashspan_some; or.b32 $0, $0, $1;"
    return x, gl.inline_asm_elementwise(none, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1) != 0


@gluon.jit
def fence_global():
    """Order the accesses of the copy engine and of threads to global memory."""
    asm: gl.constexpr = "fence.proxy.async.global; mov.u32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_writes():
    """Wait until the copy engine has written this warp's stores; `store_wait` only waits until it has read them."""
    asm: gl.constexpr = "cp.async.bulk.wait_group 0; mov.u32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def prefetch(p):
    """Prefetch the 128-byte lines that these pointers point into, to the L2 cache."""
    asm: gl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,l", [p.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bit_range(first, size):
    """Words with `size` bits set, from bit `first` on. Neither is negative; both may exceed 32."""
    return gl.inline_asm_elementwise(
        "bmsk.clamp.b32 $0, $1, $2;", "=r,r,r", [first, size], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def in_own_registers(x):
    """Copy x, float32, into new registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


_ROUND_BFLOAT16 = gl.constexpr("""{ .reg .b32 both;
    cvt.rn.bf16x2.f32 both, $3, $2;
    shl.b32 $0, both, 16;
    and.b32 $1, both, 0xffff0000; }""")
_ROUND_FLOAT16 = gl.constexpr("""{ .reg .b32 both; .reg .b16 low, high;
    cvt.rn.f16x2.f32 both, $3, $2;
    mov.b32 {low, high}, both;
    cvt.f32.f16 $0, low;
    cvt.f32.f16 $1, high; }""")


@gluon.jit
def round_to(x, dtype: gl.constexpr):
    """x rounded to dtype, as float32. One instruction rounds two numbers; the compiler does not use it by itself."""
    asm: gl.constexpr = _ROUND_BFLOAT16 if dtype == gl.bfloat16 else _ROUND_FLOAT16
    return gl.inline_asm_elementwise(asm, "=f,=f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def reciprocal(x):
    """1 / x, with an error of at most the last bit."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
