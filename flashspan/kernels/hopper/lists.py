"""The launch of the forward kernel for Hopper for a block map (`Blocks`): its lists and bits become arguments."""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashspan.kernels.hopper.forward import forward_kernel
from flashspan.kernels.hopper.repair import MARK_ROWS
from flashspan.kernels.hopper.tensors import block_dim, describe, key_heads_for_queries, multiprocessors
from flashspan.kernels.hopper.tiles import FORWARD, warps
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.masks import Blocks
from flashspan.kernels.portable.arguments import LOG2E
from flashspan.kernels.portable.loops import maps

BLOCK = (128, 128)
"""The only size of blocks that these kernels support: 64 rows for each of two warpgroups."""

WORDS = 256
"""The number of words of bits that the copy engine loads at a time, for one warpgroup: 64 lines of 128 bits."""


def refusal(block: tuple[int, int], head_dim: int) -> str | None:
    """The reason why block maps with these blocks and heads are refused; None if they are not."""
    if FORWARD[block_dim(head_dim)].block_k != BLOCK[1]:
        return f"supports block maps up to head size 128, not {head_dim}"
    return None if block == BLOCK else f"supports block maps of 128 x 128, not {block[0]} x {block[1]}"


def lists_forward_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bad: Tensor,
    mask: Blocks,
    scale: float,
    carry: bool,
    counter: Tensor,
) -> Launch:
    """The launch of the forward kernel for a block map."""
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    wide, group = block_dim(D), H // K
    tile, lines, chip = FORWARD[wide], mask.rows.spans.shape[2], multiprocessors(q.device)
    section = key_heads_for_queries(q, k, lines)
    return Launch(
        forward_kernel,
        (min(lines * B * H, chip),),
        (
            describe(q, 1, 1, 64, wide), describe(k, 1, 1, 128, wide), describe(v, 1, 1, 128, wide),
            describe(out, 1, 1, 64, wide * 2 // out.itemsize), describe_bits(mask.bits, mask), q, k, v, out, lse, bad,
            None, None, *mask.rows.tensors, counter, *(step // 8 for step in out.stride()[:3]), None,
            *maps(mask, mask.rows), H, group, T, S, None, None, scale * LOG2E, B * H, section * group, lines * B * H,
        ),
        {
            "HEAD_DIM": D, "STAGES": tile.stages, "Q_STAGES": 2, "HIDDEN_SIDES": 2, "TABLE": False, "BLOCK_MAP": True,
            "CARRY": carry, "REPAIR": MARK_ROWS.value, "UNIT_SCALE": False, **warps(2),
        },
    )  # fmt: skip


def describe_bits(bits: Tensor, mask: Blocks) -> TensorDescriptor:
    """A descriptor of bits [tiles, 128, 4] as one row of words. If there are no bits, it describes another tensor."""
    words = bits if bits.numel() else mask.rows.spans
    layout = gl.NVMMASharedLayout.get_default_for([WORDS], gl.int32)
    return TensorDescriptor(words, [words.numel()], [1], [WORDS], layout)
