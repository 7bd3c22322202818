"""Block maps: their contents for any mask, composition and slices, and attention with 300 random maps."""

from __future__ import annotations

import math
import operator
import pickle

import pytest
import torch
from torch import Tensor

from flashspan import attention, explain, masks
from flashspan.kernels.masks import (
    CAUSAL,
    EVERYTHING,
    NOTHING,
    Band,
    Blocks,
    Rows,
    bits,
    count,
    dense,
    unpack,
)
from flashspan.kernels.masks.block_map import check_block
from tests.kernels.cases import FORWARD_BOUND, GRADIENT_BOUND, relative
from tests.kernels.masks.cases import EDGES, lift, random_mask


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Textbook attention in the inputs' dtype: out and lse. A row that sees no key has 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -torch.inf)
    probs = torch.softmax(scores, -1).masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return probs @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("part", [0, 1, 2, *(pytest.param(x, marks=pytest.mark.slow) for x in (3, 4, 5))])
def test_300_random_masks_give_what_the_textbook_does(part: int) -> None:
    """`attention` in float32 with the mask as a tensor: forward is within 1e-6 of float64, gradients within 1e-5."""
    for number in range(50 * part, 50 * part + 50):
        visible = random_mask(number)
        random = torch.Generator().manual_seed(number)
        (T, S), (H, K) = visible.shape[-2:], ((2, 2), (2, 1))[number % 2]
        shapes = [(2, H, T, 8), (2, K, S, 8), (2, K, S, 8), (2, H, T, 8)]
        q, k, v, dout = (torch.randn(shape, generator=random) for shape in shapes)
        leaves, exact = (
            [x.clone().to(kind).requires_grad_() for x in (q, k, v)] for kind in (torch.float, torch.double)
        )
        # [B, H, T, S] is unambiguous if B and H are both 2.
        out, lse = attention(*leaves, mask=Blocks.from_dense(visible, block=EDGES[number % 4]), return_lse=True)
        want, want_lse = softmax_attention(*exact, lift(visible))
        grads = torch.autograd.grad(out, leaves, dout)
        right = torch.autograd.grad(want, exact, dout.double())
        assert relative(out.detach(), want.detach()) <= FORWARD_BOUND, number
        assert torch.equal(lse.isfinite(), want_lse.isfinite()), number
        for grad, wanted in zip(grads, right, strict=True):
            assert relative(grad, wanted, right[2]) <= GRADIENT_BOUND, number


def test_a_map_says_what_the_mask_says() -> None:
    """Drawn, counted, listed both ways, and packed for an operator."""
    for number in range(40):
        visible = random_mask(number)
        mask = Blocks.from_dense(visible, block=EDGES[number % 4])
        assert torch.equal(lift(mask.dense()), lift(visible))
        assert mask.count() == count(mask, 0, 0) == int(visible.sum())
        assert mask.is_empty() == (not visible.any())
        kinds = mask.kinds()
        for lists, grid in ((mask.rows, kinds), (mask.columns, kinds.transpose(2, 3))):
            for spans, line in zip(lists.spans.view(-1, 3).tolist(), grid.flatten(0, 2), strict=True):
                begin, middle, end = spans
                assert lists.index[begin:middle].tolist() == (line == 1).nonzero().flatten().tolist()
                assert lists.index[middle:end].tolist() == (line == 2).nonzero().flatten().tolist()
            visits = lists.visits().gather(-1, lists.order.long())
            assert bool((visits.diff() <= 0).all())
        again = unpack(*mask.pack())
        assert again == mask
        assert hash(again) == hash(mask)
        assert torch.equal(bits.transpose(mask.bits_t), mask.bits)
    assert Blocks.from_dense(torch.eye(64, dtype=torch.bool)) != Blocks.of(EVERYTHING, 64, 64)
    assert pickle.loads(pickle.dumps(mask)) == mask


def test_a_picture_shows_what_is_visible() -> None:
    """Also at the ends, where a tile has fewer pairs, and with several tiles per character."""
    for number in range(24):
        visible, block = random_mask(number), check_block(EDGES[number % 4])
        first, picture = lift(visible)[0, 0], Blocks.from_dense(visible, block=block).draw(1 + number % 3).split("\n")
        step = -(-max(-(-n // b) for n, b in zip(first.shape, block, strict=True)) // (1 + number % 3))
        rows = [row.split(step * block[1], 1) for row in first.split(step * block[0])]
        assert picture == ["".join("#" if x.all() else "+" if x.any() else "." for x in row) for row in rows]


def test_a_mask_may_lie_anywhere_in_memory() -> None:
    flat = torch.rand(3 + 200 * 256) < 0.5
    for visible in (
        flat[3 : 3 + 128 * 128].view(128, 128),
        flat[3:].view(200, 256)[:, 1:129],
        flat[3:].view(256, 200).T,
    ):
        assert torch.equal(Blocks.from_dense(visible).dense(), visible)


def test_masks_compose() -> None:
    for number in range(20):
        visible = random_mask(number)
        T, S = visible.shape[-2:]
        first, other = Blocks.from_dense(visible), torch.rand(T, S) < 0.4
        band, rows = Band(-T // 3, S // 4), Rows(torch.randint(0, S, (T,)), torch.randint(0, S, (T,)), S)
        for mask, drawn in ((Blocks.from_dense(other), other), (band, dense(band, T, S)), (rows, dense(rows, T, S))):
            for one, two in ((first, mask), (mask, first)):
                assert torch.equal(lift((one & two).dense()), lift(visible) & drawn)
                assert torch.equal(lift((one | two).dense()), lift(visible) | drawn)
        assert torch.equal(lift((~first).dense()), ~lift(visible))
        assert torch.equal((~rows).dense(), ~dense(rows, T, S))


def test_rows_take_the_tiles_of_blocks() -> None:
    """In either order: rows have no tile size of their own."""
    visible, rows = torch.rand(70, 90) < 0.3, Rows(torch.arange(70), torch.arange(70) + 5, 90)
    blocks = Blocks.from_dense(visible, block=64)
    for joined in (rows | blocks, blocks | rows):
        assert joined.block == (64, 64)
        assert torch.equal(joined.dense(), visible | dense(rows, 70, 90))


@pytest.mark.parametrize("band", [CAUSAL, Band(3, None), Band(None, -4), EVERYTHING, NOTHING, Band(-4, 3)], ids=str)
def test_a_band_with_a_bound_has_an_opposite(band: Band) -> None:
    if None not in (band.lo, band.hi) and band != NOTHING:
        with pytest.raises(ValueError, match="which needs lengths"):
            _ = ~band
        return
    assert torch.equal(dense(~band, 9, 7), ~dense(band, 9, 7))


def test_masks_join_only_masks() -> None:
    tensor, blocks = torch.ones(8, 8, dtype=torch.bool), Blocks.of(CAUSAL, 8, 8)
    for one, two in ((blocks, tensor), (tensor, blocks), (blocks, 3)):
        with pytest.raises(TypeError, match="unsupported operand"):
            one & two
    for mask in (blocks, CAUSAL, masks.documents([8])):
        for one, two in ((mask, None), (None, mask), (mask, 3), (3, mask)):
            with pytest.raises(TypeError, match="unsupported operand"):
                one & two
            with pytest.raises(TypeError, match="unsupported operand"):
                one | two
        for join in (operator.and_, operator.or_):
            with pytest.raises(TypeError, match=r"got a tensor \(8, 8\) of torch.bool; use Blocks.from_dense"):
                join(mask, tensor)
            with pytest.raises(TypeError, match=r"got a tensor \(8, 8\) of torch.bool; use Blocks.from_dense"):
                join(tensor, mask)


def test_a_slice_is_what_its_positions_say() -> None:
    for number in range(30):
        visible = random_mask(number)
        T, S = visible.shape[-2:]
        q, k = [range(T // 5, T // 2), range(T // 2, T, 3)], range(number % 2, S, 1 + number % 3)
        rows, keys = torch.tensor([*q[0], *q[1]], dtype=torch.long), torch.tensor([*k], dtype=torch.long)
        part = Blocks.from_dense(visible, block=64).slice(q, k)
        want = lift(visible)[:, :, rows][..., keys]
        assert torch.equal(lift(dense(part, len(rows), len(keys))).expand_as(want), want)
    whole = Blocks.of(Band(-200, 0), 400, 400)
    assert whole.slice(range(300, 400), range(100)) is NOTHING
    assert whole.slice(range(300, 400), range(200, 300)) is EVERYTHING


RULE = {
    "causal": (lambda b, h, i, j: i >= j, 1, 1),
    "by head": (lambda b, h, i, j: (i - j) % (h + 2) == 0, 1, 3),
    "by sequence": (lambda b, h, i, j: (j < 50 * (b + 1)) & (i >= 0), 2, 1),
    "a lookup": (lambda b, h, i, j: TABLE[i] == TABLE[j], 1, 1),
    "one row": (lambda b, h, i, j: j % 2 == 0, 1, 1),
}


TABLE = torch.randint(0, 4, (200,))


@pytest.mark.parametrize("name", RULE)
def test_a_rule_is_the_mask_it_draws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if few tiles are processed at a time."""
    rule, B, H = RULE[name]
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (B, H, 150, 200)), indexing="ij")
    want = Blocks.from_dense(rule(b, h, i, j))
    for chunk in (2**25, 2**14, 1):
        monkeypatch.setattr(bits, "CHUNK", chunk)
        assert Blocks.from_rule(rule, 150, 200, num_batch=B, num_heads=H) == want


@pytest.mark.parametrize("size", [128, 256, 10, (64, 128)])
def test_a_coarse_mask_is_its_squares(size: int | tuple[int, int]) -> None:
    size_q, size_k = size if isinstance(size, tuple) else (size, size)
    coarse = torch.rand(2, -(-300 // size_q), -(-500 // size_k)) < 0.5
    want = coarse.repeat_interleave(size_q, 1).repeat_interleave(size_k, 2)[:, :300, :500]
    assert torch.equal(Blocks.from_coarse(coarse, 300, 500, size=size).dense()[0], want)


def test_what_is_the_same_is_kept_once() -> None:
    """Expanded dimensions give one map, a diagonal shares one tile of bits, and a window takes memory linear in T."""
    wide = torch.ones(700, 700, dtype=torch.bool).tril().expand(3, 5, 700, 700)
    assert (Blocks.from_dense(wide).num_batch, Blocks.from_dense(wide).num_heads) == (1, 1)
    sizes = [Blocks.of(Band(-1023, 0), n, n) for n in (8192, 32768)]
    assert [len(mask.bits) for mask in sizes] == [2, 2]
    assert sizes[1].num_bytes < 4.5 * sizes[0].num_bytes
    assert sizes[1].num_bytes < 200_000
    assert sizes[0].sparsity == pytest.approx(1 - (9 * 64 - 36) / 64**2)


def test_long_lines_come_first() -> None:
    mask = masks.longformer(4096, window=128, num_global=64)
    assert mask.rows.order[0, 0, 0] == 0
    assert mask.rows.num_long == mask.columns.num_long == 1
    assert Blocks.of(Band(-500, 0), 4096, 4096).rows.num_long == 0


def test_gradcheck() -> None:
    visible = torch.rand(1, 2, 9, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    visible[..., 3, :] = False
    mask = Blocks.from_dense(visible)
    leaves = [torch.randn(1, h, n, 4, dtype=torch.float64, requires_grad=True) for h, n in ((2, 9), (1, 7), (1, 7))]
    for backend in ("reference", "tiled"):
        assert torch.autograd.gradcheck(lambda *x, name=backend: attention(*x, mask=mask, backend=name), leaves)


def test_dropout_does_not_depend_on_who_computes() -> None:
    visible = torch.rand(2, 2, 70, 90) < 0.5
    mask = Blocks.from_dense(visible, block=64)
    q, k, v = (torch.randn(2, h, n, 8) for h, n in ((2, 70), (1, 90), (1, 90)))
    outs = [attention(q, k, v, mask=mask, dropout=0.4, seed=3, backend=name) for name in ("tiled", "reference")]
    assert relative(*outs) < 1e-6


def test_bool_tensors_of_any_pattern() -> None:
    q, k, v = (torch.randn(3, 2, 70, 8) for _ in range(3))
    for shape in ((70, 70), (3, 70, 70), (2, 70, 70), (3, 1, 70, 70), (3, 2, 70, 70), (1, 70, 70)):
        visible = torch.rand(shape) < 0.5
        full = visible[:, None] if visible.dim() == 3 and len(visible) == 3 else visible
        want, _ = softmax_attention(q.double(), k.double(), v.double(), lift(full))
        assert relative(attention(q, k, v, mask=visible), want) <= FORWARD_BOUND
        causal, _ = softmax_attention(q.double(), k.double(), v.double(), lift(full) & dense(CAUSAL, 70, 70))
        assert relative(attention(q, k, v, mask=visible, causal=True), causal) <= FORWARD_BOUND
    assert "tiled computes" in str(explain(q, k, v, mask=visible))
    runs = torch.ones(70, 70, dtype=torch.bool).tril()
    for visible in (runs, runs.expand(3, 2, 70, 70)):
        assert "cpu computes" in str(explain(q, k, v, mask=visible))


def test_padding_masks_broadcast_over_queries_or_keys() -> None:
    """[B, 1, 1, S] states which keys exist, as in PyTorch's SDPA; [T, 1] states which queries exist."""
    q, k, v = (torch.randn(3, 2, n, 8) for n in (70, 65, 65))
    for shape in ((3, 1, 1, 65), (1, 2, 1, 65), (3, 1, 65), (1, 65), (70, 1), (3, 2, 70, 1), (1, 1)):
        for visible in (torch.rand(shape) < 0.6, (torch.rand(*shape[:-1], 1) * shape[-1] > torch.arange(shape[-1]))):
            full = lift(visible[:, None] if visible.dim() == 3 else visible).expand(-1, -1, 70, 65)
            want, _ = softmax_attention(q.double(), k.double(), v.double(), full)
            assert relative(attention(q, k, v, mask=visible), want) <= FORWARD_BOUND


def test_compiles_into_one_graph() -> None:
    mask = masks.streaming(4, 20, 70)
    q, k, v = (torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    ours, eager = (f(q, k, v, mask=mask) for f in (compiled, attention))
    assert torch.equal(ours, eager)
    dout = torch.randn(ours.shape)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (ours, eager)), strict=True):
        assert torch.equal(a, b)


def test_what_a_map_made_with_tables_is_not_kept() -> None:
    mask = masks.random_blocks(256, 0.5)
    for length in range(1, 30):
        mask & masks.documents([length, 256 - length])
    assert not mask._derived
    assert mask & masks.causal() is mask & masks.causal(), "every layer asks for this one"


def test_a_picture_of_no_map_is_empty() -> None:
    assert Blocks.from_dense(torch.ones(1, 0, 5, 7, dtype=torch.bool)).draw() == ""
