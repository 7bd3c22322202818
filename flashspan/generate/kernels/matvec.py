"""Matmuls of a few rows: the layers of a decode step. The time of each is that of reading its weights once.

A program computes a few output columns for all rows. Its loop over K processes BS slices of BK columns at a time, which
Triton loads ahead (`num_stages`). It multiplies the slices as a batch: each warp has its own slice and sum. The sums
are added once, in a fixed order, at the end. Sums are float32, and each result is rounded once.

Note [A norm without a pass of its own]
The kernel that computes a row x of the residual also writes `scaled`, x times the weight of the next RMSNorm, and each
program writes the sum of squares of its columns. The next matmul multiplies `scaled` unchanged, and divides its row of
results by the root mean square. `gain` is a power of two that keeps x times the weight in the range of float16.

Note [An early start]
With EARLY, on Hopper and later, a kernel may start before the previous kernel has ended (programmatic dependent
launch). It can prefetch its first weights, which no kernel writes, into the L2 cache. It reads everything else after
`gdc_wait`, which waits until the previous kernel has ended and its writes are visible. Its programs go to the
multiprocessors that have room first. If more programs fit on one than its share, some get too many, others none, and
the kernel takes up to half as long again. So the number of stages is chosen to fill shared memory. With one row, one
program of `add`, two of `gated` or three of `project` fit on a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.portable.common import prefetch
from flashspan.kernels.portable.tiles import early_launch, is_small, precision, starts_early

MAX_ROWS = 16
"""The most rows that the kernels support: those of the narrowest tensor core instruction."""
MAX_PARTS = 256
"""The most programs that contribute to a row's sum of squares. A program has at most 64 columns: wide rows exceed
it."""


@triton.jit
def product(
    x, p_rows, B, K: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):
    """x [B, K] times the rows of weights at p_rows, float32 [BM, len(p_rows)]."""
    o_m = tl.arange(0, BM)
    o_k = (tl.arange(0, BS)[:, None] * BK + tl.arange(0, BK)[None, :])[:, None, :]  # [BS, 1, BK]
    p_x = x + o_m[None, :, None] * K + o_k
    p_w = p_rows[None, :, None] + o_k
    m_row = (o_m < B)[None, :, None]
    b_acc = tl.zeros([BS, BM, p_rows.shape[0]], tl.float32)
    for k0 in range(0, K, BS * BK):
        if K % (BS * BK) == 0:
            b_x = tl.load(p_x + k0, mask=m_row, other=0.0)  # [BS, BM, BK]
            b_w = tl.load(p_w + k0)  # [BS, BN, BK]
        else:
            m_k = k0 + o_k < K
            b_x = tl.load(p_x + k0, mask=m_row & m_k, other=0.0)
            b_w = tl.load(p_w + k0, mask=m_k, other=0.0)
        b_acc = tl.dot(b_x, tl.permute(b_w, (0, 2, 1)), b_acc, input_precision=PRECISION)
    return tl.sum(b_acc, 0)


@triton.jit
def await_inputs(p_rows, K: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr):
    """Prefetch AHEAD columns of the weights, then wait for the inputs. Call it before anything else is read: see Note
    [An early start]."""
    if EARLY:
        if AHEAD:
            LINE: tl.constexpr = 128 // (p_rows.dtype.element_ty.primitive_bitwidth // 8)
            o_k = tl.minimum(tl.arange(0, AHEAD // LINE) * LINE, K - 1)
            p_lines = (p_rows[:, None] + o_k[None, :]).to(tl.int64)
            prefetch(p_lines)
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def load_squares(squares, P: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr):
    """Load the programs' sums of squares, [BP, BM]. Call it before a matmul, so that they arrive while it runs."""
    o_p, o_m = tl.arange(0, BP), tl.arange(0, BM)
    return tl.load(squares + o_p[:, None] * ROWS + o_m[None, :], mask=(o_p < P)[:, None], other=0.0)


@triton.jit
def norm_factor(b_squares, E: tl.constexpr, eps, gain):
    """The factor of each row of results, [BM]: see Note [A norm without a pass of its own]."""
    return tl.rsqrt(tl.sum(b_squares, 0) / E + eps) / gain


@triton.jit
def begin_kernel(
    tokens, embed, norm, positions, frequencies, x, scaled, squares, cos, sin, end, gain,
    E: tl.constexpr, P: tl.constexpr, PAIRS: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute a row's embedding, rotation and number of keys."""
    i = tl.program_id(0)
    position = tl.load(positions + i)
    tl.store(end + i, (position + 1).to(tl.int32))
    o_d = tl.arange(0, BD)
    b_angle = position.to(tl.float32) * tl.load(frequencies + o_d, mask=o_d < PAIRS, other=0.0)
    tl.store(cos + i * PAIRS + o_d, tl.cos(b_angle), mask=o_d < PAIRS)
    tl.store(sin + i * PAIRS + o_d, tl.sin(b_angle), mask=o_d < PAIRS)
    p_row = embed + tl.load(tokens + i).to(tl.int64) * E
    b_square = tl.zeros([BE], tl.float32)
    for e0 in range(0, E, BE):
        o_e = e0 + tl.arange(0, BE)
        b = tl.load(p_row + o_e, mask=o_e < E, other=0.0)
        b_wide = b.to(tl.float32)
        b_norm = tl.load(norm + o_e, mask=o_e < E, other=0.0).to(tl.float32) * gain
        tl.store(x + i * E + o_e, b, mask=o_e < E)
        tl.store(scaled + i * E + o_e, (b_wide * b_norm).to(scaled.dtype.element_ty), mask=o_e < E)
        b_square += b_wide * b_wide
    o_p = tl.arange(0, BP)
    tl.store(squares + o_p * ROWS + i, tl.where(o_p == 0, tl.sum(b_square, 0), 0.0), mask=o_p < P)


@triton.jit(do_not_specialize=["B", "capacity"])
def project_kernel(
    x, squares, query, key, value, cos, sin, positions, q, room, B, capacity, eps, gain,
    E: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BN / 2 pairs of columns of a query, key or value head, and rotate them (not values). Keys and values are
    written to their positions in the cache."""
    HALF: tl.constexpr = D // 2
    num_parts = tl.cdiv(HALF, BN // 2)
    i_h, i_c = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    # The two columns of a pair are neighbours.
    o = tl.arange(0, BN)
    o_d = tl.minimum(i_c * (BN // 2) + o // 2, HALF - 1) + o % 2 * HALF
    if i_h < H:
        p_head = query + i_h.to(tl.int64) * D * E
    elif i_h < H + G:
        p_head = key + (i_h - H).to(tl.int64) * D * E
    else:
        p_head = value + (i_h - H - G).to(tl.int64) * D * E
    p_rows = p_head + o_d * E
    await_inputs(p_rows, E, AHEAD, EARLY)
    b_squares = load_squares(squares, P, BP, BM, ROWS)
    o_m, o_c = tl.arange(0, BM), i_c * (BN // 2) + tl.arange(0, BN // 2)
    m = (o_m < B)[:, None] & (o_c < HALF)[None, :]
    b_cos = tl.load(cos + o_m[:, None] * HALF + o_c[None, :], mask=m, other=0.0)
    b_sin = tl.load(sin + o_m[:, None] * HALF + o_c[None, :], mask=m, other=0.0)
    b_position = tl.load(positions + o_m, mask=o_m < B, other=0)
    b = product(x, p_rows, B, E, BM, BS, BK, PRECISION)
    b *= norm_factor(b_squares, E, eps, gain)[:, None]
    b_left, b_right = tl.split(tl.reshape(b, [BM, BN // 2, 2]))
    b_first = tl.where(i_h < H + G, b_left * b_cos - b_right * b_sin, b_left)
    b_second = tl.where(i_h < H + G, b_right * b_cos + b_left * b_sin, b_right)
    if i_h < H:
        p_out = q + ((o_m * H + i_h) * D)[:, None] + o_c[None, :]
        tl.store(p_out, b_first.to(q.dtype.element_ty), mask=m)
        tl.store(p_out + HALF, b_second.to(q.dtype.element_ty), mask=m)
    else:
        i_v, i_g = (i_h - H) // G, (i_h - H) % G
        row = ((i_v * B + o_m) * G + i_g).to(tl.int64) * capacity + b_position
        p_out = room + row[:, None] * D + o_c[None, :]
        tl.store(p_out, b_first.to(room.dtype.element_ty), mask=m)
        tl.store(p_out + HALF, b_second.to(room.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["B"])
def add_kernel(
    a, weight, x, norm, scaled, squares, B, gain,
    E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
    BK: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BN columns of x + a W^T, which overwrite x, and for the next norm their `scaled` and sum of squares."""
    i = tl.program_id(0)
    o_m, o_n = tl.arange(0, BM), i * BN + tl.arange(0, BN)
    p_rows = weight + tl.minimum(o_n, E - 1).to(tl.int64) * K
    await_inputs(p_rows, K, AHEAD, EARLY)
    at, m = o_m[:, None] * E + o_n[None, :], (o_m < B)[:, None] & (o_n < E)[None, :]
    b_x = tl.load(x + at, mask=m, other=0.0)
    b_norm = tl.load(norm + o_n, mask=o_n < E, other=0.0).to(tl.float32) * gain
    b = b_x.to(tl.float32) + product(a, p_rows, B, K, BM, BS, BK, PRECISION)
    b_out = tl.where(m, b, 0.0).to(x.dtype.element_ty)
    b = b_out.to(tl.float32)
    tl.store(x + at, b_out, mask=m)
    tl.store(scaled + at, (b * b_norm[None, :]).to(scaled.dtype.element_ty), mask=m)
    tl.store(squares + i * ROWS + o_m, tl.sum(b * b, 1))


@triton.jit(do_not_specialize=["B"])
def gated_kernel(
    x, squares, gate, up, out, B, eps, gain,
    E: tl.constexpr, F: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BN / 2 columns of silu(gate) * up."""
    n0 = tl.program_id(0) * (BN // 2)
    # A column's gate and up are neighbours.
    o = tl.arange(0, BN)
    o_w = tl.minimum(n0 + o // 2, F - 1).to(tl.int64) * E
    p_rows = tl.where(o % 2 == 0, gate + o_w, up + o_w)
    await_inputs(p_rows, E, AHEAD, EARLY)
    b_squares = load_squares(squares, P, BP, BM, ROWS)
    b = product(x, p_rows, B, E, BM, BS, BK, PRECISION)
    b *= norm_factor(b_squares, E, eps, gain)[:, None]
    b_gate, b_up = tl.split(tl.reshape(b, [BM, BN // 2, 2]))
    o_m, o_n = tl.arange(0, BM), n0 + tl.arange(0, BN // 2)
    m = (o_m < B)[:, None] & (o_n < F)[None, :]
    b_out = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(out + o_m[:, None] * F + o_n[None, :], b_out.to(out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["B"])
def head_kernel(
    x, squares, weight, logits, positions, B, eps, gain,
    E: tl.constexpr, V: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BN columns of the logits. The first program adds one to the positions, which no kernel after it reads
    in this step."""
    o_m, o_n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    p_rows = weight + tl.minimum(o_n, V - 1).to(tl.int64) * E
    await_inputs(p_rows, E, AHEAD, EARLY)
    b_squares = load_squares(squares, P, BP, BM, ROWS)
    b = product(x, p_rows, B, E, BM, BS, BK, PRECISION)
    b *= norm_factor(b_squares, E, eps, gain)[:, None]
    m = (o_m < B)[:, None] & (o_n < V)[None, :]
    tl.store(logits + o_m[:, None] * V + o_n[None, :], b.to(logits.dtype.element_ty), mask=m)
    p_next = positions + o_m
    m_next = (o_m < B) & (tl.program_id(0) == 0)
    tl.store(p_next, tl.load(p_next, mask=m_next, other=0) + 1, mask=m_next)


@dataclass(frozen=True)
class Tile:
    """The output columns of a program, and the slices of its loop over K: `slices` of `depth` columns at a time."""

    columns: int
    slices: int
    depth: int
    num_warps: int
    num_stages: int
    early: bool = False
    """See Note [An early start]."""
    rows: int = MAX_ROWS
    ahead: int = 0
    """How many columns of its weights a program prefetches, if it starts early: 0, or 64 or more."""

    def constants(self, device: torch.device) -> dict[str, int | str]:
        """The compile-time arguments of a kernel that depend on its tile and the device."""
        return {
            **early_launch(self.early),
            "AHEAD": self.ahead,
            "EARLY": self.early,
            "BM": self.rows,
            "BN": self.columns,
            "BS": self.slices,
            "BK": self.depth,
            "ROWS": MAX_ROWS,
            "PRECISION": precision(device),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


TABLE = {
    "project": Tile(8, 4, 128, 4, 4, early=True, ahead=1024),
    "add": Tile(16, 4, 128, 4, 5, early=True, ahead=1024),
    "gated": Tile(32, 4, 64, 4, 3, early=True, ahead=64),
    "head": Tile(32, 4, 64, 4, 4, early=True),
}
"""Tiles of 16-bit weights, measured on an H200 in a step of the Llama-3.2-1B shape (docs/log/decode.md)."""
ONE_ROW = {
    "project": Tile(8, 4, 128, 4, 8, early=True, rows=1, ahead=1024),
    "add": Tile(16, 4, 128, 4, 8, early=True, rows=1, ahead=2048),
    "gated": Tile(64, 4, 64, 4, 4, early=True, rows=1, ahead=128),
    "head": Tile(64, 4, 64, 4, 4, rows=1),
}
"""Tiles for one row. Those of `add` have as many columns as in TABLE."""


def tile(kind: str, num_columns: int, K: int, weight: Tensor, num_rows: int = MAX_ROWS) -> Tile:
    """The tile for a kind of kernel with `num_columns` outputs from rows of length K."""
    size = (ONE_ROW if num_rows == 1 else TABLE)[kind]
    if weight.element_size() == 4:
        size = replace(size, depth=size.depth // 2)
    if is_small(weight.device):
        size = replace(size, num_stages=3)
    if not starts_early(weight.device) or is_small(weight.device):
        size = replace(size, early=False)
    while size.slices * size.depth > K and size.depth > 16:
        size = replace(size, depth=size.depth // 2)
    while kind == "add" and num_columns > MAX_PARTS * size.columns and size.columns < 64:
        size = replace(size, columns=2 * size.columns, depth=max(16, size.depth // 2))
    return size


def new_squares(weight: Tensor) -> Tensor:
    """An uninitialised tensor for the sums of squares that `add_launch` writes with a weight [E, K], for any K."""
    E, K = weight.shape
    parts = triton.cdiv(E, tile("add", E, K, weight).columns)
    return torch.zeros(parts, MAX_ROWS, dtype=torch.float32, device=weight.device)


def begin_launch(
    tokens: Tensor, embed: Tensor, norm: Tensor, positions: Tensor, frequencies: Tensor, x: Tensor, scaled: Tensor,
    squares: Tensor, cos: Tensor, sin: Tensor, end: Tensor, gain: float,
) -> Launch:  # fmt: skip
    """The launch that computes x and scaled [B, E], cos and sin [B, D / 2] and `end` (positions + 1), from tokens [B]
    at `positions` [B]."""
    E, pairs, parts = x.shape[1], len(frequencies), len(squares)
    tensors = (tokens, embed, norm, positions, frequencies, x, scaled, squares, cos, sin, end)
    constants = {
        "E": E, "P": parts, "PAIRS": pairs, "BE": min(4096, triton.next_power_of_2(E)),
        "BP": triton.next_power_of_2(parts), "BD": triton.next_power_of_2(pairs), "ROWS": MAX_ROWS, "num_warps": 8,
    }  # fmt: skip
    return Launch(begin_kernel, (len(tokens),), (*tensors, gain), constants)


def project_launch(
    scaled: Tensor, squares: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor, positions: Tensor, q: Tensor,
    room: Tensor, eps: float, gain: float, size: Tile | None = None,
) -> Launch:  # fmt: skip
    """The launch that computes q [B, H, D], and writes keys and values to room [2, B, K, capacity, D]."""
    (B, E), (H, D), (G, capacity) = scaled.shape, q.shape[1:], room.shape[2:4]
    size = size or tile("project", (H + 2 * G) * D, E, weights[0], B)
    constants = {"E": E, "H": H, "G": G, "D": D, **_parts(squares), **size.constants(scaled.device)}
    arguments = (scaled, squares, *weights, cos, sin, positions, q, room, B, capacity, eps, gain)
    return Launch(project_kernel, ((H + 2 * G) * triton.cdiv(D, size.columns),), arguments, constants)


def add_launch(
    a: Tensor, weight: Tensor, x: Tensor, norm: Tensor, scaled: Tensor, squares: Tensor, gain: float,
    size: Tile | None = None,
) -> Launch:  # fmt: skip
    """The launch of x += a W^T, for a [B, K]. It also writes `scaled` and `squares` for the next norm, of weight
    `norm`."""
    E, K = weight.shape
    size = size or tile("add", E, K, weight, len(x))
    constants = {"E": E, "K": K, **size.constants(x.device)}
    arguments = (a, weight, x, norm, scaled, squares, len(x), gain)
    return Launch(add_kernel, (triton.cdiv(E, size.columns),), arguments, constants)


def gated_launch(
    scaled: Tensor, squares: Tensor, gate: Tensor, up: Tensor, out: Tensor, eps: float, gain: float,
    size: Tile | None = None,
) -> Launch:  # fmt: skip
    """The launch that writes silu(gate) * up to out [B, F]."""
    F, E = gate.shape
    size = size or tile("gated", 2 * F, E, gate, len(out))
    constants = {"E": E, "F": F, **_parts(squares), **size.constants(out.device)}
    arguments = (scaled, squares, gate, up, out, len(out), eps, gain)
    return Launch(gated_kernel, (triton.cdiv(2 * F, size.columns),), arguments, constants)


def head_launch(
    scaled: Tensor, squares: Tensor, weight: Tensor, logits: Tensor, positions: Tensor, eps: float, gain: float,
    size: Tile | None = None,
) -> Launch:  # fmt: skip
    """The launch that computes logits [B, V] and adds one to `positions` [B]."""
    V, E = weight.shape
    size = size or tile("head", V, E, weight, len(logits))
    constants = {"E": E, "V": V, **_parts(squares), **size.constants(logits.device)}
    arguments = (scaled, squares, weight, logits, positions, len(logits), eps, gain)
    return Launch(head_kernel, (triton.cdiv(V, size.columns),), arguments, constants)


def _parts(squares: Tensor) -> dict[str, int]:
    return {"P": len(squares), "BP": triton.next_power_of_2(len(squares))}
