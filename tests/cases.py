"""Random inputs of attention, and gradients of its outputs under a random dout."""

import torch
from torch import Tensor


def inputs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def gradients(out: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return torch.autograd.grad(out, of, dout)
