"""Few queries over many keys: keys divided over programs, in Triton's interpreter and, `pytest -m gpu`, on a GPU."""

from __future__ import annotations

import pytest
import torch

from flashspan import promise
from flashspan.kernels import portable
from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.failure import KernelFailed
from flashspan.kernels.launch import triton_abi
from flashspan.kernels.masks import EVERYTHING, Band, Mask, Rows
from flashspan.kernels.portable import decode
from flashspan.kernels.portable.tiles import fill
from flashspan.masks.patterns import ragged
from tests.kernels.cases import Inputs, Shape, check_lse, make_inputs, relative, solve
from tests.kernels.compiler import compile_apart

GPU = torch.cuda.is_available()
interpreted = pytest.mark.skipif(GPU, reason="the kernels are compiled here, not interpreted")


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small GPU, for which few parts are enough, because the interpreter runs programs one after another."""
    if not GPU:
        monkeypatch.setattr(decode, "multiprocessors", lambda device: 4)


def attend(x: Inputs, mask: Mask, *, scale: float = 0.3, carry: Carry | None = None) -> Carry:
    """Attention by the kernels of decode.py, even if others would be chosen."""
    dtype = x.q.dtype if carry is None else torch.float32
    done = decode.forward(x.q, x.k, x.v, Problem(mask, scale), carry=carry, out_dtype=dtype)
    assert done is not None
    return done


def check(x: Inputs, mask: Mask, *, scale: float = 0.3) -> None:
    right = promise.solve(x.q, x.k, x.v, x.dout, mask=mask, scale=scale, rounded=True)
    out, lse = attend(x, mask, scale=scale)
    ratios = right.ratios(x.q.dtype, out=out, lse=lse)
    assert max(ratios.values()) <= 1, ratios
    assert not out[lse == -torch.inf].any()


def causal(num_queries: int, num_keys: int) -> Band:
    """The last query sees the last key."""
    return Band(None, num_keys - num_queries)


def scattered(num_queries: int, num_keys: int) -> Rows:
    random = torch.Generator().manual_seed(0)
    start, end = torch.randint(0, num_keys + 1, (2, num_queries), generator=random)
    return Rows(start, end, num_keys)


CASES: dict[str, tuple[Shape, Mask]] = {
    "one query": (Shape(1, 1, 1, 1, 501, 64), EVERYTHING),
    "one query, heads of 40, 16 in a group": (Shape(1, 16, 1, 1, 301, 40), EVERYTHING),
    "one query and a window": (Shape(2, 3, 1, 1, 700, 80), Band(333, 650)),
    "one query, ragged batch": (Shape(3, 4, 2, 1, 333, 16), ragged([10, 333, 0], 1, 333)),
    "one query, parts by length": (Shape(3, 2, 1, 1, 1500, 16), ragged([1500, 40, 700], 1, 1500)),
    "one key": (Shape(2, 2, 1, 1, 1, 8), EVERYTHING),
    "large head": (Shape(1, 2, 1, 1, 150, 256), EVERYTHING),
    "few queries, causal": (Shape(1, 4, 2, 7, 333, 16), causal(7, 333)),
    "few queries, window": (Shape(1, 2, 1, 8, 601, 16), Band(250, 420)),
    "many rows, causal": (Shape(1, 4, 1, 9, 200, 32), causal(9, 200)),
    "more rows than a block": (Shape(1, 2, 1, 33, 150, 16), causal(33, 150)),
    "scattered rows": (Shape(1, 2, 2, 9, 290, 16), scattered(9, 290)),
    "rows that see nothing": (Shape(1, 2, 1, 20, 310, 16), Band(None, -7)),
}


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_keeps_the_promise(name: str) -> None:
    shape, mask = CASES[name]
    check(make_inputs(shape, seed=1), mask)


@interpreted
@pytest.mark.parametrize(
    ("shape", "mask", "scale"),
    [
        (Shape(1, 1, 1, 70, 333, 160), causal(70, 333), 0.1),
        (Shape(1, 1, 1, 70, 333, 160), causal(70, 333), -0.1),
        (Shape(1, 4, 2, 33, 170, 136), Band(20, 100), 0.1),
        (Shape(1, 3, 1, 23, 301, 192), EVERYTHING, 0.1),
        (Shape(1, 3, 1, 23, 301, 192), EVERYTHING, -0.1),
        (Shape(2, 2, 1, 35, 150, 160), ragged([150, 41], 35, 150), 0.1),
        (Shape(1, 2, 1, 50, 200, 160), Band(None, -7), 0.1),
    ],
    ids=str,
)
def test_a_head_as_two_tiles(shape: Shape, mask: Mask, scale: float) -> None:
    """Heads of 129 to 192, as 128 columns and 64."""
    x = make_inputs(shape, seed=9, dtype=torch.float16)
    rows = shape.num_queries * (shape.num_heads // shape.num_kv_heads)
    assert decode.in_two_tiles(decode.few_tile(rows, shape.head_dim, 2, x.q.device))
    check(x, mask, scale=scale)
    assert all(torch.equal(a, b) for a, b in zip(attend(x, mask), attend(x, mask), strict=True))


@interpreted
def test_nan_in_a_key_of_two_tiles_reaches_only_the_queries_that_see_it() -> None:
    x = make_inputs(Shape(1, 1, 1, 70, 290, 160), seed=5, dtype=torch.float16)
    mask = Band(20, 200)  # query i sees keys 20 + i to 200 + i
    clean = attend(x, mask)
    x.k[:, :, :20, 150], x.v[:, :, 270:, 150] = torch.nan, torch.inf
    assert torch.equal(attend(x, mask).out, clean.out)
    x.v[:, :, 269, 150] = torch.nan  # the last query's last key
    out, _ = attend(x, mask)
    assert torch.equal(out[:, :, :-1], clean.out[:, :, :-1])
    assert out[:, :, -1].isnan().all()


@interpreted
@pytest.mark.parametrize("layout", ["BTHD", "fused"])
def test_any_strides(layout: str) -> None:
    check(make_inputs(Shape(2, 4, 2, 3, 270, 16), seed=2, layout=layout), causal(3, 270), scale=-1.5)


@interpreted
def test_sixteen_bits() -> None:
    check(make_inputs(Shape(1, 4, 1, 1, 501, 64), seed=3, dtype=torch.float16), EVERYTHING)


@interpreted
@pytest.mark.parametrize("num_queries", [1, 5])
def test_a_carry_continues_the_softmax(num_queries: int) -> None:
    """The keys are in three parts; no query sees the second part."""
    x = make_inputs(Shape(1, 2, 1, num_queries, 450, 16), seed=4)
    mask = causal(num_queries, 450) & Band(150, None)
    right = solve(x, mask, 0.3)
    carry: Carry | None = None
    for keys in (range(300, 450), range(100), range(100, 300)):
        part = Inputs(x.q, x.k[:, :, keys.start : keys.stop], x.v[:, :, keys.start : keys.stop], x.dout, x.dlse)
        sliced = mask.slice(range(num_queries), keys)
        carry = attend(part, sliced, carry=carry)
    assert carry is not None
    assert relative(carry.out, right.out) <= promise.FORWARD
    check_lse(carry.lse, right.lse)


@interpreted
@pytest.mark.parametrize("num_queries", [1, 4])
def test_nan_in_a_key_reaches_only_the_queries_that_see_it(num_queries: int) -> None:
    x = make_inputs(Shape(1, 2, 1, num_queries, 290, 16), seed=5)
    mask = Band(20, 200)  # query i sees keys 20 + i to 200 + i
    clean = attend(x, mask)
    for tensor in (x.k, x.v):
        tensor[:, :, :20] = torch.nan
        tensor[:, :, 200 + num_queries :] = torch.inf
    assert torch.equal(attend(x, mask).out, clean.out)
    x.v[:, :, 200 + num_queries - 1] = torch.nan  # the last query's last key
    out, _ = attend(x, mask)
    assert torch.equal(out[:, :, :-1], clean.out[:, :, :-1])
    assert out[:, :, -1].isnan().all()


def test_calls_with_few_queries_are_taken_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 132)

    def taken(*shape: int, mask: Mask = EVERYTHING, dtype: torch.dtype = torch.bfloat16) -> bool:
        B, H, K, T, S, D = shape
        q, k = torch.empty(B, H, T, D, dtype=dtype, device="meta"), torch.empty(B, K, S, D, dtype=dtype, device="meta")
        return decode.takes(q, k, mask)

    assert taken(32, 32, 8, 1, 8192, 128)
    assert taken(1, 8, 8, 16, 1000, 64, dtype=torch.float32)
    assert taken(1, 8, 8, 1, 77, 64, mask=ragged([50], 1, 77))
    assert not taken(2, 16, 16, 4096, 77, 64)
    assert not taken(128, 8, 8, 128, 128, 64)
    assert not taken(1, 8, 8, 1, 0, 64)
    # Where one round of programs leaves fewer than three parts, only FEW rows.
    assert taken(1, 44, 44, 60, 1742, 128)
    assert not taken(4, 12, 12, 60, 1742, 128, mask=causal(60, 1742))
    assert not taken(16, 8, 8, 30, 700, 64)
    assert taken(16, 8, 8, 16, 700, 64)
    # If heads share keys, the kernels for many queries would load the keys for each head.
    assert taken(32, 32, 8, 8, 8192, 128)
    assert not taken(32, 32, 8, 8192, 8192, 128)
    # Heads as two tiles: two programs run on a multiprocessor.
    assert taken(2, 5, 5, 300, 5000, 160)
    assert not taken(2, 5, 5, 300, 5000, 256)
    assert not taken(1, 20, 5, 512, 4096, 160)


def test_the_keys_are_divided_so_that_the_gpu_is_busy() -> None:
    """Rounds of programs are full or many, and no part is smaller than two tiles unless one part is enough."""
    for num_streams in (1, 3, 8, 100, 128, 132, 200, 256, 265, 1000):
        for num_tiles in (1, 2, 3, 64, 2000):
            num_splits = fill(num_streams, num_tiles, 264)
            assert num_splits == 1 or num_tiles // num_splits >= 2
            rounds = num_streams * num_splits / 264
            assert num_tiles < 64 or rounds / -(-rounds // 1) > 0.7 or num_splits >= 0.9 * (num_tiles // 2)


def test_sequences_that_may_differ_in_length_have_more_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 132)
    q, k = torch.empty(16, 32, 1, 64, device="meta"), torch.empty(16, 8, 8592, 64, device="meta")
    end = torch.full((16, 1), 8192, dtype=torch.int32)
    differ, same = (Rows(torch.zeros_like(x), x, 8592, convex=True) for x in (end, end[0]))
    parts = [decode.count_splits(q.bfloat16(), k.bfloat16(), mask) for mask in (differ, same)]
    assert parts == [6, 3]


@interpreted
def test_a_precision_set_later_is_not_that_of_launches_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(decode, "replay", lambda build, given, tables, outputs, *values: asked.append(values))
    monkeypatch.setattr(triton_abi, "is_interpreting", lambda: False)
    q, k = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 300, 16)
    for allowed in ("high", "highest"):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(allowed)
        try:
            decode.forward(q, k, k, Problem(EVERYTHING, 0.25), carry=None, out_dtype=q.dtype)
        finally:
            torch.set_float32_matmul_precision(before)
    assert len(set(asked)) == 2


def test_what_does_not_compile_is_served_by_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*tensors: object) -> None:
        raise KernelFailed("no such instruction")

    monkeypatch.setattr(decode, "replay", fail)
    monkeypatch.setattr(decode, "FAILED", [])
    x = make_inputs(Shape(1, 2, 1, 1, 100, 16), seed=6)
    with pytest.warns(RuntimeWarning, match="few queries"):
        out, _ = portable.forward(x.q, x.k, x.v, Problem(EVERYTHING, 0.3))
    assert relative(out, solve(x, EVERYTHING, 0.3).out) <= promise.FORWARD
    assert not decode.takes(x.q, x.k, EVERYTHING)


PROGRAM = """
import json, sys, torch
from benchmarks.compile_kernels import compile_launch
from flashspan.kernels.masks import Band
from flashspan.kernels.portable import decode
for num_queries, head_dim, dtype in json.loads(sys.argv[1]):
    q = torch.empty(1, 32, num_queries, head_dim, dtype=getattr(torch, dtype), device="meta")
    k, mask = q.new_empty(1, 8, 16384, head_dim), Band(None, 16384 - num_queries)
    made = decode._room(q, q.dtype, decode.count_splits(q, k, mask))
    launches = decode.split_launch(q, k, k, *made[2:], mask, 0.1), decode.combine_launch(*made[2:], *made[:2], False)
    split, combine = (compile_launch(launch) for launch in launches)
    names = [split.instructions[name] for name in ("LDGSTS", "HMMA", "HGMMA")]
    print(json.dumps([split.spilled_bytes + combine.spilled_bytes, split.shared_bytes, *names]))
"""
COMMON = [(1, 128, "bfloat16")]
REST = [(T, D, "bfloat16") for T in (1, 4, 16, 64) for D in (16, 64, 80, 128, 256)]
REST += [(64, 136, "bfloat16"), (64, 160, "float16"), (64, 192, "bfloat16")]
REST += [(T, D, "float32") for T, D in ((1, 64), (1, 128), (16, 64), (1, 256), (64, 128))]
SPILLED = {
    (4, 16, "bfloat16"): 8,
    (64, 256, "bfloat16"): 32,
    (16, 256, "bfloat16"): 32,
    # Of Triton 3.6; Triton 3.7 spills less.
    (64, 136, "bfloat16"): 300,
    (64, 160, "float16"): 300,
    (64, 192, "bfloat16"): 300,
    (1, 256, "float32"): 600,
    (64, 128, "float32"): 400,
}


def check_compiled(*calls: tuple[int, int, str]) -> None:
    for call, line in zip(calls, compile_apart(PROGRAM, calls), strict=True):
        spilled, shared, copies, narrow, wide = line
        assert spilled <= SPILLED.get(call, 0), call
        assert shared <= 232448 // (2 if call[0] == 1 and call[2] == "bfloat16" else 1), call
        # A tile of K and one of V, 16 KiB each, are 8 copies of 16 bytes per thread: for three tiles ahead, and in the
        # loop.
        assert 0 < copies <= 64, call
        assert narrow + wide > 0, call


def test_one_query_compiles_with_wide_pipelined_loads_and_no_spills() -> None:
    check_compiled(*COMMON)


@pytest.mark.slow
@pytest.mark.parametrize("call", REST, ids=str)
def test_every_tile_compiles(call: tuple[int, int, str]) -> None:
    check_compiled(call)


ON_GPU = [
    (Shape(1, 32, 8, 1, 100_001, 64), EVERYTHING),
    (Shape(3, 8, 2, 1, 5000, 128), ragged([5000, 0, 77], 1, 5000)),
    (Shape(1, 32, 8, 64, 4099, 128), causal(64, 4099)),
    (Shape(1, 8, 2, 13, 4099, 256), Band(3000, 3500)),
    (Shape(2, 16, 1, 1, 3001, 80), Band(1000, None)),
    (Shape(1, 8, 8, 100, 4099, 40), causal(100, 4099)),
    (Shape(1, 4, 4, 333, 4099, 160), causal(333, 4099)),
]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("shape", "mask"), ON_GPU, ids=str)
def test_keeps_the_promise_on_a_gpu_and_repeats(shape: Shape, mask: Mask, dtype: torch.dtype) -> None:
    x = make_inputs(shape, seed=7, dtype=dtype, device="cuda")
    check(x, mask, scale=shape.head_dim**-0.5)
    once = attend(x, mask)
    assert all(torch.equal(a, b) for _ in range(20) for a, b in zip(attend(x, mask), once, strict=True))


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_graph_serves_positions_that_move_on_the_device() -> None:
    from flashspan import attention

    x = make_inputs(Shape(2, 8, 2, 1, 9000, 128), seed=8, dtype=torch.bfloat16, device="cuda")
    end = torch.full((2, 1), 9000, dtype=torch.int32, device="cuda")

    def step() -> torch.Tensor:
        return attention(x.q, x.k, x.v, mask=Rows(torch.zeros_like(end), end, 9000, convex=True))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([1, 2], [64, 65], [8999, 300], [9000, 0]):
        end.copy_(torch.tensor(lengths)[:, None])
        graph.replay()
        mask = ragged(lengths, 1, 9000)
        right = promise.solve(x.q, x.k, x.v, x.dout, mask=mask, scale=128**-0.5, rounded=True)
        assert max(right.ratios(torch.bfloat16, out=out).values()) <= 1, lengths


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_cache_of_more_than_two_to_the_31_elements() -> None:
    S, D = 2**20 + 5, 128
    k = torch.randn(1, S, 17, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)  # 2.28e9 elements
    q = torch.randn(1, 17, 1, D, device="cuda", dtype=torch.bfloat16)
    out = decode.forward(q, k, k, Problem(EVERYTHING, 1.0), carry=None, out_dtype=torch.float32)
    assert out is not None
    for head in (0, 16):
        weights = (k[0, head].double() @ q[0, head, 0].double()).softmax(0)
        assert relative(out.out[0, head, 0], weights @ k[0, head].double()) <= 5e-3
