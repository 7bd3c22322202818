"""The error of a bfloat16 output by how much of a row's weight few keys have, ours beside PyTorch's.

    python -m flashspan.bench.rounding --tokens 8192

On random inputs, q multiplied by 1, 2, 4 and 8; in 1e-3 of the output, against float32 arithmetic. The table of
docs/kernels.md, on whatever device there is; who cannot run there says why.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from flashspan import attention, masks
from flashspan.bench import record
from flashspan.bench.attention import Attend, Shape, implementations

SHARP = (1.0, 2.0, 4.0, 8.0)
NAMES = ("sdpa-cudnn", "sdpa-flash", "flashspan", "flashspan-portable")


def contenders(shape: Shape, device: torch.device) -> dict[str, Callable[[], Attend]]:
    """Name -> a function that makes attention: a block map of the same pairs is ours, and rounded in another way."""
    makers = implementations(shape)
    blocks = masks.Blocks.of(shape.mask(), shape.T, shape.T).to(device)
    return {name: makers[name] for name in NAMES} | {"flashspan, block map": lambda: partial(attention, mask=blocks)}


def inputs(shape: Shape, sharp: float, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    size = (shape.B, shape.H, shape.T, shape.D)
    q, k, v = (torch.randn(size, device=device, generator=generator).bfloat16() for _ in range(3))
    return [q * sharp, k, v]


def errors(shape: Shape, attend: Attend, device: torch.device) -> str:
    """One for each sharpness, as text, or why it cannot run here."""
    found = []
    for sharp in SHARP:
        q, k, v = inputs(shape, sharp, device)
        try:
            found.append(record.output_error(q, k, v, attend(q, k, v), shape.mask()))
        except (RuntimeError, ValueError) as error:
            return f"  {str(error).splitlines()[0]}"
    return "".join(f"{error * 1e3:8.3f}" for error in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    for head_dim, pattern in ((64, "full"), (128, "causal")):
        shape = Shape(1, 2, 2, options.tokens, head_dim, pattern)
        print(f"{shape}, error in 1e-3; q times " + ", ".join(f"{sharp:g}" for sharp in SHARP))
        for name, make in contenders(shape, torch.device(options.device)).items():
            print(f"  {name:<22}" + errors(shape, make(), torch.device(options.device)), flush=True)


if __name__ == "__main__":
    main()
