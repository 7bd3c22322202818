"""The kernels before and after a backward pass. The first computes -lse and -delta of each row. The second casts dq to
its dtype, and adds the parts of dk and dv (portable/gradient_parts.py)."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels.hopper.parts import store_rows
from flashspan.kernels.hopper.tensors import block_dim
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.portable.common import load_tile
from flashspan.kernels.portable.gradient_parts import add_block


@triton.jit(do_not_specialize=["s_ob", "s_oh", "s_ot", "s_db", "s_dh", "s_dt", "H", "T", "Tp"])
def rows_kernel(
    lse, source, dout, minus_lse, minus_delta, sums, states, s_ob, s_oh, s_ot, s_db, s_dh, s_dt, H, T, Tp, unit,
    D: tl.constexpr, BD: tl.constexpr, CLEAR: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Compute -lse, in the unit of q k^T, and -delta for BLOCK rows of a head, padded to Tp rows, a multiple of BLOCK.

    D = 0: `source` is delta. Otherwise it is the output, of head size D, and delta is computed from it and dout.
    Strides are in units of 8 elements. It also sets CLEAR numbers of `sums` to 0 for each row, and STATES states for
    each BLOCK rows.
    """
    num_blocks = Tp // BLOCK
    i_bh = (tl.program_id(0) // num_blocks).to(tl.int64)
    m0 = tl.program_id(0) % num_blocks * BLOCK
    o_r = tl.arange(0, BLOCK)
    o = m0 + o_r
    b_lse = tl.load(lse + i_bh * T + o, mask=o < T, other=float("inf"))
    if D:
        i_b, i_h = i_bh // H, i_bh % H
        b_out = load_tile(source + (i_b * s_ob + i_h * s_oh) * 8, m0, o_r, s_ot * 8, T, D, BD, True)
        b_dout = load_tile(dout + (i_b * s_db + i_h * s_dh) * 8, m0, o_r, s_dt * 8, T, D, BD, True)
        b_delta = tl.sum(b_out.to(tl.float32) * b_dout.to(tl.float32), 1)
    else:
        b_delta = tl.load(source + i_bh * T + o, mask=o < T, other=0.0)
    # In a row that saw no key, lse = inf makes all scores -inf and all probabilities 0.
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse)
    # In a row that saw NaN, lse = NaN reaches only the keys that the row sees. delta = NaN would also reach the other
    # keys, as 0 * NaN.
    b_lse = tl.where((b_delta * 0.0 == 0.0) | (b_lse == float("inf")), b_lse, float("nan"))
    b_delta = tl.where(b_delta * 0.0 == 0.0, b_delta, 0.0)
    store_rows(minus_lse, i_bh * Tp + o, -b_lse * unit)
    store_rows(minus_delta, i_bh * Tp + o, -b_delta)
    if CLEAR:
        tl.store(sums + (i_bh * Tp + m0) * CLEAR + tl.arange(0, BLOCK * CLEAR), tl.zeros([BLOCK * CLEAR], tl.float32))
    if STATES:
        p_state = states + (i_bh * Tp + m0) // BLOCK * STATES + tl.arange(0, STATES)
        tl.store(p_state, tl.zeros([STATES], tl.int32))


@triton.jit(
    do_not_specialize=[
        *("s_b", "s_h", "s_t", "s_dkb", "s_dkh", "s_dks", "s_dvb", "s_dvh", "s_dvs", "H", "K", "T", "S", "Tp"),
        *("num_parts", "num_dq", "num_dk"),
    ]
)
def cast_kernel(
    sums, states, dk_parts, dv_parts, dq, dk, dv, s_b, s_h, s_t, s_dkb, s_dkh, s_dks, s_dvb, s_dvh, s_dvs, H, K, T, S,
    Tp, scale, num_parts, num_dq, num_dk, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
    CLAIMED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Cast a block of dq in the first num_dq programs. With PARTS, add the parts of a block of dk in the next num_dk
    programs, of dv in the others. Strides are in units of 8 elements."""
    i = tl.program_id(0)
    if i < num_dq:
        cast_block(sums, states, dq, i, s_b, s_h, s_t, H, T, Tp, scale, D, BD, BM, BLOCK, CLAIMED)
    elif PARTS:
        if i < num_dq + num_dk:
            o_b, o_h = tl.cast(s_dkb, tl.int64) * 8, tl.cast(s_dkh, tl.int64) * 8
            add_block(dk_parts, dk, i - num_dq, o_b, o_h, s_dks * 8, K, S, num_parts, D, BD, 2048 // BD, False)
        else:
            o_b, o_h = tl.cast(s_dvb, tl.int64) * 8, tl.cast(s_dvh, tl.int64) * 8
            i -= num_dq + num_dk
            add_block(dv_parts, dv, i, o_b, o_h, s_dvs * 8, K, S, num_parts, D, BD, 2048 // BD, False)


def cast_launch(
    sums: Tensor,
    states: Tensor,
    parts: Sequence[Tensor],
    grads: Sequence[Tensor],
    scale: float,
    *,
    padded: int,
    block: int,
    claimed: int,
) -> Launch:
    """The launch that writes dq from its sums and, if dk and dv have parts, adds those. The numbers of rows: of a head
    of sums (padded), of a block of sums (block), and of those that share a state (claimed, or 0)."""
    (B, H, T, D), (K, S) = grads[0].shape, grads[1].shape[1:3]
    wide, num_parts = block_dim(D), parts[0].shape[1] // K
    num_dq = triton.cdiv(T, 32) * B * H
    num_dk = triton.cdiv(S, 2048 // wide) * B * K if num_parts > 1 else 0
    steps = [step // 8 for x in grads for step in x.stride()[:3]]
    return Launch(
        cast_kernel,
        (num_dq + 2 * num_dk,),
        (sums, states, *parts, *grads, *steps, H, K, T, S, padded, scale, num_parts, num_dq, num_dk),
        {"D": D, "BD": wide, "BM": 32, "BLOCK": block, "CLAIMED": claimed, "PARTS": num_parts > 1},
    )


@triton.jit
def cast_block(
    sums, states, dq, i, s_b, s_h, s_t, H, T, Tp, scale, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    BLOCK: tl.constexpr, CLAIMED: tl.constexpr,
):  # fmt: skip
    """dq = sums * scale, in dq's dtype, for block i of BM rows. If CLAIMED is not 0, that many rows of sums share a
    state. If the state is 0, nothing was added, and dq is 0.

    Sums are stored in blocks of BLOCK rows, in the order of a matmul's registers. A warpgroup has 64 rows and 64
    columns, a warp 16 of the rows. In each group of 8 columns, a thread has 2 columns of two rows that are 8 apart.
    """
    num_blocks = tl.cdiv(T, BM)
    i_bh = i // num_blocks
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    m0 = i % num_blocks * BM
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    here = (m0 + o_m < T)[:, None] & (o_d < D)[None, :]
    row = i_bh.to(tl.int64) * Tp + m0
    some = tl.load(states + row // CLAIMED) != 0 if CLAIMED else True
    p_sums = sums + row // BLOCK * (BLOCK * BD) + m0 % BLOCK // 64 * 4096 + m0 % 64 // 16 * 128
    o = tl.arange(0, BM * BD)
    b = tl.load(p_sums + o // (8 * BM) * 512 + o % (8 * BM), mask=some, other=0.0)
    b = tl.permute(tl.reshape(b, (BD // 8, BM // 16, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    b = tl.reshape(b, (BM, BD))
    p = dq + i_b * s_b * 8 + i_h * s_h * 8 + m0.to(tl.int64) * (s_t * 8) + (o_m[:, None] * (s_t * 8) + o_d[None, :])
    tl.store(p, (b * scale).to(dq.dtype.element_ty), mask=here)
