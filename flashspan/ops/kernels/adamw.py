"""AdamW of any number of tensors in one launch; each element is read once and written once.

On an H200 with 1.24 billion weights it takes 4.5 ms in bfloat16 and 9.1 ms in float32; PyTorch's fused kernel takes 7.6
and 11.7 ms. Each of PyTorch's launches covers 320 pieces of 65,536 elements, and most of the GPU is idle during its
last pieces. PyTorch also writes back the divided gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels.launch.launch import Launch, on

BLOCK, WARPS = 4096, 4
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def adamw_kernel(
    addresses, owners, first_blocks, sizes, rates, roots, divisor, skip, beta1, rest1, beta2, rest2, eps, shrink,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) != 0:
        return
    owner = tl.load(owners + tl.program_id(0))
    # The tensors' addresses and sizes are known only at run time; `fits` has checked that 16-byte loads are aligned.
    begin = addresses + 4 * owner
    p_param = tl.multiple_of(tl.load(begin).to(tl.pointer_type(DTYPE)), 16)
    p_grad = tl.multiple_of(tl.load(begin + 1).to(tl.pointer_type(DTYPE)), 16)
    p_mean = tl.multiple_of(tl.load(begin + 2).to(tl.pointer_type(DTYPE)), 16)
    p_square = tl.multiple_of(tl.load(begin + 3).to(tl.pointer_type(DTYPE)), 16)
    o = (tl.program_id(0) - tl.load(first_blocks + owner)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < tl.multiple_of(tl.load(sizes + owner), 16)
    grad = tl.load(p_grad + o, mask=inside).to(tl.float32) / tl.load(divisor)
    mean = beta1 * tl.load(p_mean + o, mask=inside).to(tl.float32) + rest1 * grad
    square = beta2 * tl.load(p_square + o, mask=inside).to(tl.float32) + rest2 * grad * grad
    param = tl.load(p_param + o, mask=inside).to(tl.float32) * shrink
    param -= tl.load(rates + owner) * mean / (tl.sqrt(square) / tl.load(roots + owner) + eps)
    tl.store(p_mean + o, mean.to(DTYPE), mask=inside)
    tl.store(p_square + o, square.to(DTYPE), mask=inside)
    tl.store(p_param + o, param.to(DTYPE), mask=inside)


def fits(*lists: Sequence[Tensor]) -> bool:
    """Whether `adamw` can update these parameters, gradients and moments: plain contiguous tensors of one device and
    dtype, whose addresses and sizes are multiples of 16."""
    tensors = [x for one in lists for x in one]
    kinds = {(x.device, x.dtype) for x in tensors}
    return (
        len(kinds) == 1
        and tensors[0].dtype in DTYPES
        and all(type(x.data) is Tensor and x.is_contiguous() and (x.data_ptr() | x.numel()) % 16 == 0 for x in tensors)
    )


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    divisor: Tensor,
    skip: Tensor,
) -> None:
    """Apply decoupled weight decay and Adam's update in place, to tensors that `fits`. `steps` already count this step.

    Gradients are divided by `divisor` as they are read. If `skip`, a tensor on the device, is not 0, nothing changes.
    """
    device, dtype = params[0].device, params[0].dtype
    owners, first_blocks, sizes = _blocks(tuple(p.numel() for p in params), device)
    if not len(owners):
        return
    places = [x.data_ptr() for four in zip(params, grads, means, squares, strict=True) for x in four]
    host = torch.tensor(places, dtype=torch.int64)
    if device.type == "cuda":  # a copy from pageable memory would wait for the device's queued work
        host = host.pin_memory()
    count = torch.stack(list(steps)).double()
    beta1, beta2 = betas
    with on(device):
        numbers = (beta1, 1 - beta1, beta2, 1 - beta2, eps, 1 - lr * decay)
        roots = (1 - beta2**count).sqrt().float()
        addresses = host.to(device, non_blocking=True)
        given = (addresses, owners, first_blocks, sizes, (lr / (1 - beta1**count)).float(), roots, divisor, skip)
        adamw_launch(given, numbers, dtype)()


def adamw_launch(tensors: tuple[Tensor, ...], numbers: tuple[float, ...], dtype: torch.dtype) -> Launch:
    """The launch of `adamw`: one program for each block of elements."""
    constants = {"DTYPE": DTYPES[dtype], "BLOCK": BLOCK, "num_warps": WARPS}
    return Launch(adamw_kernel, (len(tensors[1]),), (*tensors, *numbers), constants)


@lru_cache(16)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensor of each block of elements, the first block of each tensor, and the size of each tensor."""
    size = torch.tensor(sizes, dtype=torch.int64, device=device)
    blocks = -(-size // BLOCK)
    owners = torch.arange(len(sizes), dtype=torch.int32, device=device).repeat_interleave(blocks)
    return owners, blocks.cumsum(0) - blocks, size
