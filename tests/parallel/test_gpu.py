"""On one GPU: the same code path as on many, with NCCL, side streams and device-side checks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.hybrid_block import HybridBlock
from flashspan.checkpoint.sharded import full_state_dict
from flashspan.launch import Ranks
from flashspan.parallel import (
    ColumnParallelLinear,
    DataParallel,
    ShardedOptimizer,
    VocabularyParallelEmbedding,
    apply_fully_sharded,
    build_mesh,
    clip_grad_norm,
    vocabulary_parallel_cross_entropy,
)
from tests.parallel.models import distance

pytestmark = pytest.mark.gpu


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _model(mesh: object) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [HybridBlock(64, 4, 96, attention=_causal, mesh=mesh, device="cuda") for _ in range(3)]
    head = ColumnParallelLinear(64, 50, mesh=mesh, device="cuda")
    return nn.Sequential(VocabularyParallelEmbedding(50, 64, mesh=mesh, device="cuda"), *blocks, head)


def _train(engine: str) -> dict[str, Tensor]:
    mesh = build_mesh()
    model = _model(mesh["tensor"])
    running: nn.Module = model
    if engine in ("bucketed", "naive"):
        running = DataParallel(model, engine, bucket_mb=0.01)  # type: ignore[arg-type]
    if engine == "fully sharded":
        apply_fully_sharded(model, mesh, list(model)[1:4])
    if engine == "plain":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, chunk_mb=0.01)
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(5):
        tokens = torch.randint(50, (2, 17), generator=generator, device="cuda")
        weight = torch.randn(2, 17, generator=generator, device="cuda")
        optimizer.zero_grad()
        loss = vocabulary_parallel_cross_entropy(running(tokens), tokens, vocab_size=50, mesh=mesh["tensor"])
        (loss * weight).sum().backward()
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
    return full_state_dict(model)


def test_every_engine_trains_on_a_gpu_as_the_bare_model_does() -> None:
    with Ranks(1, backend="nccl") as ranks:
        want = ranks.run(_train, "plain")[0]
        for engine in ("bucketed", "naive", "fully sharded"):
            got = ranks.run(_train, engine)[0]
            assert distance(got.values(), want.values()) <= 1e-5, engine
