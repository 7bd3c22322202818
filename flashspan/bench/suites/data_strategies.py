"""The model that bench data trains, under each strategy of parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flashspan.attention import attention
from flashspan.bench.measure import trace
from flashspan.bench.measure.clock import synchronise
from flashspan.bench.measure.ledger import Ledger, Strategy, Transformer, measure, record_activations
from flashspan.context import context_parallel
from flashspan.parallel import (
    DataParallel,
    ShardedOptimizer,
    apply_fully_sharded,
    apply_tensor_parallel,
    build_mesh,
    vocabulary_parallel_cross_entropy,
)
from flashspan.parallel.data import Mode
from flashspan.parallel.tensor import Style

SIZES = Transformer(num_layers=6, width=256, num_heads=8, num_kv_heads=4, ffn_width=688, vocab_size=4096)
WINDOW = 32
BUCKET_MB = 4.0  # in proportion to this small model; the default is for larger ones
SPLIT: dict[str, Style] = {
    "embed": "vocabulary",
    "blocks.*_norm": "norm-entering",
    **{f"blocks.*.{name}": "column-entered" for name in ("query", "key", "value", "gate", "up")},
    "blocks.*.output": "row",
    "blocks.*.down": "row",
    "norm": "norm",
    "head": "column",
}


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Block(nn.Module):
    """A pre-norm transformer block without code for several devices; its projections determine the number of heads."""

    def __init__(self, sizes: Transformer, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.head_size = sizes.width // sizes.num_heads
        self.attention_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, sizes.kv_width, bias=False)
        self.value = nn.Linear(sizes.width, sizes.kv_width, bias=False)
        self.output = nn.Linear(sizes.width, sizes.width, bias=False)
        self.ffn_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.gate = nn.Linear(sizes.width, sizes.ffn_width, bias=False)
        self.up = nn.Linear(sizes.width, sizes.ffn_width, bias=False)
        self.down = nn.Linear(sizes.ffn_width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            project(h).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        x = x + self.output(self.attend(q, k, v).transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Embedding, blocks, norm and head: [B, T] -> [B, T, V]."""

    def __init__(self, sizes: Transformer, attend: Attend) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab_size, sizes.width)
        self.blocks = nn.ModuleList([Block(sizes, attend) for _ in range(sizes.num_layers)])
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Prepared:
    """A strategy that is ready to step: the module that runs, the model with the parameters, this rank's batch."""

    strategy: Strategy  # whose memory `predict` computes
    model: nn.Module
    running: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.running(self.tokens), self.tokens).backward()
        self.optimizer.step()

    def watch(self, device: torch.device) -> tuple[float, float]:
        """The milliseconds of communication in a profiled step, and the share of them that computation hid."""
        dist.barrier()
        with trace.profiled(device) as profiler:
            self.step()
            synchronise(device)
        return trace.wire_of(profiler.kineto_results.events(), device)

    def ledger(self) -> Ledger:
        """The measured memory, from one extra step."""
        self.optimizer.zero_grad()
        with record_activations(self.model) as kept:
            loss = self.loss(self.running(self.tokens), self.tokens)
        loss.backward()
        self.optimizer.step()
        return measure(self.model, self.optimizer, kept)


STRATEGIES = (
    *get_args(Mode),
    "torch DDP",
    "sharded optimizer",
    "fully sharded",
    "context",
    "tensor",
    "tensor and sequence",
    "hybrid",
)
SPLIT_BY: dict[str, Strategy] = {
    "sharded optimizer": "sharded optimizer",
    "fully sharded": "fully sharded",
    "tensor": "tensor",
    "tensor and sequence": "tensor and sequence",
    "hybrid": "tensor",
}
"""The strategy that determines a rank's memory; for the others it is "data"."""


def prepare(
    name: str,
    sizes: Transformer,
    batch: int,
    length: int,
    window: int = WINDOW,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a constant
) -> Prepared:
    """A strategy by name, with `batch` sequences per rank, ready to step. A collective."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = Model(sizes, _causal).to(device)
    tokens = torch.randint(sizes.vocab_size, (batch * num_ranks, length)).to(device)
    running: nn.Module = model
    strategy = SPLIT_BY.get(name, "data")
    loss: Callable[[Tensor, Tensor], Tensor] = loss_of
    mine = tokens.chunk(num_ranks)[rank]
    if name in get_args(Mode):
        running = DataParallel(model, name, BUCKET_MB)  # type: ignore[arg-type]
    elif name == "torch DDP":
        running = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    elif name == "sharded optimizer":
        running = DataParallel(model, bucket_mb=BUCKET_MB)
    elif name == "fully sharded":
        apply_fully_sharded(model, build_mesh(shard=num_ranks), model.blocks)
    elif name == "context":
        ring = context_parallel(dist.group.WORLD, num_tokens=length)
        model = Model(sizes, partial(ring, causal=True)).to(device)
        running, mine = DataParallel(model, bucket_mb=BUCKET_MB, op="sum"), ring.shard(tokens, 1)

        def loss(logits: Tensor, tokens: Tensor) -> Tensor:
            return loss_of(logits, tokens) / num_ranks
    elif name in ("tensor", "tensor and sequence", "hybrid"):
        sequence = name == "tensor and sequence"
        mine = tokens
        mesh = build_mesh(tensor=num_ranks)["tensor"]
        if name == "hybrid":
            model = running = Model(sizes, partial(attention, causal=True, window=window)).to(device)
        apply_tensor_parallel(model, mesh, SPLIT, sequence_dim=1 if sequence else None)

        def loss(logits: Tensor, tokens: Tensor) -> Tensor:
            return vocabulary_parallel_cross_entropy(logits, tokens, vocab_size=sizes.vocab_size, mesh=mesh).mean()
    else:
        raise ValueError(f"a strategy must be one of {', '.join(STRATEGIES)}: got {name!r}")
    params = list(model.parameters())
    if name == "sharded optimizer":
        return Prepared(strategy, model, running, ShardedOptimizer(params, torch.optim.AdamW), mine, loss)
    return Prepared(strategy, model, running, torch.optim.AdamW(params), mine, loss)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
