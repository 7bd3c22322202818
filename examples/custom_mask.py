"""A mask written as a rule for pairs (query i, key j), combined with ready ones, and compared with a dense mask.

python examples/custom_mask.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flashspan import attention, masks

T = 600


def every_tenth(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Keys 0, 10, 20, ... are visible to all queries. The arguments are index tensors: batch, head, query, key."""
    return j % 10 == 0


mask = (masks.Blocks.from_rule(every_tenth, T, T) | masks.window(64)) & masks.causal()
print(mask)  # the number of full and partial tiles, and the share of skipped ones

torch.manual_seed(0)
q, k, v, dout = torch.randn(4, 1, 4, T, 64)
q.requires_grad_()
out = attention(q, k, v, mask=mask)  # tiles without a visible pair are not computed
out.backward(dout)

i, j = torch.arange(T)[:, None], torch.arange(T)
dense = ((j % 10 == 0) | ((i - j).abs() <= 64)) & (j <= i)
expected = F.scaled_dot_product_attention(q.detach(), k, v, attn_mask=dense)
error = ((out.detach() - expected).norm() / expected.norm()).item()
assert error < 1e-6, error
assert q.grad is not None
print(f"relative difference {error:.1e} from a dense mask")
