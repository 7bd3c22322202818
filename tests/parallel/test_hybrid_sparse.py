"""Block-sparse attention and a tensor-parallel MLP in one block: equal at all degrees, with a mask per head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from examples.hybrid_block import HybridBlock
from flashspan import attention, masks
from flashspan.checkpoint.sharded import full_state_dict, load_full_state_dict
from flashspan.parallel import build_mesh
from flashspan.parallel.collectives import full_tensor
from tests.parallel.models import distance

HEADS, TOKENS = 4, 150


def _sparse(state: dict[str, Tensor] | None) -> tuple[dict[str, Tensor], Any]:
    mesh = build_mesh(tensor=dist.get_world_size())["tensor"]
    torch.manual_seed(0)
    block = HybridBlock(32, HEADS, 40, attention=attention, mesh=mesh, num_kv_heads=2)
    if state is not None:
        load_full_state_dict(block, state)
    visible = torch.rand(HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.2
    each = HEADS // mesh.size()
    first = mesh.get_local_rank() * each
    mask = masks.Blocks.from_dense(visible).heads(range(first, first + each))
    x, dout = torch.randn(2, 1, TOKENS, 32, generator=torch.Generator().manual_seed(2))
    x.requires_grad_()
    out = block(x, mask=mask)
    out.backward(dout)
    assert x.grad is not None
    grads = {name: full_tensor(p.grad) for name, p in block.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **grads}, full_state_dict(block)


def test_a_sparse_hybrid_block_is_the_same_on_two_ranks(on_ranks: Callable[..., list[Any]]) -> None:
    want, state = on_ranks(1, _sparse, None)[0]
    for got, _ in on_ranks(2, _sparse, state):
        assert got.keys() == want.keys()
        for name in want:
            assert distance([got[name]], [want[name]]) <= 1e-6, name
