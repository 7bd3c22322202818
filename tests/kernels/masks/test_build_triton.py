"""Block maps that kernels compute equal those of PyTorch's operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashspan.kernels.masks import (
    Blocks,
    bits,
    build,
    build_triton,
)
from flashspan.kernels.masks.block_map import check_block
from tests.kernels.masks.cases import EDGES, random_mask, same_to_the_bit

KERNELS_ON = "cuda" if torch.cuda.is_available() else "cpu"
"""The device on which Triton's kernels run: without a GPU, the CPU, in the interpreter."""


def map_by_kernels(visible: Tensor, block: tuple[int, int]) -> Blocks | None:
    # Move the memory as it is, because .to() may change the layout.
    memory = visible.as_strided((visible.untyped_storage().nbytes(),), (1,), 0).to(KERNELS_ON)
    there = memory.as_strided(visible.shape, visible.stride(), visible.storage_offset())
    made = build_triton.build_dense(build.check_dense(there), block)
    return None if made is None else Blocks(*visible.shape[-2:], block, *made).to("cpu")


@pytest.mark.parametrize("numbers", [range(8), pytest.param(range(8, 40), marks=pytest.mark.slow)])
def test_kernels_make_the_same_map_to_the_bit(numbers: range) -> None:
    """The map equals that of PyTorch's operators for a tensor on the CPU."""
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
    "tiles that are the same": torch.ones(400, 400, dtype=torch.bool).tril(),
    "one pair": torch.ones(1, 1, dtype=torch.bool),
}


SMALL_IN_CI = ("begins off a word", "begins on a word", "odd columns of a wider one", "tiles that are the same")
"""The masks that CI also divides into tiles of 64, in addition to random masks."""


@pytest.mark.parametrize(
    ("name", "edge"),
    [
        pytest.param(name, edge, marks=[pytest.mark.slow] if edge == 64 and name not in SMALL_IN_CI else [])
        for name in DENSE
        for edge in (128, 64)
    ],
)
def test_kernels_read_a_mask_wherever_it_lies(name: str, edge: int) -> None:
    made = map_by_kernels(DENSE[name], (edge, edge))
    assert made is not None
    assert same_to_the_bit(made, Blocks.from_dense(DENSE[name], block=edge))


def test_kernels_list_lines_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles per line, and more lines, than a program reads at a time; one line is longer than the others."""
    monkeypatch.setattr(build_triton, "STEP", 4)
    monkeypatch.setattr(build_triton, "SPAN", 4)
    random = torch.Generator().manual_seed(1)
    kinds = torch.rand(2, 5, 6, generator=random).repeat_interleave(64, 1).repeat_interleave(64, 2)
    visible = (kinds < 0.3) & (torch.rand(2, 320, 384, generator=random) < 0.5) | (kinds > 0.8)
    visible[1, 128:192] = True
    made = map_by_kernels(visible, (64, 64))
    assert made is not None
    assert made.rows.num_long == 1
    assert same_to_the_bit(made, Blocks.from_dense(visible, block=64))


def test_kernels_do_not_take_a_hash_for_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all hashes are equal, there is a map only if all tiles are equal."""
    monkeypatch.setattr(
        build_triton, "odd_numbers", lambda num, device: torch.zeros(num, dtype=torch.int64, device=device)
    )
    tile = torch.ones(64, 64, dtype=torch.bool).tril()
    repeated = tile.repeat(2, 3)
    made = map_by_kernels(repeated, (64, 64))
    assert made is not None
    assert torch.equal(made.dense(), repeated)
    differing = repeated.clone()
    differing[100, 0] ^= True
    assert map_by_kernels(differing, (64, 64)) is None


def test_kernels_know_a_partial_tile_by_any_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even by the greatest hash, which tiles without bits also have."""
    greatest = 2**63 - 1
    monkeypatch.setattr(
        build_triton, "odd_numbers", lambda num, device: torch.full((num,), greatest, dtype=torch.int64, device=device)
    )
    visible = torch.zeros(64, 192, dtype=torch.bool)
    visible[0, 128] = True  # a word of 1, whose hash is its number
    made = map_by_kernels(visible, (64, 64))
    assert made is not None
    assert torch.equal(made.dense(), visible)


@pytest.mark.parametrize(
    ("first", "span"),
    [
        pytest.param(-(2**63), 4, id="least-4"),
        pytest.param(-10, 4, id="around 0-4"),
        pytest.param(2**63 - 1 - 128, 4, id="greatest-4"),
        pytest.param(-(2**63), 1024, id="least-1024", marks=pytest.mark.slow),
        pytest.param(-10, 1024, id="around 0-1024"),
        pytest.param(2**63 - 1 - 128, 1024, id="greatest-1024", marks=pytest.mark.slow),
    ],
)
def test_kernels_sort_hashes_that_are_all_alike(first: int, span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such hashes have one slot in the table: the first, one in the middle, or the last, after which they are
    stored."""
    monkeypatch.setattr(build_triton, "SPAN", span)
    for module in (build_triton, bits):
        monkeypatch.setattr(module, "odd_numbers", lambda num, device: first + torch.arange(num, device=device))
    row = torch.tensor([[5, 3, 0, 44, 3], [60, 4, 63, 5, 1], [2, 59, 5, 6, 31]])  # the row of each tile's pair
    visible = torch.zeros(3, 64, 5, 64, dtype=torch.bool)
    visible[torch.arange(3)[:, None], row, torch.arange(5), 0] = True  # a word of 1, whose hash is its number
    visible = visible.view(192, 320)
    made = map_by_kernels(visible, (64, 64))
    assert made is not None
    assert len(made.bits) == len(row.unique())
    assert same_to_the_bit(made, Blocks.from_dense(visible, block=64))


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_is_mapped_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = torch.rand(2, 1000, 1500) < torch.rand(2, 1000, 1)
    want = Blocks.from_dense(visible)
    monkeypatch.setattr(build, "from_dense", None)
    assert same_to_the_bit(Blocks.from_dense(visible.cuda()).to("cpu"), want)
