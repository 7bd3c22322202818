"""Cross entropies of rows of logits, and gradients that overwrite the logits, in one kernel instead of a dozen.

A program reads its row twice: for the sum of the exponentials, then for the gradients. The second read should hit the
cache. So a program has many warps, few rows are processed at the same time, and logits that have been read twice are
evicted first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels.launch.launch import Launch, on

WARPS, PER_THREAD = 16, 16
"""Warps of a program, and logits that a thread reads at a time. On an H200, 4096 rows of 128,256 bfloat16 logits take
0.78 ms; the kernels that torch.compile makes take 1.20 ms."""


@triton.jit(do_not_specialize=["ignored"])
def cross_entropy_kernel(logits, targets, losses, ignored, V, LANES: tl.constexpr, EACH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    p_row = logits + row * V
    target = tl.load(targets + row)
    valid = (target != ignored).to(tl.float32)
    o = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    # Each lane keeps its own maximum and sum until the end, so the loop has no synchronisation.
    m = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for v0 in range(0, V, LANES * EACH):
        b = tl.load(p_row + v0 + o, mask=v0 + o < V, other=float("-inf")).to(tl.float32)
        top = tl.maximum(m, tl.max(b, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)  # for a lane that has read nothing but -inf
        total = total * tl.exp(m - safe) + tl.sum(tl.exp(b - safe[:, None]), 1)
        m = top
    most = tl.max(m, 0)
    lse = most + tl.log(tl.sum(total * tl.exp(m - most), 0))
    # An ignored row has no target. Load any logit, because it is multiplied by 0.
    at_target = tl.load(p_row + tl.where(target == ignored, 0, target)).to(tl.float32)
    tl.store(losses + row, (lse - at_target) * valid)
    tl.debug_barrier()  # the target's logit must be read before it is overwritten
    for v0 in range(0, V, LANES * EACH):
        b = tl.load(p_row + v0 + o, mask=v0 + o < V, other=0.0, eviction_policy="evict_first").to(tl.float32)
        gradient = (tl.exp(b - lse) - (v0 + o == target).to(tl.float32)) * valid
        tl.store(p_row + v0 + o, gradient.to(logits.dtype.element_ty), mask=v0 + o < V, eviction_policy="evict_first")


def losses_and_gradients(logits: Tensor, targets: Tensor, *, ignored: int) -> tuple[Tensor, Tensor]:
    """Losses [n], float32, of logits [n, V], and their gradients, written over the logits.

    A gradient is the probabilities, minus 1 at the target; it is 0 in a row whose target is `ignored`.
    """
    logits = logits.contiguous()
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if logits.numel():
        with on(logits.device):
            Launch(
                cross_entropy_kernel,
                (len(logits),),
                (logits, targets.contiguous(), losses, ignored, logits.shape[1]),
                {"LANES": 32 * WARPS, "EACH": PER_THREAD, "num_warps": WARPS},
            )()
    return losses, logits
