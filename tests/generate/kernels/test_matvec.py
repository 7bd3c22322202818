"""The matmuls of a decode step compared with float64, interpreted, and their machine code for sm_90."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashspan.generate.kernels import matvec
from flashspan.model.rope import rotate
from tests.kernels.compiler import compile_apart

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def hidden(x: Tensor, norm: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """`scaled` and `squares` of rows x [B, E], as the previous kernel would have written them."""
    squares = torch.full((parts, matvec.MAX_ROWS), torch.nan, device=DEVICE)
    squares[:, : len(x)] = x.float().square().sum(-1) / parts
    return (x.float() * norm.float()).to(x.dtype), squares


def normed(x: Tensor, norm: Tensor) -> Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], norm.double(), EPS)


def check(got: Tensor, want: Tensor, eps: float) -> None:
    assert got.isfinite().all()
    assert float((got.double() - want).norm()) <= eps * float(want.norm())


CASES = [(1, 33, torch.float32), (3, 200, torch.float32), (16, 130, torch.float16), (16, 48, torch.float32)]
BOUND = {torch.float32: 1e-6, torch.float16: 1e-3}


@pytest.mark.parametrize(("B", "E", "dtype"), CASES, ids=str)
@pytest.mark.parametrize(("H", "G", "D"), [(4, 2, 16), (2, 1, 64), (1, 1, 128), (3, 1, 6)])
def test_projections_are_rotated_and_keys_and_values_go_to_their_positions(
    B: int, E: int, dtype: torch.dtype, H: int, G: int, D: int
) -> None:
    x, norm = draw(1, B, E, dtype=dtype), draw(2, E, dtype=dtype)
    weights = [draw(3 + i, heads * D, E, dtype=dtype) for i, heads in enumerate((H, G, G))]
    positions = (torch.arange(B) * 7 % 19).to(DEVICE)
    angles = draw(6, B, D // 2)
    cos, sin = angles.cos(), angles.sin()
    scaled, squares = hidden(x, norm, 5)
    q, room = x.new_full((B, H, D), torch.nan), draw(7, 2, B, G, 19, D, dtype=dtype)
    before = room.clone()
    matvec.project_launch(scaled, squares, weights, cos, sin, positions, q, room, EPS, 1.0)()
    rows = normed(x, norm)
    want = [(rows @ weight.double().T).view(B, 1, -1, D) for weight in weights]
    turned = [rotate(w, cos.double()[:, None, None], sin.double()[:, None, None])[:, 0] for w in want[:2]]
    check(q, turned[0], BOUND[dtype])
    at = torch.arange(B, device=DEVICE)
    check(room[0, at, :, positions], turned[1], BOUND[dtype])
    check(room[1, at, :, positions], want[2][:, 0], BOUND[dtype])
    room[:, at, :, positions] = before[:, at, :, positions]
    assert torch.equal(room, before), "and nothing else of the cache is written"


@pytest.mark.parametrize(("B", "E", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("K", [17, 600])
def test_a_product_is_added_and_the_next_norm_prepared(B: int, E: int, dtype: torch.dtype, K: int) -> None:
    a, weight, norm = draw(1, B, K, dtype=dtype), draw(2, E, K, dtype=dtype), draw(3, E, dtype=dtype)
    x = draw(4, B, E, dtype=dtype)
    want = x.double() + a.double() @ weight.double().T
    scaled, squares = torch.full_like(x, torch.nan), matvec.new_squares(weight).fill_(torch.nan)
    matvec.add_launch(a, weight, x, norm, scaled, squares, 0.25)()
    check(x, want, BOUND[dtype])
    check(scaled, x.double() * norm.double() * 0.25, BOUND[dtype])
    check(squares[:, :B].sum(0), x.double().square().sum(-1), 1e-6)


@pytest.mark.parametrize(("B", "E", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("num_columns", [45, 128])
def test_gate_and_head(B: int, E: int, dtype: torch.dtype, num_columns: int) -> None:
    x, norm = draw(1, B, E, dtype=dtype), draw(2, E, dtype=dtype)
    gate, up = (draw(seed, num_columns, E, dtype=dtype) / E**0.5 for seed in (3, 4))
    scaled, squares = hidden(x, norm, 3)
    out, logits = (x.new_full((B, num_columns), torch.nan) for _ in range(2))
    matvec.gated_launch(scaled * 0.5, squares, gate, up, out, EPS, 0.5)()
    positions = torch.arange(9, 9 + matvec.MAX_ROWS, device=DEVICE)
    matvec.head_launch(scaled, squares, gate, logits, positions[:B], EPS, 1.0)()
    assert positions.tolist() == [*range(10, 10 + B), *range(9 + B, 9 + matvec.MAX_ROWS)]
    rows = normed(x, norm)
    check(logits, rows @ gate.double().T, BOUND[dtype])
    check(out, F.silu(rows @ gate.double().T) * (rows @ up.double().T), BOUND[dtype])


def test_a_token_begins_with_its_embedding_and_its_angles() -> None:
    E, B = 77, 3
    embed, norm, frequencies = draw(1, 11, E), draw(2, E), draw(3, 6).abs()
    tokens, positions = torch.tensor([[10], [0], [4]], device=DEVICE), torch.tensor([0, 130_000, 17], device=DEVICE)
    x, scaled = torch.empty(2, B, E, device=DEVICE)
    squares = torch.full((5, matvec.MAX_ROWS), torch.nan, device=DEVICE)
    cos, sin = torch.empty(2, B, 6, device=DEVICE)
    end = torch.zeros(B, 1, dtype=torch.int32, device=DEVICE)
    made = (x, scaled, squares, cos, sin, end)
    matvec.begin_launch(tokens, embed, norm, positions, frequencies, *made, 2.0)()
    assert torch.equal(x, embed[tokens[:, 0]])
    assert torch.equal(scaled, x * (norm * 2.0))
    assert torch.equal(end[:, 0], positions.int() + 1)
    check(squares[:, :B].sum(0), x.double().square().sum(-1), 1e-6)
    angles = positions[:, None].float() * frequencies
    check(cos, angles.double().cos(), 1e-6)
    check(sin, angles.double().sin(), 1e-6)


PROGRAM = """
import json, re, sys, torch
from dataclasses import replace
from benchmarks.compile_kernels import compile_for, compile_launch
from flashspan.generate.kernels import matvec
for kind, dtype, early, rows in json.loads(sys.argv[1]):
    dtype = getattr(torch, dtype)
    make = lambda *shape, dtype=dtype: torch.empty(*shape, dtype=dtype, device="meta")
    row, squares, angles = make(rows, 2048), matvec.new_squares(make(2048, 2048)), make(rows, 32, dtype=torch.float32)
    wide = make(8192, 2048)
    weights, positions = [make(width, 2048) for width in (2048, 512, 512)], make(rows, dtype=torch.int64)
    for table in (matvec.TABLE, matvec.ONE_ROW):
        table.update({name: replace(size, early=early) for name, size in table.items()})
    launch = {
        "project": lambda: matvec.project_launch(
            row, squares, weights, angles, angles, positions, make(rows, 32, 64), make(2, rows, 8, 8448, 64), 1e-5, 1.0
        ),
        "add": lambda: matvec.add_launch(make(rows, 8192), make(2048, 8192), row, row[0], row, squares, 1.0),
        "gated": lambda: matvec.gated_launch(row, squares, wide, wide, make(rows, 8192), 1e-5, 1.0),
        "head": lambda: matvec.head_launch(row, squares, make(128256, 2048), make(rows, 128256), positions, 1e-5, 1.0),
    }[kind]()
    cost, ptx = compile_launch(launch), compile_for(launch, "cuda", 90).asm["ptx"]
    copies = re.findall(r"cp\\.async\\.\\w+\\.shared\\.global[^,]*\\[[^\\]]*\\], \\[[^\\]]*\\], (\\w+)", ptx)
    order = re.findall("griddepcontrol.wait|ld.global|cp.async.cg", ptx)
    print(json.dumps([cost.registers, cost.spilled_bytes, cost.shared_bytes, sorted(set(copies)), order[0],
                      cost.instructions["HMMA"], launch.grid[0]]))
"""
COMMON = [("gated", "bfloat16", False, 16), ("add", "bfloat16", True, 1)]
REST = [
    (kind, dtype, early, rows)
    for kind in ("project", "add", "gated", "head")
    for dtype in ("bfloat16", "float16", "float32")
    for early in (False, True)
    for rows in (1, 16)
]


def check_compiled(*calls: tuple[str, str, bool, int]) -> None:
    for call, line in zip(calls, compile_apart(PROGRAM, calls), strict=True):
        registers, spilled, shared, copies, first, products, programs = line
        assert registers <= 255, call
        assert spilled == 0, call
        # With a narrow output, a program has a multiprocessor to itself; otherwise two programs fit.
        assert shared <= 232448 // (1 if programs <= 132 else 2), call
        assert "0x10" in copies, f"{call}: weights must be loaded ahead, 16 bytes at a time"
        assert copies == ["0x10"] or call[3] == 1, f"{call}: only a single row may be loaded in narrow pieces"
        assert products > 0, call
        assert (first == "griddepcontrol.wait") == call[2], f"{call}: with an early start nothing may be read before"


def test_tiles_compile_with_wide_pipelined_loads_and_no_spills() -> None:
    check_compiled(*COMMON)


@pytest.mark.slow
@pytest.mark.parametrize("call", REST, ids=str)
def test_every_tile_compiles(call: tuple[str, str, bool, int]) -> None:
    check_compiled(call)
