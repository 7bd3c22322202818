"""The launches of the Hopper kernels for a block map (`Blocks`): its lists and bits become arguments."""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashspan.kernels.hopper.backward import lists_backward_kernel
from flashspan.kernels.hopper.forward import lists_forward_kernel
from flashspan.kernels.hopper.tensors import (
    BackwardInputs,
    block_dim,
    describe,
    describe_sums,
    key_heads_for_keys,
    key_heads_for_queries,
    multiprocessors,
)
from flashspan.kernels.hopper.tiles import BACKWARD, FORWARD, WARPS, dq_turns
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.masks import Blocks
from flashspan.kernels.portable.arguments import LOG2E
from flashspan.kernels.portable.sparse import maps

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
        lists_forward_kernel,
        (min(lines * B * H, chip),),
        (
            describe(q, 1, 1, 64, wide), describe(k, 1, 1, 128, wide), describe(v, 1, 1, 128, wide),
            describe(out, 1, 1, 64, wide * 2 // out.itemsize), _describe_bits(mask.bits, mask), out, lse, bad,
            *mask.rows.tensors, counter, *(step // 8 for step in out.stride()[:3]), *maps(mask, mask.rows), H, group,
            T, S, scale * LOG2E, B * H, section * group, lines * B * H,
        ),
        {
            "HEAD_DIM": D, "STAGES": tile.stages, "CARRY": carry, **WARPS,
        },
    )  # fmt: skip


def lists_backward_launch(given: BackwardInputs) -> Launch:
    """The launch of the one-pass backward kernel for a block map."""
    dout, q, k, v, minus_lse, minus_delta, mask, scale, sums, dk, dv, accumulate, states, counter = given
    assert isinstance(mask, Blocks)
    assert sums is not None
    B, H, T, D = q.shape
    K, S = dk.shape[1], k.shape[2]
    wide, lines, chip = block_dim(D), mask.columns.spans.shape[2], multiprocessors(q.device)
    tile = BACKWARD[wide]
    section = key_heads_for_keys(q, dk, lines)
    return Launch(
        lists_backward_kernel,
        (min(lines * B * K, chip),),
        (
            describe(q, 1, 1, tile.block_q, wide), describe(dout, 1, 1, tile.block_q, wide),
            describe(k, 1, 1, 64, wide), describe(v, 1, 1, 64, wide),
            describe_sums(sums, accumulate, tile.block_q, wide),
            *(describe(x, 1, 1, 64, wide * 2 // x.itemsize) for x in (dk, dv)),
            *(describe(x, tile.block_q, *x.shape[1:]) for x in (minus_lse, minus_delta)),
            _describe_bits(mask.bits_t, mask), states, *mask.columns.tensors,
            counter, *maps(mask, mask.columns), H, K, H // K, T, S, len(minus_lse) // (B * H), scale * LOG2E, scale,
            section, lines * B * K,
        ),
        {
            "STAGES": 2, "ACCUMULATE": accumulate, "FIRST_STORES": not accumulate, "SPLIT_HEADS": k.shape[1] < K,
            "WHOLE_DQ_STAGES": dq_turns(2, wide, True), **WARPS,
        },
    )  # fmt: skip


def _describe_bits(bits: Tensor, mask: Blocks) -> TensorDescriptor:
    """A descriptor of bits [tiles, 128, 4] as one row of words. If there are no bits, it describes another tensor."""
    words = bits if bits.numel() else mask.rows.spans
    layout = gl.NVMMASharedLayout.get_default_for([WORDS], gl.int32)
    return TensorDescriptor(words, [words.numel()], [1], [WORDS], layout)
