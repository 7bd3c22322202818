"""A transformer block with any attention and tensor-parallel projections and MLP.

    block = HybridBlock(512, 8, 1536, attention=attend, mesh=mesh["tensor"])
    y = block(x)                                    # [B, T, E] -> [B, T, E]

`attend(q, k, v)` has [B, H, T, D] inputs and output: a sparse kernel, a ring over a context group, or PyTorch's
attention. It receives this rank's heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .tensor import ColumnParallelLinear, RowParallelLinear, apply_replicated


class HybridBlock(nn.Module):
    """x + output(attention(norm(x))), then x + down(silu(gate(norm(x))) * up(norm(x))). [B, T, E] -> [B, T, E].

    Heads and features are split over the mesh; with `sequence_parallel`, so are the activations between the layers:
    [B, T / ranks, E]. Other arguments of a call are passed to the attention. All ranks start with the weights of the
    mesh's first rank.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        ffn_width: int,
        *,
        attention: Callable[..., Tensor],
        mesh: DeviceMesh,
        num_kv_heads: int | None = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        ranks = mesh.size()
        if width % num_heads or num_heads % num_kv_heads:
            raise ValueError(
                f"heads must divide the width, and kv heads the heads: got width {width}, {num_heads} heads, "
                f"{num_kv_heads} kv heads"
            )
        if num_heads % ranks or num_kv_heads % ranks:
            raise ValueError(
                f"the tensor degree must divide the heads and the kv heads: got {num_heads} and {num_kv_heads} heads "
                f"on {ranks} ranks; use a smaller degree"
            )
        self.head_size, self.attention = width // num_heads, attention
        sequence_dim = 1 if sequence_parallel else None
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        column: dict[str, Any] = {"bias": False, "mesh": mesh, "enter": False, **where}
        row: dict[str, Any] = {"bias": False, "mesh": mesh, "sequence_dim": sequence_dim, **where}
        kv_width = num_kv_heads * self.head_size
        self.attention_norm = nn.RMSNorm(width, eps=1e-5, **where)
        # A fused layer for queries, keys and values would have an order of rows that depends on the degree.
        self.query = ColumnParallelLinear(width, width, **column)
        self.key = ColumnParallelLinear(width, kv_width, **column)
        self.value = ColumnParallelLinear(width, kv_width, **column)
        self.output = RowParallelLinear(width, width, **row)
        self.ffn_norm = nn.RMSNorm(width, eps=1e-5, **where)
        self.gate = ColumnParallelLinear(width, ffn_width, **column)
        self.up = ColumnParallelLinear(width, ffn_width, **column)
        self.down = RowParallelLinear(ffn_width, width, **row)
        for norm in (self.attention_norm, self.ffn_norm):
            apply_replicated(norm, mesh, sequence_dim=sequence_dim, enter=True)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        h = self.attention_norm(x)  # [B, T, E], also if x is a slice
        q, k, v = (self._heads(project(h)) for project in (self.query, self.key, self.value))
        mixed = self.attention(q, k, v, *args, **kwargs)  # [B, H / ranks, T, D]
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, T, H D] -> [B, H, T, D]
