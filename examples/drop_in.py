"""Replace PyTorch's attention by flashspan's in a small model, and compare outputs and gradients.

python examples/drop_in.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashspan import attention, explain


class SelfAttention(nn.Module):
    """8 query heads share 2 key heads. `attend` is either implementation."""

    def __init__(self, width: int, attend) -> None:
        super().__init__()
        self.attend, self.head_dim = attend, width // 8
        self.qkv = nn.Linear(width, (8 + 2 + 2) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (12, self.head_dim)).transpose(1, 2)  # [B, 12, T, D]
        q, k, v = qkv.split((8, 2, 2), dim=1)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal=True)


def run(attend, x: Tensor, dout: Tensor) -> list[Tensor]:
    """The model's output and its gradients, from the same weights."""
    torch.manual_seed(0)
    model = SelfAttention(x.shape[2], attend)
    out = model(x)
    out.backward(dout)
    return [out.detach(), *(p.grad for p in model.parameters())]


torch.manual_seed(1)
x, dout = torch.randn(2, 2, 333, 128)  # two sequences of 333 tokens
for ours, theirs in zip(run(after, x, dout), run(before, x, dout), strict=True):
    error = ((ours - theirs).norm() / theirs.norm()).item()
    assert error < 1e-5, error
    print(f"{tuple(theirs.shape)}: relative difference {error:.1e}")

q, k = torch.randn(2, 8, 333, 16), torch.randn(2, 2, 333, 16)
print(explain(q, k, k, causal=True))  # which implementation runs, and why the others do not
