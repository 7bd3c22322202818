"""A layer's matmuls with their epilogues: compared with float64 for any number of rows, and their cost by ptxas."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.kernels.compiler import compile_apart

PROGRAM = """
import json, sys, torch
from benchmarks.compile_kernels import compile_launch, product_launches
for dtype, head_dim, names in json.loads(sys.argv[1]):
    launches = product_launches(getattr(torch, dtype), head_dim)
    assert set(names) <= set(launches)
    for name in names or launches:
        cost = compile_launch(launches[name])
        print(json.dumps([name, cost.spilled_bytes, cost.shared_bytes, cost.warnings]))
"""


@pytest.mark.parametrize(
    ("dtype", "head_dim", "names"),
    [
        ("bfloat16", 64, ["gated"]),
        pytest.param("bfloat16", 64, [], marks=pytest.mark.slow),
        pytest.param("bfloat16", 128, [], marks=pytest.mark.slow),
        pytest.param("float16", 64, [], marks=pytest.mark.slow),
    ],
)
def test_they_compile_without_spills(dtype: str, head_dim: int, names: list[str]) -> None:
    found = compile_apart(PROGRAM, [(dtype, head_dim, names)])
    assert len(found) == (len(names) or 5)
    for name, spilled, shared, warnings in found:
        assert spilled == 0, name
        assert shared <= 232448, name
        assert not [line for line in warnings if "serialized" in line], name


def make(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).mul_(shape[-1] ** -0.5 * 2).to(dtype)


def assert_near(got: Sequence[Tensor], want: Sequence[Tensor], names: str, ulps: float = 1.0) -> None:
    """Check that errors are within a rounding of the result, or of its terms, estimated by the root mean square."""
    for name, a, b in zip(names.split(), got, want, strict=True):
        assert not a.isnan().any(), name
        size = torch.maximum(b.abs(), b.square().mean().sqrt())
        worst = ((a.double() - b).abs() / size).max().item()
        assert worst <= ulps * 2 * torch.finfo(a.dtype).eps, (name, worst)


ROWS = [1, 64, 127, 129, 1000, 4096]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "ffn_width"), [(256, 768), (200, 328), (2048, 8192)])
def test_swiglu_and_its_gradients(rows: int, width: int, ffn_width: int, dtype: torch.dtype) -> None:
    from flashspan.ops.kernels.gated import gated, gated_backward

    x, dy = make(rows, width, dtype=dtype, seed=1), make(rows, width, dtype=dtype, seed=2)
    wg, wu = make(ffn_width, width, dtype=dtype, seed=3), make(ffn_width, width, dtype=dtype, seed=4)
    wd = make(width, ffn_width, dtype=dtype, seed=5)
    gate, up, h = gated(x, wg, wu)
    wide = gate.double(), up.double()  # both computations start from these
    want = (x.double() @ wg.double().T, x.double() @ wu.double().T, torch.nn.functional.silu(wide[0]) * wide[1])
    assert_near((gate, up, h), want, "gate up h")
    dgate, dup, again = gated_backward(dy, wd, gate, up)
    assert torch.equal(again, h)
    leaves = [each.requires_grad_() for each in wide]
    (torch.nn.functional.silu(leaves[0]) * leaves[1]).backward(dy.double() @ wd.double())
    assert_near((dgate, dup), [leaf.grad for leaf in leaves if leaf.grad is not None], "dgate dup")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 64), (5, 1, 64), (16, 4, 128), (3, 3, 128)]
)
@pytest.mark.parametrize("period", [1, 2])
def test_projections(
    rows: int, num_heads: int, num_kv_heads: int, head_dim: int, period: int, dtype: torch.dtype
) -> None:
    from flashspan.model.rope import rotate
    from flashspan.ops.kernels.projection import project

    width = 520
    x = make(rows * period, width, dtype=dtype, seed=1)
    weights = tuple(
        make(heads * head_dim, width, dtype=dtype, seed=2 + i)
        for i, heads in enumerate((num_heads, num_kv_heads, num_kv_heads))
    )
    angles = make(rows, head_dim // 2, dtype=torch.float32, seed=5) * 40
    cos, sin = angles.cos(), angles.sin()
    wq, wk, wv = (x.double() @ weight.double().T for weight in weights)
    want = [
        rotate(each.view(period, rows, -1, head_dim), cos.unsqueeze(1).double(), sin.unsqueeze(1).double()).view(
            each.shape
        )
        for each in (wq, wk)
    ]
    want[0] *= 0.18
    assert_near(project(x, weights, cos, sin, 0.18), [*want, wv], "q k v")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("depths", [[2048], [136, 64], [512, 8, 72]])
def test_sums_of_products(rows: int, transposed: bool, added: bool, depths: list[int], dtype: torch.dtype) -> None:
    from flashspan.ops.kernels.residual import sum_of_products

    width = 328
    c = make(rows, width, dtype=dtype, seed=1) if added else None
    pairs = [
        (
            make(rows, depth, dtype=dtype, seed=depth),
            make(*((width, depth) if transposed else (depth, width)), dtype=dtype, seed=depth + 1),
        )
        for depth in depths
    ]
    want = sum(
        (a.double() @ (b.double().T if transposed else b.double()) for a, b in pairs),
        start=torch.zeros((), device="cuda").double(),
    )
    if c is not None:
        want = want + c.double()
    assert_near([sum_of_products(c, *pairs, transposed=transposed)], [want], "sum")


@pytest.mark.gpu
def test_what_is_not_finite_stays_in_its_row() -> None:
    from flashspan.ops.kernels.gated import gated

    x, weight = make(300, 256, dtype=torch.bfloat16, seed=1), make(512, 256, dtype=torch.bfloat16, seed=2)
    calm = gated(x, weight, weight)
    x[7] = float("nan")
    for before, after in zip(calm, gated(x, weight, weight), strict=True):
        assert after[7].isnan().all()
        after[7] = before[7]
        assert torch.equal(before, after)
