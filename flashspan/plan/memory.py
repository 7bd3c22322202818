"""Memory of one device in a training step of a LLaMA, in closed form: by kind, and its peak.

    run = Run(preset("llama-3-8b"), batch=8, tokens=131072, precision="bfloat16")
    held = ledger(run, ParallelConfig(context=8, shard=8))
    held.peak

It counts the tensors that `flashspan.model` saves for backward; a test compares it with what autograd saves.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from flashspan.model import LlamaConfig
from flashspan.model.loss import PART_NUMBERS, chunk_rows

Recompute = Literal["none", "full", "attention", "elementwise"]


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism, which multiply to the number of devices, and the settings that depend on them."""

    data: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    strategy: str = "ring"
    layout: str = "zigzag"
    recompute: Recompute = "none"
    sharded_optimizer: bool = False
    offload: bool = False  # layer inputs saved for recomputation are moved to host memory

    @property
    def num_devices(self) -> int:
        return self.data * self.shard * self.context * self.tensor

    @property
    def num_batch(self) -> int:
        """The number of ranks with different samples."""
        return self.data * self.shard

    def __str__(self) -> str:
        names = ("data", "shard", "context", "tensor")
        parts = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1] or ["one device"]
        if self.context > 1:
            parts.append(f"{self.strategy} {self.layout}")
        if self.recompute != "none":
            parts.append(f"recompute {self.recompute}")
        if self.sharded_optimizer:
            parts.append("sharded optimizer")
        return ", ".join(parts)


@dataclass(frozen=True)
class Run:
    """A training run: a model, samples per step over all devices, tokens per sample."""

    model: LlamaConfig
    batch: int
    tokens: int
    precision: str = "bfloat16"  # of matmuls
    weights: str = "float32"  # of weights, gradients and moments
    fused_norms: bool = True  # a GPU's norm saves its input; the CPU's also saves the normalised input
    plain_loss: bool = False  # as in `bench model`: PyTorch operators instead of the kernel of training on a GPU

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"a step needs 1 or more samples: got a batch of {self.batch}")
        if self.tokens < 1:
            raise ValueError(f"a sample needs 1 or more tokens: got {self.tokens}")
        for name in ("precision", "weights"):
            if getattr(self, name) not in ("float32", "bfloat16", "float16"):
                raise ValueError(f"{name} must be float32, bfloat16 or float16: got {getattr(self, name)!r}")

    def fused_loss(self, tensor: int) -> bool:
        """Whether a kernel overwrites logits with their gradients: on a GPU, if the vocabulary is not split."""
        return self.fused_norms and not self.plain_loss and tensor == 1

    @property
    def itemsize(self) -> int:
        return 4 if self.precision == "float32" else 2

    @property
    def wide(self) -> int:
        """Bytes of a weight, and of an element of the residual stream."""
        return 4 if self.weights == "float32" else 2


@dataclass(frozen=True)
class Ledger:
    """Bytes on one device. Not all are allocated at the same time: `peak` is the maximum."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float  # saved for backward, after the last layer
    casts: float  # 16-bit copies of weights, made for matmuls and saved for backward
    buffers: float  # keys, values and their gradients from other ranks
    logits: float  # of the tokens in the loss at one time, with their gradients
    gathered: float  # whole weights of sharded layers, while they are used

    @property
    def peak(self) -> float:
        """The larger of the end of forward, with all activations, and the optimizer's step, with all gradients."""
        temporary = self.activations + self.casts + max(self.buffers, self.logits) + self.gathered
        return self.parameters + self.optimizer + max(temporary, self.gradients)

    def items(self) -> list[tuple[str, float]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def ledger(run: Run, parallel: ParallelConfig) -> Ledger:
    """The memory of one device."""
    model, small, big, tensor = run.model, run.itemsize, run.wide, parallel.tensor
    split = parallel.shard * parallel.context if parallel.shard > 1 else 1
    norms = (2 * model.num_layers + 1) * model.width
    whole = (model.num_parameters - norms) / tensor + norms
    held = big * whole / split
    gradient_ranks = parallel.num_batch * parallel.context
    moments = 2 * held / (gradient_ranks if parallel.sharded_optimizer and split == 1 else 1)
    tokens = run.batch * run.tokens / gradient_ranks
    layer_parameters = (model.num_matrix_parameters - model.vocab_size * model.width) / model.num_layers / tensor

    kv_heads = kept_kv_heads(run, parallel)
    per_layer = activations_per_token(run, tensor, kv_heads)
    residual = 0.0 if parallel.offload else float(big * model.width)
    attention = small * model.head_dim * (2 * model.num_heads + 2 * kv_heads) / tensor
    attention += 4.0 * model.num_heads / tensor
    kept = {
        "none": per_layer,
        "full": residual,
        "attention": residual + attention,
        "elementwise": (big + small) * model.width + attention + small * 2 * model.ffn_width / tensor,
    }[parallel.recompute]
    activations = tokens * (model.num_layers * kept + final_per_token(run))
    casts = 0.0 if small == big or parallel.recompute != "none" else 2.0 * model.num_layers * layer_parameters
    if parallel.recompute != "none":  # one layer at a time is recomputed
        activations += tokens * per_layer
        casts = 0.0 if small == big else 2.0 * layer_parameters
    if split > 1:
        casts = min(casts, 4.0 * layer_parameters)  # casts of gathered weights are freed with them

    vocabulary = model.vocab_size / tensor
    numbers = min(tokens, chunk_rows(model.vocab_size, small)) * vocabulary
    # Gradients of a part of the logits are computed in float32: three tensors, a bool for the target, and a float32
    # copy of 16-bit logits.
    wide = min(numbers, max(PART_NUMBERS, vocabulary)) * 4 * (3.25 if small == 4 else 4.25)
    if run.fused_loss(tensor):
        wide = 0.0
    head = 4.0 * vocabulary * model.width  # the head's gradient, computed with the loss
    logits = small * numbers + wide + head
    gathered = big * (2 * layer_parameters + vocabulary * model.width) if split > 1 else 0.0
    return Ledger(held, held, moments, activations, casts, buffers(run, parallel), logits, gathered)


def kept_kv_heads(run: Run, parallel: ParallelConfig) -> int:
    """Kv heads saved for backward, per token: ulysses gives each rank at least one, so some are replicated."""
    split = parallel.tensor * parallel.context if parallel.strategy == "ulysses" else 1
    return max(run.model.num_kv_heads, split)


def activations_per_token(run: Run, tensor: int, kv_heads: int) -> float:
    """Bytes that one layer saves for backward, per token, with this number of kv heads."""
    model, small = run.model, run.itemsize
    queries, keys = model.num_heads * model.head_dim, kv_heads * model.head_dim
    # Each of two norms saves its input (and, unfused, the normalised input) and a scale.
    norms = 2 * (float(run.wide) * model.width * (1 if run.fused_norms else 2) + 4)
    # Inputs of matmuls: under autocast, each of q, k, v, gate and up saves its own cast; otherwise one per norm.
    entering = small * model.width * (5 if small != run.wide else 2)
    inside = small * (2 * queries + 2 * keys) + 4.0 * model.num_heads  # q, k, v, out and the log-sum-exp
    inside += 4 * small * model.ffn_width  # gate, silu(gate), up, silu(gate) * up
    if small != run.wide:
        inside += small * queries  # out, cast for the output matmul
    return norms + entering + inside / tensor


def final_per_token(run: Run) -> float:
    """Bytes saved per token outside the layers: for the last norm, and the gradient of its output from the loss."""
    norm = float(run.wide) * run.model.width * (1 if run.fused_norms else 2)
    return norm + (run.wide + run.itemsize) * run.model.width + 8


def buffers(run: Run, parallel: ParallelConfig) -> float:
    """The most bytes of other ranks' keys and values, and of their gradients, on a device."""
    if parallel.context == 1:
        return 0.0
    model, small = run.model, run.itemsize
    tokens = run.batch / parallel.num_batch * run.tokens / parallel.context
    kv = 2 * tokens * kept_kv_heads(run, parallel) / parallel.tensor * model.head_dim
    q = tokens * model.num_heads / parallel.tensor * model.head_dim
    if parallel.strategy == "gather":
        return (parallel.context - 1) * kv * (small + 4)
    if parallel.strategy == "ulysses":
        return (2 * q + 2 * kv) * small + q * small
    if parallel.strategy == "helper":
        return 2 * kv * (small + 4) + 2 * q * (2 * small + 4)
    return 2 * kv * (small + 4)  # one in use, one being received; their gradients, one hop behind
