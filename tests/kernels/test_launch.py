"""The launches of the Hopper kernels, and the small kernels around them. No GPU is needed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from flashspan.kernels import portable, reference
from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Blocks, Mask, Rows
from flashspan.kernels.portable import arguments
from flashspan.kernels.portable.delta import row_delta
from flashspan.masks.patterns import documents, random_blocks


@pytest.mark.parametrize(
    ("view", "fits"),
    [
        (lambda x: x, True),
        (lambda x: x.transpose(1, 2), True),  # [B, T, H, D]
        (lambda x: x[..., :16], True),  # a part of a fused projection
        (lambda x: x[:, :, :1], True),
        (lambda x: torch.zeros(512).half().as_strided((1, 8, 1, 64), (512, 64, 2**23, 1)), True),  # one row: any stride
        (lambda x: x[..., 1:17], False),  # not 16-byte aligned
        (lambda x: x[:1].expand(2, -1, -1, -1), True),  # one sequence, expanded
        (lambda x: x[:, :1].expand(-1, 3, -1, -1), True),  # one head, expanded
        (lambda x: x[:, :, :1].expand(-1, -1, 40, -1), False),  # one row, expanded: all would read it at once
        (lambda x: x.transpose(2, 3), False),
    ],
)
def test_what_the_copy_engine_takes_is_not_copied(view: Any, fits: bool) -> None:
    launch = pytest.importorskip("flashspan.kernels.hopper.launch")
    x = view(torch.randn(2, 3, 40, 64, generator=torch.Generator().manual_seed(0)).half())
    assert launch.is_aligned(x) is fits
    copy = launch.aligned(x)
    assert (copy is x) is fits
    assert launch.is_aligned(copy)
    assert torch.equal(copy, x)


def backward_launch_of(
    mask: Mask, num_queries: int, num_keys: int, head_dim: int, *, add: bool, dq: bool, key_heads: int = 4
) -> Launch:
    one_pass = pytest.importorskip("flashspan.kernels.hopper.one_pass")
    from flashspan.kernels.hopper.parts import new_rows
    from flashspan.kernels.hopper.tensors import BackwardInputs

    q = torch.empty(1, 4, num_queries, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, key_heads, num_keys, head_dim, dtype=torch.bfloat16, device="meta")
    rows = new_rows(q)
    counter = torch.empty(4, dtype=torch.int32, device="meta")
    made = [x.float() if add else x for x in (k, k)]
    sums = None if not dq else q.float() if add else torch.empty(len(rows) * head_dim // 256, 256, device="meta")
    given = BackwardInputs(q, q, k, k, rows, rows, mask, 1.0, sums, *made, add, counter, counter)
    return one_pass.backward_launch(given)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_only_full_masks_whose_gradients_are_added_are_cut_and_no_part_is_empty(head_dim: int) -> None:
    choice = random.Random(0)
    block, chip, compiled = 64, 132, set()
    keys = 192 if head_dim == 64 else 128  # keys of a tile: of three warpgroups, or two
    for _ in range(200):
        num_queries = choice.randint(1, 40_000)
        num_keys = choice.choice((choice.randint(257, 40_000), keys * choice.randint(3, 300)))
        launch = backward_launch_of(EVERYTHING, num_queries, num_keys, head_dim, add=True, dq=True)
        num_tiles, whole, parts = launch.arguments[-3:]
        num_blocks = -(-num_queries // block)
        assert (parts - 1) * -(-num_blocks // parts) < num_blocks, "the last part has a block"
        assert whole + (num_tiles - whole) // parts == -(-num_keys // keys) * 4, (
            "every tile is there, whole or in parts"
        )
        assert parts == 1 or (whole % chip == 0 and (num_tiles - whole) // parts < chip), "those of the last round"
        assert launch.grid == (min(num_tiles, chip),)
        compiled.add(tuple(launch.constants.items()))
    assert len(compiled) == (1 if head_dim == 64 else 2), "lengths compile nothing, but for a last tile that is shorter"
    # Not split: sums that must be reproducible, 16-bit tiles that cannot be added, masked tiles of different lengths.
    for mask, add, dq in ((EVERYTHING, True, False), (EVERYTHING, False, True), (CAUSAL, True, True)):
        launch = backward_launch_of(mask, 40_000, 1280, head_dim, add=add, dq=dq)
        assert launch.arguments[-2:] == (4 * -(-1280 // (keys if dq else 128)), 1)
        assert not launch.constants["SPLIT_TILES"]


@pytest.mark.parametrize(
    ("mask", "length", "key_heads", "add", "claimed", "turns"),
    [
        (CAUSAL, 4096, 4, False, True, 1),
        (CAUSAL, 4096, 2, False, True, 0),
        (CAUSAL, 4097, 4, False, False, 2),
        (CAUSAL, 4097, 2, False, False, 2),
        (EVERYTHING, 4096, 4, False, False, 2),
        (EVERYTHING, 8192, 2, False, False, 2),
        (Band(-1023, 0), 65536, 2, False, True, 1),
        (Band(-4096, 0), 65536, 2, False, False, 2),
        (documents([5000, 5000]), 10000, 2, False, True, 1),
        (CAUSAL, 1024, 2, True, False, 2),
        (documents([5000, 5000]), 10000, 4, True, False, 2),
    ],
)
def test_dq_of_two_warpgroups_has_two_places_just_where_its_sums_are_not_claimed(
    mask: Mask, length: int, key_heads: int, add: bool, claimed: bool, turns: int
) -> None:
    # If sums are claimed, two buffers were slower; so were turns if grouped heads see all keys before a query. Three
    # warpgroups (heads of 64, without tables) always work in turn, with two buffers.
    three = 0 if isinstance(mask, Rows) else 2
    for head_dim, dq, found in ((128, True, (claimed, turns)), (64, True, (claimed, three)), (128, False, (False, 0))):
        launch = backward_launch_of(mask, length, length, head_dim, add=add, dq=dq, key_heads=key_heads)
        assert (launch.constants["FIRST_STORES"], launch.constants["WHOLE_DQ_STAGES"]) == found


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("keys", "claimed"), [(128, True), (256, False), (4096, False)])
def test_sums_of_dq_without_a_mask_are_claimed_only_where_a_head_has_one_tile(
    head_dim: int, keys: int, claimed: bool
) -> None:
    launch = backward_launch_of(EVERYTHING, 4096, keys, head_dim, add=False, dq=True)
    assert launch.constants["FIRST_STORES"] == claimed


@pytest.mark.parametrize(
    ("mask", "queries", "keys", "head_dim", "forward", "backward"),
    [
        (CAUSAL, 4096, 4096, 64, 3, 3),
        (CAUSAL, 4096, 4096, 40, 3, 3),
        (CAUSAL, 4096, 4096, 128, 2, 2),
        (EVERYTHING, 257, 1024, 64, 3, 3),
        (EVERYTHING, 256, 1024, 64, 2, 3),
        (EVERYTHING, 300, 1023, 64, 2, 3),
        (EVERYTHING, 300, 256, 64, 2, 2),
        (Band(-1023, 0), 4096, 4096, 64, 3, 3),
        (Band(-1022, 0), 4096, 4096, 64, 2, 3),
        (documents([2048, 2048]), 4096, 4096, 64, 2, 2),
    ],
)
def test_three_warpgroups_multiply_where_blocks_are_many_and_alike(
    mask: Mask, queries: int, keys: int, head_dim: int, forward: int, backward: int
) -> None:
    launch = pytest.importorskip("flashspan.kernels.hopper.launch")
    from flashspan.kernels.hopper.float16_values import empty_float16

    q = torch.empty(1, 4, queries, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 4, keys, head_dim, dtype=torch.bfloat16, device="meta")
    rows = torch.empty(1, 4, queries, device="meta")
    fine = empty_float16(k)
    # Two warpgroups are used if V is not converted (the maximum is tracked), and with a carry.
    for v, carry, found in ((fine, False, forward), (k, False, 2), (fine, True, 2)):
        out = q.float() if carry else q
        made = launch.forward_launch(q, k, v, out, rows, rows.int(), mask.to("meta"), 0.125, carry)
        assert made.constants["CONSUMERS"] == found
        num_tiles = made.arguments[-1]
        assert num_tiles == 4 * -(-queries // (64 * found)), "each has 64 queries of a tile"
    for dq, found in ((True, backward), (False, 2)):
        made = backward_launch_of(mask, queries, keys, head_dim, add=False, dq=dq)
        assert made.constants["CONSUMERS"] == found
        assert made.arguments[-3] == 4 * -(-keys // (64 * found)), "each has 64 keys of a tile"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is compiled here, not interpreted")
def test_sequences_may_lie_two_to_the_31_numbers_apart() -> None:
    launch = pytest.importorskip("flashspan.kernels.hopper.launch")
    dq, dk, dv = (torch.empty_strided((2, 1, 1, 64), (2**31, 64, 64, 1), dtype=torch.bfloat16) for _ in range(3))
    for x in (dq, dk, dv):
        assert launch.is_aligned(x)
        x[1] = 7.0
    parts = torch.ones(2, 2, 1, 64), torch.ones(2, 2, 1, 64)
    sums, states, rows = torch.ones(64, 256), torch.zeros(2, dtype=torch.int32), {"padded": 128, "block": 128}
    launch.cast_launch(sums, states, parts, (dq, dk, dv), 1.0, **rows, claimed=0)()
    assert [x[1].unique().tolist() for x in (dq, dk, dv)] == [[1.0], [2.0], [2.0]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is compiled here, not interpreted")
def test_no_kernel_is_given_rows_too_far_apart_for_its_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in [T, B, H, D] with B * H * D of 2^23 or more; here 32 or more."""
    monkeypatch.setattr(arguments, "MAX_ROW_STRIDE", 32)
    start = Launch.start

    def checked(self: Launch, compiled: Any) -> None:
        tensors = [x for x in self.arguments if isinstance(x, Tensor) and x.dim() == 4]
        assert all(x.stride(2) < 32 for x in tensors), self.kernel
        start(self, compiled)

    monkeypatch.setattr(Launch, "start", checked)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(9, 2, 1, 16, generator=generator).permute(1, 2, 0, 3) for _ in range(4))
    into = [torch.ones(9, 2, 1, 16).permute(1, 2, 0, 3) for _ in range(3)]
    wanted = [x.clone() for x in into]
    carry = Carry(torch.zeros(9, 2, 1, 16).permute(1, 2, 0, 3), torch.full((2, 1, 9), -torch.inf))
    out, lse = portable.forward(q, k, v, Problem(CAUSAL, 0.25), carry=carry)
    delta = row_delta(dout, out)
    right = reference.forward(q, k, v, Problem(CAUSAL, 0.25))
    for mine, other in zip((out, lse, delta), (*right, (dout * right.out).sum(-1)), strict=True):
        assert torch.allclose(mine, other, atol=1e-5)
    for (dq, dk, dv), serve in ((into, portable.backward), (wanted, reference.backward)):
        serve(dout, q, k, v, lse, delta, Problem(CAUSAL, 0.25), dq=dq, dk=dk, dv=dv, accumulate=True)
    for mine, other in zip(into, wanted, strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is compiled here, not interpreted")
@pytest.mark.parametrize("head_dim", [64, 40, 128])
def test_v_in_float16_is_v_or_says_that_it_is_not(head_dim: int) -> None:
    float16_values = pytest.importorskip("flashspan.kernels.hopper.float16_values")
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(2, 70, 3, head_dim, generator=generator).bfloat16().transpose(1, 2)
    v[0, 0, 0], v[0, 0, 1], v[0, 0, 2] = 0.0, 4080.0, -4096.0
    v[0, 1, 69, :2] = torch.tensor([torch.inf, torch.nan])
    v[1, 2, 5] *= 2.0**-20  # all numbers of a key are small
    v[1, 2, 6, 1:] *= 2.0**-12  # some numbers of a key are small
    fine = float16_values.empty_float16(v)
    float16_values.float16_launch(v, fine)()
    lost = fine.isnan().all(-1)
    assert lost.nonzero().tolist() == [[0, 0, 2], [0, 1, 69], [1, 2, 5]]
    assert torch.equal(fine.isnan().any(-1), lost)
    found, wanted = fine[~lost].float() * float16_values.FLOAT16_UNIT.value, v[~lost].float()
    largest = wanted.abs().amax(-1, keepdim=True)
    assert torch.equal(found[0], wanted[0])
    assert ((found - wanted).abs() <= 2.0**-29).all()
    assert torch.equal(found[wanted.abs() >= 2.0**-11], wanted[wanted.abs() >= 2.0**-11])
    assert largest.max() == 4080.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is compiled here, not interpreted")
def test_v_in_float16_repeats_what_v_repeats() -> None:
    float16_values = pytest.importorskip("flashspan.kernels.hopper.float16_values")
    v = torch.randn(2, 1, 40, 64, generator=torch.Generator().manual_seed(0)).bfloat16().expand(2, 4, 40, 64)
    fine = float16_values.empty_float16(v)
    float16_values.float16_launch(v, fine)()
    assert fine.untyped_storage().nbytes() == 2 * 40 * 64 * 2
    assert torch.equal(fine.float() * float16_values.FLOAT16_UNIT.value, v.float())


def test_rows_are_marked_for_a_launch_where_the_kernel_does_not_compute_them_again() -> None:
    launch = pytest.importorskip("flashspan.kernels.hopper.launch")

    def marks(
        mask: Mask, batch: int, tokens: int, in_float16: bool = False, out_dtype: torch.dtype = torch.bfloat16
    ) -> bool:
        x = torch.empty(batch, 4, tokens, 64, dtype=torch.bfloat16, device="meta")
        return bool(launch.marks_rows(x, x, mask, out_dtype, in_float16))

    assert not marks(CAUSAL, 2, 1000)
    assert marks(CAUSAL, 16, 1000), "512 tiles"
    assert marks(CAUSAL, 2, 1000, in_float16=True)
    assert marks(CAUSAL, 2, 1000, out_dtype=torch.float32), "no room in shared memory at d128"
    assert not marks(EVERYTHING, 16, 1000), "no key is hidden"
    assert marks(CAUSAL, 1, 8192), "too slow with many keys"
    assert not marks(Band(-500, 0), 1, 8192)
    assert marks(documents([100, 900]), 2, 1000)
    assert marks(random_blocks(1000, 0.5), 2, 1000)


def test_v_in_float16_is_made_where_enough_queries_see_a_key() -> None:
    float16_values = pytest.importorskip("flashspan.kernels.hopper.float16_values")

    def is_faster(
        mask: Mask,
        tokens: int,
        head_dim: int,
        group: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        carry: bool = False,
        batch: int = 256,
    ) -> bool:
        q, k = (torch.empty(batch, heads, tokens, head_dim, dtype=dtype, device="meta") for heads in (group, 1))
        return float16_values.is_faster(q, k, mask, carry)

    assert is_faster(CAUSAL, 4096, 128)
    assert is_faster(CAUSAL, 2048, 128, group=2)
    assert is_faster(CAUSAL, 2048, 64)
    assert is_faster(EVERYTHING, 2048, 128)
    assert is_faster(documents([8192] * 4), 32768, 128)
    assert is_faster(documents([4096] * 8) & CAUSAL, 32768, 128)
    assert not is_faster(documents([2048] * 16) & CAUSAL, 32768, 128)
    for tokens in (16384, 32768):  # if the reach is unknown
        every = torch.arange(tokens, dtype=torch.int32)
        assert is_faster(Rows(every, every + 1, tokens, convex=True, reach=0), tokens, 128) == (tokens == 32768)
    assert not is_faster(CAUSAL, 2048, 128)
    assert not is_faster(CAUSAL, 2048, 64, batch=16), "too short: the conversion takes longer than it saves"
    assert not is_faster(CAUSAL, 4096, 128, batch=2)
    assert is_faster(CAUSAL, 16384, 128, batch=1), "few tiles, but long ones"
    assert not is_faster(Band(-1023, 0), 65536, 128)
    assert is_faster(CAUSAL, 4096, 160)
    assert not is_faster(CAUSAL, 65536, 160, carry=True)
    assert not is_faster(CAUSAL, 65536, 256)
    assert not is_faster(CAUSAL, 65536, 128, dtype=torch.float16)
    assert not is_faster(random_blocks(1024, 0.5), 1024, 128)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is compiled here, not interpreted")
@pytest.mark.parametrize(
    ("head_dim", "wide", "block", "claimed"),
    [(64, 64, 128, 128), (40, 64, 128, 128), (128, 128, 64, 64), (72, 128, 64, 64), (128, 128, 64, 128)],
)
@pytest.mark.parametrize("num_parts", [1, 4])
def test_sums_of_dq_lie_as_products_leave_them_and_the_cast_puts_them_right(
    head_dim: int, wide: int, block: int, claimed: int, num_parts: int
) -> None:
    launch = pytest.importorskip("flashspan.kernels.hopper.launch")
    heads, queries, padded = 3, 200, 256
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-64, 64, (heads, padded, wide), generator=generator).float()  # exact in bfloat16
    # A block has 64 x 64 parts, one for a warpgroup. A warp has 16 rows of it, and a thread 2 of them, 8 rows apart. Of
    # each group of 8 columns, a thread has one of four pairs.
    parts = rows.view(heads, padded // block, block // 64, 4, 2, 8, wide // 64, 8, 4, 2)
    sums = parts.permute(0, 1, 2, 6, 7, 3, 5, 8, 4, 9).reshape(-1, 256)
    dq = torch.full((1, heads, queries, head_dim), float("nan"), dtype=torch.bfloat16)
    states = torch.ones(heads * padded // claimed, dtype=torch.int32)
    states[1] = 0  # no program has added there
    rows.view(-1, claimed, wide)[1] = 0
    keys = [torch.randn(1, 2 * num_parts, 70, head_dim, generator=generator) for _ in range(2)]
    made = [torch.full((1, 70, 2, head_dim), float("nan"), dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)]
    launch.cast_launch(sums, states, keys, (dq, *made), 2.0, padded=padded, block=block, claimed=claimed)()
    for got, x in zip(made, keys, strict=True):
        if num_parts == 1:
            assert got.isnan().all(), "its own part"
        else:
            torch.testing.assert_close(got, x.view(1, 2, num_parts, 70, head_dim).sum(2).bfloat16())
    assert torch.equal(dq[0], (rows[:, :queries, :head_dim] * 2).bfloat16())


@pytest.mark.parametrize(
    ("mask", "head_dim", "claimed"),
    [
        (random_blocks(1024, 0.5), 128, 128),
        (random_blocks(1024, 0.5), 64, 128),
        (Band(-255, 0), 128, 64),
        (Band(-255, 0), 64, 64),
        (documents([1024] * 16), 64, 128),
        (Band(-8191, 0), 128, 0),
    ],
)
def test_who_clears_the_states_of_sums_and_who_casts_them_agree_on_the_rows_of_a_state(
    mask: Mask, head_dim: int, claimed: int
) -> None:
    launch = pytest.importorskip("flashspan.kernels.hopper.launch")
    tokens = 1024 if isinstance(mask, Blocks) else 16384
    kind, numbers, tables = mask.to("meta").pack()
    x = torch.empty(1, 2, tokens, head_dim, device="meta", dtype=torch.bfloat16)
    rows = torch.empty(2 * tokens, device="meta")
    sums = torch.empty(2 * tokens * head_dim // 256, 256, device="meta")
    tensors = (*[x] * 4, rows, rows, *[x] * 3, *tables, rows, rows, sums, x, x, rows.int(), rows[:4].int())
    prepare, _, finish = launch._backward_launches(tensors, kind, tuple(numbers), 1.0, False, False, False)
    assert (prepare.constants["STATES"], finish.constants["CLAIMED"]) == (claimed and 128 // claimed, claimed)
    assert bool(prepare.constants["CLEAR"]) != bool(claimed)


@pytest.mark.parametrize(("head_dim", "lengths"), [(64, (1, 2, 200)), (40, (2, 3, 129)), (128, (1, 1, 7))])
def test_rows_are_prepared_alike_from_delta_and_from_the_output(
    head_dim: int, lengths: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are correct to the last bit of float32, also if they are stored as three parts."""
    launch = pytest.importorskip("flashspan.kernels.hopper.launch")
    from flashspan.kernels.hopper.parts import new_rows

    nothing = Launch(None, (), (launch.describe(torch.empty(1, 1, 64, 64).half(), 1, 1, 64, 64),), {})
    monkeypatch.setattr(launch, "backward_launch", lambda *_: nothing)
    generator = torch.Generator().manual_seed(0)
    B, H, T = lengths
    q, dout = (torch.randn(B, H, T, head_dim, generator=generator).half() for _ in range(2))
    out = torch.randn(B, T, H, head_dim, generator=generator).half().transpose(1, 2)
    dout = dout[:1].expand(B, -1, -1, -1)
    lse = torch.randn(B, H, T, generator=generator)
    lse[0, 0, 0] = -torch.inf
    out[0, 0, -1, 3] = torch.nan
    padded, wide = -(-T // 128) * 128, 64 if head_dim <= 64 else 128
    results = []
    for of_output in (False, True):
        minus_lse, minus_delta = (new_rows(q).fill_(7.0) for _ in range(2))
        assert minus_lse.dim() == (2 if wide == 64 else 1)
        sums = torch.ones(B * H * padded * wide // 256, 256)
        states = torch.ones(B * H * padded // 64, dtype=torch.int32)
        rows = out if of_output else row_delta(dout, out)
        tensors = (dout, q, q, q, lse, rows, q, q, q, minus_lse, minus_delta, sums, q, q, states, states)
        prepare = launch._backward_launches(tensors, "band", (-T, T), 0.5, False, False, of_output)[0]
        prepare()
        assert sums.abs().sum() == 0
        results.append([x.float().view(B, H, padded, -1).sum(-1)[:, :, :T] for x in (minus_lse, minus_delta)])
    for of_delta, from_output in zip(*results, strict=True):
        torch.testing.assert_close(from_output, of_delta, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.isnan(results[1][0][0, 0, -1])
    assert results[1][1][0, 0, -1] == 0
    assert results[1][0][0, 0, 0] == -torch.inf
    exact = (lse * -2.0)[..., 1:-1]  # the scale is 1/2, so this is exact
    torch.testing.assert_close(results[0][0][..., 1:-1], exact, rtol=2**-23, atol=0)
