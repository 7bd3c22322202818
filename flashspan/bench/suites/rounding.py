"""The error of a bfloat16 output for flat and for sharp softmax rows: flashspan compared with PyTorch.

    flashspan bench rounding --tokens 8192

The inputs are random, with q multiplied by 1, 2, 4 and 8. Errors are relative to float32 arithmetic, in units of 1e-3.
It prints the table of docs/numerics.md on any device; for an implementation that cannot run there, the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from textwrap import shorten

import torch
from torch import Tensor

from flashspan import attention, masks
from flashspan.bench.measure import record
from flashspan.bench.measure.clock import default_device
from flashspan.bench.measure.memory import free_bytes
from flashspan.bench.suites.attention import Attend, Shape, implementations

SHARP = (1.0, 2.0, 4.0, 8.0)
NAMES = ("sdpa-cudnn", "sdpa-flash", "flashspan", "flashspan-portable")


def compared(shape: Shape, device: torch.device) -> dict[str, Callable[[], Attend]]:
    """Name -> a function that makes attention. Includes ours with a block map of the same pairs, which rounds
    differently."""
    makers = implementations(shape)
    blocks = masks.Blocks.of(shape.mask(), shape.T, shape.T).to(device)
    return {name: makers[name] for name in NAMES} | {"flashspan, block map": lambda: partial(attention, mask=blocks)}


def inputs(shape: Shape, sharp: float, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    size = (shape.B, shape.H, shape.T, shape.D)
    q, k, v = (torch.randn(size, device=device, generator=generator).bfloat16() for _ in range(3))
    return [q * sharp, k, v]


def errors(shape: Shape, attend: Attend, device: torch.device) -> str:
    """The error for each sharpness, as text, or the reason why the implementation cannot run here."""
    found = []
    for sharp in SHARP:
        q, k, v = inputs(shape, sharp, device)
        try:
            found.append(record.output_error(q, k, v, attend(q, k, v), shape.mask()))
        except (RuntimeError, ValueError) as error:
            return f"  not served: {shorten(str(error), 70, placeholder='...')}"
    return "".join(f"{error * 1e3:8.3f}" for error in found)


def check_tokens(tokens: int, device: torch.device) -> None:
    """ValueError for numbers of tokens whose float32 inputs and output do not fit in memory."""
    if tokens < 1:
        raise ValueError(f"--tokens must be 1 or more: got {tokens}")
    needed, free = 4 * 4 * 2 * 128 * tokens, free_bytes(device.type)  # 4 tensors, 4 bytes, 2 heads of 128
    if free is not None and needed > free:
        raise ValueError(
            f"bench rounding must fit in memory: {tokens} tokens need {needed / 2**30:,.1f} GiB, "
            f"but {free / 2**30:,.1f} are available; use fewer --tokens"
        )


def bench_rounding(*, tokens: int = 8192, device: str = "") -> int:
    """The error of a bfloat16 output for flat and for sharp softmax rows: flashspan compared with PyTorch.

    Args:
        tokens: Number of queries and keys.
        device: Device type, cuda or cpu; by default a GPU if there is one.
    """
    where = default_device(device)
    check_tokens(tokens, where)
    for head_dim, pattern in ((64, "full"), (128, "causal")):
        shape = Shape(1, 2, 2, tokens, head_dim, pattern)
        print(f"{shape}, error in 1e-3; q times " + ", ".join(f"{sharp:g}" for sharp in SHARP))
        for name, make in compared(shape, where).items():
            print(f"  {name:<22}" + errors(shape, make(), where), flush=True)
    return 0
