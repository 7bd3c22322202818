"""A study of mixed precision: sums in float32 and float16, and the dtypes inside autocast.

flashspan profile --precision
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashspan.bench.report.tables import Table


def accumulate() -> list[tuple[str, float]]:
    """0.01 added a thousand times, with sum and addend in either precision: (description, sum)."""
    half, single = torch.float16, torch.float32
    ways = (
        ("float32 sum of float32", single, single, False),
        ("float16 sum of float16", half, half, False),
        ("float32 sum of float16", single, half, False),
        ("float32 sum of float16, converted first", single, half, True),
    )
    found = []
    for name, sum_dtype, dtype, convert in ways:
        total = torch.tensor(0, dtype=sum_dtype)
        for _ in range(1000):
            addend = torch.tensor(0.01, dtype=dtype)
            total += addend.type(single) if convert else addend
        found.append((name, float(total)))
    return found


class Toy(nn.Module):
    """Two linear layers with a ReLU and a LayerNorm between."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(num_in, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, num_out, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.fc1(x)
        normed = self.ln(first.relu())
        return first, normed, self.fc2(normed)


def autocast_dtypes(device: torch.device, dtype: torch.dtype) -> list[tuple[str, str]]:
    """The dtype of each part of the toy model under autocast."""
    torch.manual_seed(0)
    model = Toy(5, 3).to(device)
    x, target = torch.randn(4, 5, device=device), torch.randint(3, (4,), device=device)
    with torch.autocast(device.type, dtype):
        inside = next(model.parameters()).dtype
        first, normed, logits = model(x)
        loss = nn.functional.cross_entropy(logits, target)
    loss.backward()
    grad = model.fc1.weight.grad
    assert grad is not None
    parts = (
        ("parameters inside autocast", inside),
        ("output of fc1", first.dtype),
        ("output of LayerNorm", normed.dtype),
        ("logits", logits.dtype),
        ("loss", loss.dtype),
        ("gradients", grad.dtype),
    )
    return [(name, str(kind).removeprefix("torch.")) for name, kind in parts]


def norm_in_half() -> list[tuple[str, float]]:
    """The mean square of values around 300, computed entirely in each dtype: (dtype, value)."""
    x = torch.linspace(250, 350, 4096, dtype=torch.float64)
    found = [("float64", float((x * x).mean()))]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = x.to(dtype)
        found.append((str(dtype).removeprefix("torch."), float((y * y).mean())))
    return found


def tables(device: torch.device) -> list[Table]:
    """The tables of both experiments, and of the reason why norms are computed in float32."""
    sums = tuple((name, f"{value:.6f}", f"{abs(value - 10) / 10:.2%}") for name, value in accumulate())
    names = [(dtype, autocast_dtypes(device, dtype)) for dtype in (torch.float16, torch.bfloat16)]
    rows = tuple(
        (part, *(dict(found)[part] for _, found in names)) for part, _ in names[0][1]
    )  # fmt: skip
    squares = tuple((name, f"{value:.6g}") for name, value in norm_in_half())
    return [
        Table("0.01 added 1000 times: the sum should be 10", ("accumulation", "sum", "error"), sums),
        Table("dtypes inside autocast", ("part", "float16 autocast", "bfloat16 autocast"), rows, 3),
        Table("mean square of 250..350, as a norm needs it", ("dtype", "value"), squares),
    ]
