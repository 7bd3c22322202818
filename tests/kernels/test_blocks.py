"""Block maps: what they say of any mask, how they compose and slice, and attention under 300 random ones."""

from __future__ import annotations

import math
import operator
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from flashspan import attention, explain, masks
from flashspan.kernels import bits, making, reference
from flashspan.kernels.blocks import Blocks
from flashspan.kernels.masks import CAUSAL, EVERYTHING, NOTHING, Band, Mask, Rows, count, dense, unpack
from flashspan.kernels.portable import mapping
from flashspan.kernels.portable.runs import find_runs as find_runs_by_kernels
from flashspan.kernels.tiling import check_block, find_runs
from tests.kernels.cases import FORWARD_BOUND, GRADIENT_BOUND, relative

LENGTHS = (1, 63, 64, 65, 100, 128, 150, 200)
EDGES = (64, 128, (64, 128), (128, 64))


def random_mask(number: int, heads: int = 2) -> Tensor:
    """bool [T, S], [H, T, S] or [B, H, T, S]: any density, with empty rows, empty and full squares."""
    random = torch.Generator().manual_seed(number)

    def pick(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=random))

    T, S = LENGTHS[pick(len(LENGTHS))], LENGTHS[pick(len(LENGTHS))]
    lead = ((), (heads,), (2, 1), (2, heads), (1, heads))[pick(5)]
    visible = torch.rand(*lead, T, S, generator=random) < (0.0, 0.01, 0.3, 0.9, 1.0)[pick(5)]
    if pick(2):
        visible[..., : T // 2, :] = False
    if pick(2):
        visible[..., T // 3 :, : S // 2] = bool(pick(2))
    if pick(3) == 0:
        visible = visible & torch.ones(T, S, dtype=torch.bool).tril(pick(S + T) - T)
    return visible


def lift(visible: Tensor) -> Tensor:
    return visible[(None,) * (4 - visible.dim())]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The textbook, in the inputs' dtype: out and lse; a row that sees nothing has 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -torch.inf)
    probs = torch.softmax(scores, -1).masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return probs @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("part", range(6))
def test_300_random_masks_give_what_the_textbook_does(part: int) -> None:
    """Forward within 1e-6, gradients within 1e-5 of float64, of `attention` on float32 and the mask as a tensor."""
    for number in range(50 * part, 50 * part + 50):
        visible = random_mask(number)
        random = torch.Generator().manual_seed(number)
        (T, S), (H, K) = visible.shape[-2:], ((2, 2), (2, 1))[number % 2]
        shapes = [(2, H, T, 8), (2, K, S, 8), (2, K, S, 8), (2, H, T, 8)]
        q, k, v, dout = (torch.randn(shape, generator=random) for shape in shapes)
        leaves, exact = (
            [x.clone().to(kind).requires_grad_() for x in (q, k, v)] for kind in (torch.float, torch.double)
        )
        # [B, H, T, S] says which is which where B and H are both 2.
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
    """Also at the ends, where a tile has fewer pairs; several tiles to a character."""
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


KERNELS_ON = "cuda" if torch.cuda.is_available() else "cpu"
"""Where Triton's kernels run; without a GPU, in its interpreter."""


def map_by_kernels(visible: Tensor, block: tuple[int, int]) -> Blocks | None:
    # Moved as it lies: .to() alone may lay it out anew.
    memory = visible.as_strided((visible.untyped_storage().nbytes(),), (1,), 0).to(KERNELS_ON)
    there = memory.as_strided(visible.shape, visible.stride(), visible.storage_offset())
    made = mapping.map_dense(making.check_dense(there), block)
    return None if made is None else Blocks(*visible.shape[-2:], block, *made).to("cpu")


def same_to_the_bit(one: Blocks, two: Blocks) -> bool:
    """Lists, bits both ways and their order, not only what they mean."""
    (_, numbers, tensors), (_, wanted, right) = one.pack(), two.pack()
    pairs = zip(tensors, right, strict=True)
    return numbers == wanted and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("numbers", [range(24), pytest.param(range(24, 40), marks=pytest.mark.slow)])
def test_kernels_make_the_same_map_to_the_bit(numbers: range) -> None:
    """As PyTorch's operators do, of a tensor on the CPU."""
    for number in numbers:
        visible, block = random_mask(number), check_block(EDGES[number % 4])
        made = map_by_kernels(visible, block)
        assert made is not None
        assert same_to_the_bit(made, Blocks.from_dense(visible, block=block)), number


FLAT = torch.rand(3 + 2 * 200 * 256, generator=torch.Generator().manual_seed(0)) < 0.5
DENSE: dict[str, Tensor] = {
    "begins off a word": FLAT[3 : 3 + 128 * 128].view(128, 128),
    "begins on a word": FLAT[4 : 4 + 128 * 128].view(128, 128),
    "columns of a wider one": FLAT[: 200 * 256].view(200, 256)[:, 4:132],
    "odd columns of a wider one": FLAT[: 200 * 256].view(200, 256)[:, 1:129],
    "every other column": FLAT[: 200 * 256].view(200, 256)[:, ::2],
    "transposed": FLAT[: 200 * 256].view(256, 200).T,
    "heads between queries": FLAT[: 2 * 200 * 256].view(200, 2, 256).transpose(0, 1),
    "one row for all queries": FLAT[None, :100].expand(150, 100),
    "one column for all keys": FLAT[:150, None].expand(150, 100),
    "one map for all heads": FLAT[: 70 * 90].view(70, 90).expand(2, 3, 70, 90),
    "one map for the batch, by head": FLAT[: 3 * 70 * 92].view(3, 70, 92).expand(2, 3, 70, 92),
    "all empty": torch.zeros(2, 128, 256, dtype=torch.bool),
    "all full": torch.ones(2, 128, 256, dtype=torch.bool),
    "all full, ragged": torch.ones(100, 300, dtype=torch.bool),
    "tiles that are the same": torch.ones(700, 700, dtype=torch.bool).tril(),
    "one pair": torch.ones(1, 1, dtype=torch.bool),
}


@pytest.mark.parametrize("name", DENSE)
def test_kernels_read_a_mask_wherever_it_lies(name: str) -> None:
    for block in ((128, 128), (64, 64)):
        made = map_by_kernels(DENSE[name], block)
        assert made is not None
        assert same_to_the_bit(made, Blocks.from_dense(DENSE[name], block=block))


def test_kernels_list_lines_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles to a line, and more lines, than a program looks at together; one line longer than the others."""
    monkeypatch.setattr(mapping, "STEP", 4)
    monkeypatch.setattr(mapping, "SPAN", 4)
    random = torch.Generator().manual_seed(1)
    kinds = torch.rand(2, 5, 6, generator=random).repeat_interleave(64, 1).repeat_interleave(64, 2)
    visible = (kinds < 0.3) & (torch.rand(2, 320, 384, generator=random) < 0.5) | (kinds > 0.8)
    visible[1, 128:192] = True
    made = map_by_kernels(visible, (64, 64))
    assert made is not None
    assert made.rows.num_long == 1
    assert same_to_the_bit(made, Blocks.from_dense(visible, block=64))


def test_kernels_do_not_take_a_hash_for_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all hashes are the same, only tiles that are the same make a map."""
    monkeypatch.setattr(mapping, "odd_numbers", lambda num, device: torch.zeros(num, dtype=torch.int64, device=device))
    tile = torch.ones(64, 64, dtype=torch.bool).tril()
    alike = tile.repeat(2, 3)
    made = map_by_kernels(alike, (64, 64))
    assert made is not None
    assert torch.equal(made.dense(), alike)
    differing = alike.clone()
    differing[100, 0] ^= True
    assert map_by_kernels(differing, (64, 64)) is None


def test_kernels_know_a_partial_tile_by_any_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The greatest, which is what tiles without bits have, too."""
    greatest = 2**63 - 1
    monkeypatch.setattr(
        mapping, "odd_numbers", lambda num, device: torch.full((num,), greatest, dtype=torch.int64, device=device)
    )
    visible = torch.zeros(64, 192, dtype=torch.bool)
    visible[0, 128] = True  # a word of 1, whose hash is its number
    made = map_by_kernels(visible, (64, 64))
    assert made is not None
    assert torch.equal(made.dense(), visible)


@pytest.mark.parametrize("first", [-(2**63), -10, 2**63 - 1 - 128], ids=["least", "around 0", "greatest"])
@pytest.mark.parametrize("span", [4, 1024])
def test_kernels_sort_hashes_that_are_all_alike(first: int, span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which have one place in the table: the first, one in the middle, and the last, behind which they are put."""
    monkeypatch.setattr(mapping, "SPAN", span)
    for module in (mapping, bits):
        monkeypatch.setattr(module, "odd_numbers", lambda num, device: first + torch.arange(num, device=device))
    row = torch.tensor([[5, 3, 0, 44, 3], [60, 4, 63, 5, 1], [2, 59, 5, 6, 31]])  # the one each tile has a pair in
    visible = torch.zeros(3, 64, 5, 64, dtype=torch.bool)
    visible[torch.arange(3)[:, None], row, torch.arange(5), 0] = True  # a word of 1, whose hash is its number
    visible = visible.view(192, 320)
    made = map_by_kernels(visible, (64, 64))
    assert made is not None
    assert len(made.bits) == len(row.unique())
    assert same_to_the_bit(made, Blocks.from_dense(visible, block=64))


def some_runs(random: torch.Generator, num_batch: int, T: int, S: int) -> Tensor:
    """bool [B, T, S]: one run of keys to a row, or none."""
    start, end = torch.randint(S + 1, (2, num_batch, T, 1), generator=random)
    return (torch.arange(S) >= start) & (torch.arange(S) < end)


@pytest.mark.parametrize("S", [1, 31, 32, 100, 1023, 1024, 2600, pytest.param(4096, marks=pytest.mark.slow)])
def test_kernels_find_the_same_runs(S: int) -> None:
    random = torch.Generator().manual_seed(S)
    for num_batch, T in ((1, 1), (2, 9), (1, 16)):
        runs = some_runs(random, num_batch, T, S)
        for visible in (runs, runs.mT.contiguous().mT, runs[:, :1].expand(-1, T, -1), runs[..., :1].expand(-1, -1, S)):
            found, want = find_runs_by_kernels(visible.to(KERNELS_ON)), find_runs(visible)
            assert found is not None
            assert want is not None
            keys = torch.arange(S)
            assert torch.equal((keys >= want[0][..., None]) & (keys < want[1][..., None]), visible)
            for one, two in zip(found, want, strict=True):
                assert one.dtype == two.dtype == torch.int32
                assert torch.equal(one.cpu(), two)


@pytest.mark.parametrize("S", [3, 32, 100, 1030, 2048])
def test_a_gap_in_any_row_is_seen(S: int) -> None:
    random = torch.Generator().manual_seed(S)
    for gap in {1, S // 2, S - 2}:
        visible = some_runs(random, 2, 9, S)
        visible[1, 8] = True
        visible[1, 8, gap] = False
        assert find_runs(visible) is None
        assert find_runs_by_kernels(visible.to(KERNELS_ON)) is None
    many = torch.arange(2048).remainder(2).bool()[None, None]  # 1024 of them: more than a byte counts
    assert find_runs(many) is None


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_is_mapped_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = torch.rand(2, 1000, 1500) < torch.rand(2, 1000, 1)
    want = Blocks.from_dense(visible)
    monkeypatch.setattr(making, "from_dense", None)
    assert same_to_the_bit(Blocks.from_dense(visible.cuda()).to("cpu"), want)


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
    """Whichever comes first: rows have no tile size of their own."""
    visible, rows = torch.rand(70, 90) < 0.3, Rows(torch.arange(70), torch.arange(70) + 5, 90)
    blocks = Blocks.from_dense(visible, block=64)
    for joined in (rows | blocks, blocks | rows):
        assert joined.block == (64, 64)
        assert torch.equal(joined.dense(), visible | dense(rows, 70, 90))


@pytest.mark.parametrize("band", [CAUSAL, Band(3, None), Band(None, -4), EVERYTHING, NOTHING, Band(-4, 3)], ids=str)
def test_a_band_with_a_bound_has_an_opposite(band: Band) -> None:
    if None not in (band.lo, band.hi) and band != NOTHING:
        with pytest.raises(ValueError, match="before the lengths are known"):
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
    """However few tiles are looked at together."""
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
    """One map for what was expanded, one tile of bits for all of a diagonal, linear in the length under a window."""
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
    assert "tiled serves" in str(explain(q, k, v, mask=visible))
    runs = torch.ones(70, 70, dtype=torch.bool).tril()
    for visible in (runs, runs.expand(3, 2, 70, 70)):
        assert "cpu serves" in str(explain(q, k, v, mask=visible))


def test_padding_masks_broadcast_over_queries_or_keys() -> None:
    """[B, 1, 1, S] says which keys exist, as in PyTorch's SDPA; [T, 1] which queries do."""
    q, k, v = (torch.randn(3, 2, n, 8) for n in (70, 65, 65))
    for shape in ((3, 1, 1, 65), (1, 2, 1, 65), (3, 1, 65), (1, 65), (70, 1), (3, 2, 70, 1), (1, 1)):
        for visible in (torch.rand(shape) < 0.6, (torch.rand(*shape[:-1], 1) * shape[-1] > torch.arange(shape[-1]))):
            full = lift(visible[:, None] if visible.dim() == 3 else visible).expand(-1, -1, 70, 65)
            want, _ = softmax_attention(q.double(), k.double(), v.double(), full)
            assert relative(attention(q, k, v, mask=visible), want) <= FORWARD_BOUND


def test_compiles_whole() -> None:
    mask = masks.streaming(4, 20, 70)
    q, k, v = (torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    ours, eager = (f(q, k, v, mask=mask) for f in (compiled, attention))
    assert torch.equal(ours, eager)
    dout = torch.randn(ours.shape)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (ours, eager)), strict=True):
        assert torch.equal(a, b)


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


def test_what_a_map_made_with_tables_is_not_kept() -> None:
    mask = masks.random_blocks(256, 0.5)
    for length in range(1, 30):
        mask & masks.documents([length, 256 - length])
    assert not mask._made
    assert mask & masks.causal() is mask & masks.causal(), "every layer asks for this one"


def test_a_picture_of_no_map_is_empty() -> None:
    assert Blocks.from_dense(torch.ones(1, 0, 5, 7, dtype=torch.bool)).draw() == ""


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
    q[..., 0], k[:, :, 256:384, 0] = 1.0, 5.0  # everyone's favourite is block 2
    chosen = masks.top_blocks(q, k, 2)
    kinds = chosen.kinds()[0, 1] != 0
    assert kinds.sum(-1).tolist() == [2, 2, 2, 2]
    assert kinds[:, 2].all()
    assert kinds.diagonal().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_mask_is_the_same_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    """Made, sliced as ranks do, and drawn at random from a seed."""

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
    "every other head": (lambda: PER_HEAD.heads(range(0, 4, 2)), "a range of neighbours"),
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
        r"got \(8,\); leave i \[queries, 1\]",
    ),
    "a tensor for three of two sequences": (
        lambda: attention(*[torch.zeros(2, 4, 8, 16)] * 3, mask=torch.ones(3, 8, 8, dtype=torch.bool)),
        r"\[2, 4, T, S\]: got \(3, 8, 8\); give each",
    ),
    "a rule elsewhere": (lambda: Blocks.from_rule(lambda b, h, i, j: (i > j).to("meta"), 8, 8), "answer on meta"),
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
        r"block=128, as patterns are, or one anew by Blocks.from_dense\(mask.dense\(\)\)",
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
    "a sparse tensor": (lambda: attention(q4, q4, q4, mask=SQUARE.to_sparse()), "one by one: got torch.sparse_coo"),
    "a sparse map": (lambda: Blocks.from_dense(SQUARE.to_sparse()), "one by one: got torch.sparse_coo"),
    "a sparse coarse mask": (
        lambda: Blocks.from_coarse(SQUARE.to_sparse(), 1024, 1024),
        "one by one: got torch.sparse_coo.*use mask.to_dense",
    ),
    "a coarse mask without values": (
        lambda: Blocks.from_coarse(SQUARE.to("meta"), 1024, 1024),
        "one by one: got torch.strided on meta",
    ),
    "a rule that is sparse": (
        lambda: Blocks.from_rule(lambda b, h, i, j: (i >= j).to_sparse(), 8, 8),
        "one by one: got torch.sparse_coo; use .to_dense",
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
    "bands of no length": (lambda: Band(0, 1) | Band(5, 6), "before the lengths are known"),
    "the fused CPU kernel": (
        lambda: attention(q4, q4, q4, mask=masks.streaming(1, 2, 8), backend="cpu"),
        "lists of tiles",
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
        assert reference.forward(q, k, k, mask=mask, scale=1.0).lse.shape == (1, 1, T)


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
