"""Backward with few tiles of keys, in which query heads or queries are divided into parts. Launches as data and the
portable kernels are tested here, the Hopper kernels on a GPU (`pytest -m gpu` of this file)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from flashspan.kernels import portable, reference
from flashspan.kernels.contract import Problem
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Mask
from flashspan.kernels.portable.backward import backward_launches
from flashspan.kernels.portable.gradient_parts import (
    MIN_BLOCKS,
    MOST_PARTS,
    ROUNDS,
    add_gradients_launch,
    count_equal_parts,
    count_parts,
)
from flashspan.masks.patterns import documents, random_blocks
from tests.kernels.cases import GRADIENT_BOUND, Shape, make_inputs, relative, solve
from tests.kernels.compiler import compile_apart

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, not interpreted")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def test_parts_are_the_fewest_that_occupy_the_gpu() -> None:
    for group in range(1, 40):
        for num_tiles in (1, 8, 63, 64, 126, 200, 251, 1000):
            for num_blocks in (1, 2, 16, 128):
                parts = count_parts(group, num_tiles, num_blocks, 132)
                divisors = [x for x in range(1, group + 1) if group % x == 0]
                allowed = [x for x in divisors if x == 1 or group // x * num_blocks >= MIN_BLOCKS]
                enough = [x for x in allowed if num_tiles * x >= ROUNDS * 132]
                assert parts == (enough[0] if enough else allowed[-1])


def test_equal_tiles_are_divided_so_that_few_multiprocessors_are_idle() -> None:
    for group in (1, 2, 3, 7, 8, 12, 32):
        for num_tiles in (1, 8, 63, 80, 126, 144, 200, 800, 2048):
            for num_blocks in (1, 7, 9, 17, 25, 50, 80, 333):
                parts = count_equal_parts(group, num_tiles, num_blocks, 132)
                if group > 1:
                    assert group % parts == 0
                else:
                    assert parts <= MOST_PARTS
                    assert (parts - 1) * -(-num_blocks // parts) < num_blocks, "no part is empty"
                assert parts == 1 or group * num_blocks // parts >= MIN_BLOCKS
                # In units of a whole tile, with the time that idle multiprocessors wait in the last round.
                before, after = -(-num_tiles // 132), -(-num_tiles * parts // 132) / parts
                assert after <= before
    assert count_equal_parts(1, 2048, 256, 132) == 1  # 15.5 rounds of long tiles
    assert count_equal_parts(1, 32, 32, 132) == 4  # 32 tiles: a quarter of an H200
    assert count_equal_parts(8, 800, 50, 132) > 1  # 6.06 rounds


def launches_of(
    heads: tuple[int, int],
    tokens: int,
    head_dim: int,
    mask: Mask = CAUSAL,
    *,
    keys: int | None = None,
    accumulate: bool = False,
    deterministic: bool = False,
) -> tuple[list[Launch], list[Tensor]]:
    """The launches of the Hopper backward on meta tensors, and the tensors of the parts of dK and dV."""
    one_pass = pytest.importorskip("flashspan.kernels.hopper.one_pass")
    from flashspan.kernels.hopper.launch import _backward_launches, empty_parts
    from flashspan.kernels.hopper.parts import new_rows
    from flashspan.kernels.hopper.two_pass import count_dq_parts

    lengths = (tokens, keys or tokens)
    q, k = (
        torch.empty(1, n, length, head_dim, dtype=torch.bfloat16, device="meta")
        for n, length in zip(heads, lengths, strict=True)
    )
    parts = one_pass.count_key_parts(q, k, mask, accumulate, not deterministic)
    dq, dk, dv = (x.float() if accumulate else torch.empty_like(x) for x in (q, k, k))
    to_dk, to_dv = (empty_parts(k, parts) if parts > 1 else x for x in (dk, dv))
    rows = torch.empty(1, heads[0], tokens, device="meta")
    sums = dq if accumulate or deterministic else torch.empty(heads[0] * 8192 * head_dim // 256, 256, device="meta")
    if (dq_parts := count_dq_parts(q, k, mask, accumulate)) > 1:
        sums = empty_parts(q, dq_parts)
    counter = torch.empty(4, dtype=torch.int32, device="meta")
    kind, numbers, tables = mask.to("meta").pack()
    tensors = (q, q, k, k, rows, rows, dq, dk, dv, *tables, new_rows(q), new_rows(q), sums, to_dk, to_dv, counter)
    launches = _backward_launches(
        (*tensors, counter), kind, tuple(numbers), 0.1, accumulate, deterministic or head_dim > 128, False
    )
    assert launches is not None
    return launches, [to_dk, to_dv]


def names(launches: list[Launch]) -> list[str]:
    return [launch.kernel.__name__ for launch in launches]


def numbers(launch: Launch) -> dict[str, Any]:
    return dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))


@pytest.mark.parametrize(
    ("heads", "tokens", "head_dim", "deterministic", "parts"),
    [
        ((16, 1), 8192, 128, False, 4),
        ((16, 1), 8192, 128, True, 4),
        ((16, 1), 8192, 64, False, 8),  # tiles of 192 keys
        ((16, 1), 8192, 64, True, 4),
        ((16, 1), 8192, 256, True, 2),  # tiles of 64 keys
        ((32, 2), 8192, 128, False, 2),
        ((32, 8), 8192, 128, False, 1),
        ((16, 1), 16384, 128, False, 2),
        ((16, 1), 32768, 128, False, 1),
        ((8, 8), 128, 128, False, 1),
        ((16, 1), 1, 128, False, 4),
        ((7, 1), 1000, 64, False, 7),
    ],
)
def test_few_key_heads_become_several(
    heads: tuple[int, int], tokens: int, head_dim: int, deterministic: bool, parts: int
) -> None:
    launches, rooms = launches_of(heads, tokens, head_dim, deterministic=deterministic)
    keys = numbers(launches[1])
    assert launches[1].constants["SPLIT_HEADS"] is (parts > 1)
    assert (keys["K"], keys["G"]) == (heads[1] * parts, heads[0] // (heads[1] * parts))
    assert keys["desc_k"].shape[1] == heads[1]
    assert [keys["desc_dk"].base, keys["desc_dv"].base] == rooms
    last = ["queries_kernel"] if deterministic else []
    if parts == 1:
        assert names(launches)[2:] == [*last, *([] if deterministic else ["cast_kernel"])]
        assert all(x.dtype == torch.bfloat16 for x in rooms)
        return
    assert names(launches)[2:] == [*last, "add_gradients_kernel" if deterministic else "cast_kernel"]
    assert all(x.shape == (1, heads[1] * parts, tokens, head_dim) and x.dtype == torch.float32 for x in rooms)
    assert numbers(launches[-1])["query_parts" if deterministic else "num_parts"] == parts
    # The query heads of a part share its head of K and V, and each is in exactly one part.
    served = [(part * keys["G"] + g, part // parts) for part in range(keys["K"]) for g in range(keys["G"])]
    assert served == [(head, head // (heads[0] // heads[1])) for head in range(heads[0])]


def test_parts_are_stored_and_their_sum_is_added() -> None:
    for mask in (CAUSAL, Band(-1023, 0), documents([3000, 5192])):
        launches, _ = launches_of((16, 1), 8192, 128, mask, accumulate=True)
        assert launches[1].constants["ACCUMULATE"], "of dq"
        assert not launches[1].constants["SPLIT_TILES"]
        assert launches[2].constants["ADD"]
    launches, _ = launches_of((16, 1), 8192, 256, accumulate=True, deterministic=True)
    assert not launches[1].constants["ACCUMULATE"]
    assert launches[2].constants["ACCUMULATE"]


def test_tiles_that_are_split_by_queries_are_not_split_by_heads() -> None:
    """With a full mask and accumulated gradients. With few queries, tiles are not split by queries."""
    launches, _ = launches_of((16, 1), 8192, 128, EVERYTHING, accumulate=True)
    assert (launches[1].constants["SPLIT_TILES"], launches[1].constants["SPLIT_HEADS"]) == (True, False)
    launches, _ = launches_of((16, 1), 1000, 128, EVERYTHING, accumulate=True)
    assert (launches[1].constants["SPLIT_TILES"], launches[1].constants["SPLIT_HEADS"]) == (False, True)


def test_queries_of_few_keys_are_divided() -> None:
    """If each query head has its own keys, and every query sees all of them."""
    launches, rooms = launches_of((16, 16), 4096, 64, EVERYTHING, keys=77)
    main = numbers(launches[1])
    assert (launches[1].constants["SPLIT_TILES"], launches[1].constants["SPLIT_HEADS"]) == (True, False)
    parts = main["num_parts"]
    assert (main["K"], main["G"], main["num_whole"], main["num_tiles"]) == (16, 1, 0, 16 * parts)
    assert parts > 1
    assert [main["desc_dk"].base, main["desc_dv"].base] == rooms
    assert all(x.shape == (1, 16 * parts, 77, 64) and x.dtype == torch.float32 for x in rooms)
    assert names(launches)[2:] == ["cast_kernel"]
    assert launches[2].constants["PARTS"]
    for more in ({"mask": CAUSAL}, {"accumulate": True}, {"deterministic": True}):
        options = {"mask": EVERYTHING, **more}
        launches, rooms = launches_of((16, 16), 4096, 64, keys=77, **options)
        assert "add_gradients_kernel" not in names(launches), more
        assert not launches[-1].constants.get("PARTS"), more


@pytest.mark.parametrize(
    ("heads", "lengths", "mask", "parts"),
    [
        ((4, 4), (700, 3000), Band(None, 2300), 5),
        ((24, 8), (100, 700), EVERYTHING, 5),
        ((4, 4), (100, 6000), EVERYTHING, 33),
        ((16, 1), (300, 1999), EVERYTHING, 2),
        ((4, 4), (700, 3000), Band(-255, 0), 2),  # a query sees four blocks of keys
        ((80, 80), (100, 6000), EVERYTHING, 1),  # more than half the multiprocessors
        ((4, 4), (100, 100), EVERYTHING, 1),
    ],
)
def test_keys_of_few_blocks_of_queries_are_divided(
    heads: tuple[int, int], lengths: tuple[int, int], mask: Band, parts: int
) -> None:
    launches, rooms = launches_of(heads, lengths[0], 256, mask, keys=lengths[1], deterministic=True)
    queries = numbers(launches[2])
    assert names(launches)[:3] == ["rows_kernel", "keys_kernel", "queries_kernel"]
    assert queries["num_parts"] == parts
    assert launches[2].grid == (-(-lengths[0] // 128) * heads[0] * parts,)
    assert queries["desc_dq"].shape[1] == heads[0] * parts
    if parts == 1:
        assert "add_gradients_kernel" not in names(launches)
        return
    assert names(launches)[3:] == ["add_gradients_kernel"]
    added = numbers(launches[3])
    assert added["dq_parts"] is queries["desc_dq"].base
    assert [added["dk_parts"], added["dv_parts"]] == rooms
    assert (added["key_parts"], added["query_parts"]) == (parts, rooms[0].shape[1] // heads[1])
    launches, _ = launches_of(heads, lengths[0], 256, mask, keys=lengths[1], deterministic=True, accumulate=True)
    assert numbers(launches[2])["num_parts"] == 1
    assert all(numbers(launch)["key_parts"] == 1 for launch in launches[3:])


@interpreted
@pytest.mark.parametrize("head_dim", [16, 40, 160, 256])
@pytest.mark.parametrize(("key_parts", "query_parts"), [(3, 1), (1, 4), (5, 2)])
@pytest.mark.parametrize("add", [False, True])
def test_the_sums_of_parts_of_all_gradients_are_right(
    head_dim: int, key_parts: int, query_parts: int, add: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 37, key_parts), (2, 63, query_parts), (2, 63, query_parts))
    parts = [torch.randn(2, heads * n, length, head_dim, generator=generator) for heads, length, n in sizes]
    held = 1.0 if add else torch.nan
    made = [torch.full((2, length, heads, head_dim), held).transpose(1, 2) for heads, length, _ in sizes]
    add_gradients_launch(parts, made, add)()
    for got, x, (heads, length, n) in zip(made, parts, sizes, strict=True):
        if n == 1:
            assert got.isnan().all() or (got == held).all(), "its own part"
        else:
            torch.testing.assert_close(got, x.view(2, heads, n, length, head_dim).sum(2) + (1.0 if add else 0.0))


PROGRAM = """
import json, sys
import torch
from flashspan.kernels import hopper
from benchmarks.compile_kernels import compile_launch
from flashspan.kernels.contract import Problem
from flashspan.kernels.launch.compiling import launches_of
from flashspan.kernels.masks import Band
for head_dim, dtype in json.loads(sys.argv[1]):
    q = torch.empty(1, 4, 700, head_dim, dtype=getattr(torch, dtype), device="meta")
    k, lse = q.new_empty(1, 4, 3000, head_dim), torch.empty(1, 4, 700, device="meta")
    problem = Problem(Band(None, 2300), 0.1)
    into = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(k)}
    launches = launches_of(lambda: hopper.backward_of_output(q, q, k, k, q, lse, problem, **into))
    costs = [compile_launch(launch) for launch in launches[-2:]]
    print(json.dumps([[cost.spilled_bytes, cost.registers, cost.shared_bytes] for cost in costs]))
"""


@pytest.mark.slow
def test_the_pass_for_dq_in_parts_compiles_without_spills() -> None:
    for queries, add in compile_apart(PROGRAM, [(160, "bfloat16"), (256, "float16")]):
        assert queries[:2] == [0, 168]
        assert add[0] == 0
        assert max(queries[2], add[2]) <= 232448


@interpreted
@pytest.mark.parametrize(
    ("shape", "mask", "accumulate"),
    [
        (Shape(1, 4, 1, 70, 20, 16), CAUSAL, False),
        (Shape(2, 8, 2, 70, 33, 20), Band(-30, 40), True),
        (Shape(1, 4, 1, 70, 30, 130), documents([50, 20], [10, 20]), True),
    ],
)
def test_the_portable_backward_divides_heads(shape: Shape, mask: Mask, accumulate: bool) -> None:
    x = make_inputs(shape, 0, layout="BTHD")
    dropout = Dropout(0.2, torch.tensor([3]))
    right = solve(x, mask, 0.3, dropout)
    made = [torch.full_like(t, 1.0 if accumulate else torch.nan) for t in (x.q, x.k, x.v)]
    given = (x.dout, x.q, x.k, x.v, right.lse.float(), right.delta.float())
    problem = Problem(mask, 0.3, dropout)
    assert "sum of parts" in backward_launches(given, problem, (made[0], made[1], made[2]), accumulate)
    portable.backward(*given, problem, dq=made[0], dk=made[1], dv=made[2], accumulate=accumulate)
    for got, want in zip(made, (right.dq, right.dk, right.dv), strict=True):
        assert relative(got - float(accumulate), want, right.dk) <= GRADIENT_BOUND


MASKS: dict[str, Any] = {
    "causal": lambda T: CAUSAL,
    "full": lambda T: EVERYTHING,
    "window": lambda T: Band(-100, 20),
    "documents": lambda T: documents([T - T // 3, T // 3]) & CAUSAL,
    "block map": lambda T: random_blocks(T, 0.5),
}


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_of_few_key_heads(head_dim: int, mask: str, deterministic: bool) -> None:
    """Overwriting and accumulating, compared with float64. Sums of dK and dV have a fixed order, and those of all
    gradients if they are deterministic."""
    from flashspan.kernels import hopper
    from flashspan.kernels.hopper.one_pass import count_key_parts
    from tests.kernels.hopper_cases import GRADIENT_BOUND, tensors

    if mask == "block map" and (deterministic or head_dim == 256):
        pytest.skip("left to the portable kernels")
    torch.cuda.empty_cache()  # the float64 reference takes 3 GiB, and other processes share the GPU
    choice = random.Random(head_dim)
    for B, H, K in ((1, 16, 1), (1, 32, 2), (2, 8, 1), (2, 12, 3)):
        for T in (1000, 1, 63, 2111 if (H, K) == (16, 1) else 1111):
            q, k, v, dout = tensors(choice, B, H, K, T, T, head_dim)
            problem = Problem(MASKS[mask](T).to("cuda"), head_dim**-0.5, deterministic=deterministic)
            wide = [x.double() for x in (q, k, v)]
            out, lse = reference.forward(*wide, problem)
            delta = (dout.double() * out).sum(-1)
            wanted = [torch.zeros_like(x) for x in wide]
            reference.backward(
                dout.double(), *wide, lse, delta, problem, dq=wanted[0], dk=wanted[1], dv=wanted[2], accumulate=True
            )
            given = (dout, q, k, v, lse.float(), delta.float(), problem)
            for accumulate in (False, True):
                if (H, K) == (16, 1) and not (accumulate and mask == "full" and T > 2000):
                    assert count_key_parts(q, k, problem.mask, accumulate, not deterministic) > 1
                repeated: list[list[Tensor]] = []
                for _ in range(3):
                    value, dtype = (1.0, torch.float32) if accumulate else (torch.nan, q.dtype)
                    made = [torch.full(x.shape, value, dtype=dtype, device="cuda") for x in (q, k, v)]
                    hopper.backward(*given, dq=made[0], dk=made[1], dv=made[2], accumulate=accumulate)
                    repeated.append(made)
                split = accumulate and mask == "full" and not deterministic and head_dim <= 128  # by queries
                for place, (name, want) in enumerate(zip(("dq", "dk", "dv"), wanted, strict=True)):
                    found = [made[place] for made in repeated]
                    error = relative(found[0].double() - float(accumulate), want, *wanted)
                    assert error <= GRADIENT_BOUND, f"{name}: {B} x {H}/{K} heads, {T} tokens, {accumulate=}"
                    if deterministic or head_dim == 256 or (name != "dq" and not split):
                        assert torch.equal(found[0], found[1])
                        assert torch.equal(found[0], found[2])


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_gradients_of_few_keys(head_dim: int) -> None:
    """The queries of a head are divided. Compared with float64; sums of dK and dV have a fixed order."""
    from flashspan.kernels import hopper
    from flashspan.kernels.hopper.one_pass import count_key_parts
    from tests.kernels.hopper_cases import GRADIENT_BOUND, tensors

    choice = random.Random(head_dim)
    for B, H, T, S in ((2, 3, 4096, 77), (1, 2, 2111, 500), (1, 5, 1555, 128), (3, 1, 2600, 1300)):
        q, k, v, dout = tensors(choice, B, H, H, T, S, head_dim)
        assert count_key_parts(q, k, EVERYTHING, False, True) > 1
        problem = Problem(EVERYTHING, head_dim**-0.5)
        wide = [x.double() for x in (q, k, v)]
        out, lse = reference.forward(*wide, problem)
        delta = (dout.double() * out).sum(-1)
        wanted = [torch.zeros_like(x) for x in wide]
        into = dict(zip(("dq", "dk", "dv"), wanted, strict=True))
        reference.backward(dout.double(), *wide, lse, delta, problem, **into, accumulate=True)
        repeated = []
        for _ in range(3):
            made = {name: torch.full_like(x, torch.nan) for name, x in (("dq", q), ("dk", k), ("dv", v))}
            hopper.backward(dout, q, k, v, lse.float(), delta.float(), problem, **made, accumulate=False)
            repeated.append(made)
        for name, want in into.items():
            error = relative(repeated[0][name].double(), want, *wanted)
            assert error <= GRADIENT_BOUND, f"{name}: {B} x {H} heads, {T} queries, {S} keys"
            if name != "dq":
                assert all(torch.equal(repeated[0][name], made[name]) for made in repeated)
