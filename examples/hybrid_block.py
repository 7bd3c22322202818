"""A transformer block with sparse attention whose projections and MLP are split over ranks (tensor parallelism).

torchrun --nproc-per-node 2 examples/hybrid_block.py

`HybridBlock` receives attention as a function of q, k and v [B, H, T, D], here with a sliding window. The function gets
this rank's heads. The program compares the block on several ranks with the same block on one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flashspan import attention
from flashspan.checkpoint.sharded import full_state_dict, load_full_state_dict
from flashspan.parallel import ColumnParallelLinear, RowParallelLinear, apply_replicated, build_mesh


class HybridBlock(nn.Module):
    """x + output(attention(norm(x))), then x + down(silu(gate(norm(x))) * up(norm(x))). [B, T, E] -> [B, T, E].

    Heads and features are split over the mesh. With `sequence_parallel`, activations between the layers are split too:
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


def main() -> None:
    """Compare the block over all ranks with the block on this rank alone: the output, and the input's gradient."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    num_ranks = dist.get_world_size()
    make = partial(HybridBlock, 64, 4, 96, attention=partial(attention, causal=True, window=16), num_kv_heads=2)
    block = make(mesh=build_mesh(tensor=num_ranks)["tensor"])
    whole = make(mesh=build_mesh(data=num_ranks)["tensor"])
    load_full_state_dict(whole, full_state_dict(block))
    x, dout = torch.randn(2, 3, 100, 64)
    found, wanted = [], []
    for module, results in ((block, found), (whole, wanted)):
        mine = x.clone().requires_grad_()
        out = module(mine)
        results += [out.detach(), *torch.autograd.grad(out, mine, dout)]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    assert max(errors) < 1e-5
    numbers = [sum(p.to_local().numel() for p in module.parameters()) for module in (block, whole)]
    print(f"rank {dist.get_rank()}: {numbers[0]} of {numbers[1]} parameters, relative difference {max(errors):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
