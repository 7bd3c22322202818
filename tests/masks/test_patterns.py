"""Predefined patterns match their definitions, and bad input to masks gets one clear error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from flashspan import attention, masks
from flashspan.kernels import reference
from flashspan.kernels.contract import Problem
from flashspan.kernels.masks import (
    CAUSAL,
    EVERYTHING,
    Band,
    Blocks,
    Mask,
    dense,
)

PATTERNS: dict[str, tuple[Callable[[], Blocks], Callable[[Tensor, Tensor], Tensor]]] = {
    "dilated": (lambda: masks.dilated(5, 3, 300), lambda i, j: ((i - j) % 3 == 0) & (i >= j) & (i - j < 15)),
    "dilated both ways": (
        lambda: masks.dilated(5, 3, 300, causal=False),
        lambda i, j: ((i - j) % 3 == 0) & ((i - j).abs() < 15),
    ),
    "streaming": (lambda: masks.streaming(4, 50, 300), lambda i, j: (i >= j) & ((j < 4) | (i - j < 50))),
    "longformer": (
        lambda: masks.longformer(300, window=20, num_global=7),
        lambda i, j: ((i - j).abs() <= 20) | (i < 7) | (j < 7),
    ),
    "longformer that is all global": (
        lambda: masks.longformer(300, window=1, num_global=10**20),
        lambda i, j: (i >= 0) & (j >= 0),
    ),
    "causal longformer": (
        lambda: masks.longformer(300, window=20, num_global=7, causal=True),
        lambda i, j: (i >= j) & ((i - j <= 20) | (i < 7) | (j < 7)),
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_their_definitions(name: str) -> None:
    make, rule = PATTERNS[name]
    i = torch.arange(300)
    assert torch.equal(make().dense(), rule(i[:, None], i[None, :]))


def test_patterns_of_blocks_hold_as_many_as_they_say() -> None:
    random = masks.random_blocks(1280, 0.3, num_heads=2)
    assert (random.rows.visits() == 3).all()
    assert bool((random.kinds().diagonal(dim1=2, dim2=3) == 1).all())
    assert random != masks.random_blocks(1280, 0.3, num_heads=2, seed=1)
    bird = masks.bigbird(1280, window=64, num_global=10, num_random=2)
    assert (bird & masks.longformer(1280, window=64, num_global=10)) == masks.longformer(1280, window=64, num_global=10)
    assert bool((bird.rows.visits()[..., 1:] <= 3 + 1 + 2).all())
    behind = masks.bigbird(1280, window=64, num_global=10, num_random=2, causal=True)
    assert not behind.dense().triu(1).any()
    more = (behind & ~masks.longformer(1280, window=64, num_global=10)).kinds()[0, 0] != 0
    assert more.sum(-1).tolist()[4:] == [row + 2 for row in more.diagonal().int().tolist()[4:]]
    q, k = torch.zeros(1, 2, 512, 4), torch.zeros(1, 1, 512, 4)
    q[..., 0], k[:, :, 256:384, 0] = 1.0, 5.0  # block 2 has the highest score for all queries
    chosen = masks.top_blocks(q, k, 2)
    kinds = chosen.kinds()[0, 1] != 0
    assert kinds.sum(-1).tolist() == [2, 2, 2, 2]
    assert kinds[:, 2].all()
    assert kinds.diagonal().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_mask_is_the_same_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    """When it is built, sliced as by ranks, and drawn at random from a seed."""

    def some() -> list[Mask]:
        mask = masks.bigbird(700, window=40, num_global=9, num_random=1) | masks.random_blocks(700, 0.3, seed=3)
        q = torch.randn(1, 1, 700, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        return [mask, ~mask, mask.slice(range(0, 700, 3), range(50, 600)), masks.top_blocks(q, q, 2)]

    want = some()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert some() == want
    finally:
        torch.set_default_dtype(before)


def test_a_block_of_its_own_is_chosen_whatever_the_scores() -> None:
    q, poisoned = torch.randn(1, 1, 600, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 1, 600, 8)
    poisoned[0, 0, 200] = torch.nan
    for k in (poisoned, q * 1e25):
        chosen = masks.top_blocks(q * 1e25, k, 1).kinds()[0, 0] != 0
        assert chosen.equal(torch.eye(5, dtype=torch.bool))


def raises(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    raise KeyError("lost")


q4 = torch.zeros(1, 4, 8, 16)


SQUARE = torch.ones(8, 8, dtype=torch.bool).tril()


PER_HEAD = Blocks.from_rule(lambda b, h, i, j: i - j >= h, 8, 8, num_heads=4)


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "not boolean": (lambda: Blocks.from_dense(torch.zeros(8, 8)), "must be bool.*float32"),
    "one dimension": (lambda: Blocks.from_dense(torch.zeros(8, dtype=torch.bool)), r"\[T, S\]"),
    "a block size no kernel takes": (lambda: Blocks.of(CAUSAL, 8, 8, block=48), "64 or 128.*block=48"),
    "not a mask": (lambda: Blocks.of("causal", 8, 8), "made by flashspan.masks: got str"),  # type: ignore[arg-type]
    "a tensor in a mask's place": (lambda: Blocks.of(q4, 8, 8), "use Blocks.from_dense"),  # type: ignore[arg-type]
    "heads it has not": (lambda: PER_HEAD.heads(range(2, 9)), r"within 0 to 4: got range\(2, 9\)"),
    "every other head": (lambda: PER_HEAD.heads(range(0, 4, 2)), "a range with step 1"),
    "a rule that raises": (lambda: Blocks.from_rule(raises, 8, 8), "it raised KeyError.*lost"),
    "a rule that counts": (
        lambda: Blocks.from_rule(lambda b, h, i, j: i - j, 8, 8),
        "returns a bool tensor: got torch.int32",
    ),
    "a rule of a shape": (
        lambda: Blocks.from_rule(lambda b, h, i, j: torch.ones(3, 8, dtype=torch.bool), 8, 8),
        r"got \(3, 8\)",
    ),
    "a rule that says something of each query, or of each key": (
        lambda: Blocks.from_rule(lambda b, h, i, j: (i >= 4).squeeze(), 8, 8),
        r"got \(8,\); do not reshape i \[queries, 1\]",
    ),
    "a tensor for three of two sequences": (
        lambda: attention(*[torch.zeros(2, 4, 8, 16)] * 3, mask=torch.ones(3, 8, 8, dtype=torch.bool)),
        r"\[2, 4, T, S\]: got \(3, 8, 8\); use one mask",
    ),
    "a rule elsewhere": (lambda: Blocks.from_rule(lambda b, h, i, j: (i > j).to("meta"), 8, 8), "result on meta"),
    "a coarse mask of another size": (
        lambda: Blocks.from_coarse(torch.ones(2, 2, dtype=torch.bool), 300, 300),
        r"\[3, 3\].*got torch.bool \(2, 2\)",
    ),
    "other lengths": (lambda: attention(q4, q4, q4, mask=Blocks.of(CAUSAL, 9, 8)), "9 queries and 8 keys"),
    "other heads": (
        lambda: attention(q4, q4, q4, mask=Blocks.from_dense(torch.rand(3, 8, 8) < 0.5)),
        "for 3 heads.*4 heads",
    ),
    "two lengths": (lambda: Blocks.of(CAUSAL, 8, 8) & Blocks.of(CAUSAL, 9, 9), "same lengths"),
    "two tile sizes": (lambda: Blocks.of(CAUSAL, 8, 8) | Blocks.of(CAUSAL, 8, 8, block=64), "same tiles"),
    "a pattern and another tile size": (
        lambda: masks.streaming(1, 2, 8) | Blocks.of(CAUSAL, 8, 8, block=64),
        r"block=128, as patterns are, or rebuild one by Blocks.from_dense\(mask.dense\(\)\)",
    ),
    "maps that do not broadcast": (
        lambda: Blocks.from_dense(torch.rand(2, 8, 8) < 0.5) & Blocks.from_dense(torch.rand(3, 8, 8) < 0.5),
        "maps broadcast",
    ),
    "two batches": (
        lambda: masks.ragged([3, 8], 8, 8) & masks.ragged([3, 8, 1], 8, 8),
        "same batch.*2x8 queries.*3x8",
    ),
    "a block size that is no number": (lambda: Blocks.of(CAUSAL, 8, 8, block=None), "64 or 128.*block=None"),
    "fewer tokens than none": (
        lambda: masks.longformer(-1, window=1, num_global=1),
        "num_tokens is .* 0 or more: got -1",
    ),
    "random blocks of nothing": (lambda: masks.random_blocks(8, 0.5, size=0), "size is .* or more: got 0"),
    "fewer random blocks than none": (
        lambda: masks.bigbird(8, window=1, num_global=1, num_random=-1),
        "num_random is .* 0 or more: got -1",
    ),
    "keys of another batch": (
        lambda: masks.top_blocks(q4, torch.zeros(2, 4, 8, 16), 1),
        r"got q \(1, 4, 8, 16\), k \(2, 4, 8, 16\)",
    ),
    "no block kept": (lambda: masks.top_blocks(q4, q4, 0), "keep is .* 1 or more: got 0"),
    "half a block kept": (lambda: masks.top_blocks(q4, q4, 1.5), "keep is a whole number.*got 1.5"),  # type: ignore[arg-type]
    "half a key": (lambda: masks.dilated(1.5, 1, 8), "width is a whole number.*got 1.5"),  # type: ignore[arg-type]
    "a share that is a word": (lambda: masks.random_blocks(8, "x"), "0 < share <= 1.*share='x'"),  # type: ignore[arg-type]
    "a share for each head": (lambda: masks.random_blocks(8, SQUARE), "0 < share <= 1.*share=tensor"),  # type: ignore[arg-type]
    "blocks chosen by a list": (lambda: masks.top_blocks(q4, [1], 1), r"q \(1, 4, 8, 16\), k list"),  # type: ignore[arg-type]
    "a bound for each query": (lambda: masks.causal(torch.arange(2)), r"whole numbers or None: got hi=tensor"),  # type: ignore[arg-type]
    "a seed too long": (lambda: masks.random_blocks(8, 0.5, seed=2**70), "a seed of 64 bits.*seed=1180"),
    "a block size with a point": (lambda: Blocks.of(CAUSAL, 8, 8, block=128.0), r"block=128\.0"),  # type: ignore[arg-type]
    "squares of nothing": (
        lambda: Blocks.from_coarse(PER_HEAD.grid() > 0, 8, 8, size=0),
        "size is .* 1 or more: got 0",
    ),
    "squares of three sides": (
        lambda: Blocks.from_coarse(PER_HEAD.grid() > 0, 8, 8, size=(8, 8, 8)),  # type: ignore[arg-type]
        r"got size=\(8, 8, 8\)",
    ),
    "fewer queries than none": (lambda: Blocks.of(CAUSAL, -1, 8), "num_queries is .* 0 or more: got -1"),
    "a list": (lambda: Blocks.from_dense([[True]]), "got list; use torch.as_tensor"),  # type: ignore[arg-type]
    "a mask without values": (
        lambda: Blocks.from_dense(torch.ones(8, 8, dtype=torch.bool, device="meta")),
        "got torch.strided on meta",
    ),
    "a sparse tensor": (lambda: attention(q4, q4, q4, mask=SQUARE.to_sparse()), "dense.*: got torch.sparse_coo"),
    "a sparse map": (lambda: Blocks.from_dense(SQUARE.to_sparse()), "dense.*: got torch.sparse_coo"),
    "a sparse coarse mask": (
        lambda: Blocks.from_coarse(SQUARE.to_sparse(), 1024, 1024),
        "dense.*: got torch.sparse_coo.*use mask.to_dense",
    ),
    "a coarse mask without values": (
        lambda: Blocks.from_coarse(SQUARE.to("meta"), 1024, 1024),
        "dense.*: got torch.strided on meta",
    ),
    "a rule that is sparse": (
        lambda: Blocks.from_rule(lambda b, h, i, j: (i >= j).to_sparse(), 8, 8),
        "dense.*: got torch.sparse_coo; use .to_dense",
    ),
    "an array": (lambda: attention(q4, q4, q4, mask=SQUARE.numpy()), "got ndarray; use torch.as_tensor"),  # type: ignore[call-overload]
    "a list in a tensor's place": (
        lambda: attention(q4, q4, q4, mask=SQUARE.tolist()),  # type: ignore[call-overload]
        "got list; use torch.as_tensor",
    ),
    "a rule in a mask's place": (
        lambda: attention(q4, q4, q4, mask=raises),  # type: ignore[call-overload]
        "got function; use masks.Blocks.from_rule",
    ),
    "top blocks of two edges": (
        lambda: masks.top_blocks(q4, q4, 1, block=(64, 128)),  # type: ignore[arg-type]
        r"square blocks: got block=\(64, 128\); use block=64",
    ),
    "a rule that is a tensor": (lambda: Blocks.from_rule(q4, 8, 8), "got Tensor.*from_dense"),  # type: ignore[arg-type]
    "a slice past the end": (lambda: PER_HEAD.slice(range(5, 9), range(8)), r"0 to 7: got range\(5, 9\)"),
    "a slice before the start": (lambda: PER_HEAD.slice(range(8), range(-2, 3)), r"0 to 7: got range\(-2, 3\)"),
    "rows sliced past the end": (lambda: masks.documents([4, 4]).slice(range(8), range(9)), "0 to 7: got"),
    "a slice by a tensor": (lambda: PER_HEAD.slice(q4, range(8)), "by a range"),  # type: ignore[arg-type]
    "no picture": (lambda: PER_HEAD.draw(0), "width is a whole number, 1 or more: got 0"),
    "a picture as wide as a word": (lambda: PER_HEAD.draw("x"), "width is a whole number, 1 or more: got 'x'"),  # type: ignore[arg-type]
    "bands of no length": (lambda: Band(0, 1) | Band(5, 6), "which needs lengths"),
    "the fused CPU kernel": (
        lambda: attention(q4, q4, q4, mask=masks.streaming(1, 2, 8), backend="cpu"),
        "not block maps",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_error(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_nothing_in_gives_nothing_out() -> None:
    for T, S in ((0, 5), (5, 0)):
        mask = Blocks.of(EVERYTHING, T, S)
        q, k = torch.randn(1, 1, T, 8), torch.randn(1, 1, S, 8)
        assert not attention(q, k, k, mask=mask).any()
        assert mask.dense().shape == (T, S)
        assert reference.forward(q, k, k, Problem(mask, 1.0)).lse.shape == (1, 1, T)


def test_a_whole_number_may_be_of_numpy_or_a_tensor() -> None:
    for one, n in ((np.uint8(1), np.int64(300)), (torch.tensor(1), torch.tensor(300))):
        assert masks.window(one) == Band(-1, 1)
        assert masks.prefix(one, n) == masks.prefix(1, 300)
        assert masks.dilated(one, one, n) == masks.dilated(1, 1, 300)
        assert masks.longformer(n, window=one, num_global=one) == masks.longformer(300, window=1, num_global=1)
        assert Blocks.of(CAUSAL, n, n) == Blocks.of(CAUSAL, 300, 300)


def test_a_dilated_window_wider_than_32_bits_is_one_over_all_tokens() -> None:
    wide, all_of_it = masks.dilated(10**6, 10**6, 50), masks.dilated(50, 50, 50)
    assert torch.equal(dense(wide, 50, 50), torch.eye(50, dtype=torch.bool))
    assert torch.equal(dense(masks.dilated(10**6, 7, 50), 50, 50), dense(masks.dilated(8, 7, 50), 50, 50))
    assert torch.equal(dense(all_of_it, 50, 50), dense(wide, 50, 50))
