"""The memory of a rank under each strategy, predicted and measured: parameters, gradients, optimizer, activations.

    predict(Transformer(12, 768, 12, 12, 2048, 32000), "fully sharded", num_ranks=4, tokens=8192)
    with record_activations(model) as kept:
        loss = ...
    measure(model, optimizer, kept)

The prediction is for a pre-norm transformer with a gated MLP, attention that stores no scores, an untied head, and an
optimizer with two moments. `tokens` is the number of tokens of a step on all ranks: data strategies divide it, tensor
strategies divide the weights. Activations are the tensors that autograd saves for backward. Temporary memory (a
gathered block under full sharding, a bucket in flight) is not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flashspan.parallel.collectives import local_part

Strategy = Literal["data", "sharded optimizer", "fully sharded", "tensor", "tensor and sequence"]


@dataclass(frozen=True)
class Transformer:
    """The sizes that determine a model's memory."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    ffn_width: int
    vocab_size: int

    @property
    def kv_width(self) -> int:
        return self.width // self.num_heads * self.num_kv_heads

    @property
    def num_split(self) -> int:
        """Parameters that tensor parallelism splits: all matrices."""
        per_layer = 2 * self.width * self.width + 2 * self.width * self.kv_width + 3 * self.width * self.ffn_width
        return self.num_layers * per_layer + 2 * self.vocab_size * self.width

    @property
    def num_whole(self) -> int:
        """Parameters that tensor parallelism does not split: the norms."""
        return (2 * self.num_layers + 1) * self.width


@dataclass(frozen=True)
class Ledger:
    """The bytes of one rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations


def predict(model: Transformer, strategy: Strategy, *, num_ranks: int, tokens: int) -> Ledger:
    """The ledger of one rank in float32, in closed form."""
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy must be one of {', '.join(get_args(Strategy))}: got {strategy!r}")
    tensor = num_ranks if strategy in ("tensor", "tensor and sequence") else 1
    sequence = num_ranks if strategy == "tensor and sequence" else 1
    parameters = model.num_split / tensor + model.num_whole
    held = parameters / num_ranks if strategy == "fully sharded" else parameters
    moments = 2 * (held / num_ranks if strategy == "sharded optimizer" else held)
    # A norm saves its input, the normalised input, one scale per token, and (for the next layer) its output.
    norm = (2 * model.width + 1) / sequence + model.width
    attention = 2 * model.width + 2 * model.kv_width + model.num_heads  # q, out, k, v, log-sum-exp
    layer = 2 * norm + (attention + 4 * model.ffn_width) / tensor
    per_token = model.num_layers * layer + norm + model.vocab_size / tensor
    local_tokens = tokens if tensor > 1 else tokens / num_ranks
    return Ledger(*(4 * count for count in (held, held, moments, per_token * local_tokens)))


@contextlib.contextmanager
def record_activations(model: nn.Module) -> Iterator[list[Tensor]]:
    """The tensors that autograd saves for backward in this context, without the model's parameters."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        local = local_part(tensor)
        # Looked up each time: full sharding replaces a module's parameters while it runs.
        if not any(_same_storage(local, local_part(p)) for p in model.parameters()):
            kept.append(local)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def measure(model: nn.Module, optimizer: Optimizer, activations: Iterable[Tensor]) -> Ledger:
    """The ledger of this rank: the bytes of its tensors' storage, each storage counted once."""
    params = list(model.parameters())
    return Ledger(
        parameters=count_bytes(params),
        gradients=count_bytes(p.grad for p in params if p.grad is not None),
        optimizer=count_bytes(v for entry in optimizer.state.values() for v in entry.values() if torch.is_tensor(v)),
        activations=count_bytes(activations),
    )


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the tensors' storage, shared storage counted once."""
    storages = {s.data_ptr(): s.nbytes() for s in (local_part(tensor).untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
