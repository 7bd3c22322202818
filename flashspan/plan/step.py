"""The time of a training step: matmuls, attention by its schedule, memory-bound operators, and communication."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from flashspan.context.generators import GENERATORS
from flashspan.context.layout import place
from flashspan.context.schedule import Schedule, Shape, reverse
from flashspan.context.ulysses import bytes_per_token, share_heads
from flashspan.context.visibility import Visibility
from flashspan.kernels.masks import CAUSAL
from flashspan.model import LlamaConfig

from .devices import Cluster
from .memory import ParallelConfig, Run
from .simulate import Simulation, simulate

SCHEDULED = 64  # the most tokens per rank in a schedule; for longer shards its result is scaled
# Operators that PyTorch dispatches in forward and in backward: each takes time on the host, a view nearly as much as a
# kernel. A test counts them in the model.
LAYER_OPERATORS = (60, 107)
CAST_OPERATORS = (16, 26)  # more per layer under autocast: of weights, matmul inputs and their gradients
OUTER_OPERATORS = (50, 15)  # the embedding, the rotation, the last norm and the loss
ATTENTION_OPERATORS = (15, 25)  # the host's time for a call of our attention, as a number of operators


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. Overlapped parts are counted once."""

    forward: float
    backward: float
    optimizer: float
    communication: float  # without attention's, and not hidden by computation
    attention: float  # forward and backward, with waiting
    waiting: float  # the part of it in which a rank waits for keys and values; the longest of all ranks

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.optimizer + self.communication


@functools.lru_cache(maxsize=256)
def schedules(strategy: str, layout: str, tokens: int, num_ranks: int, inner: int) -> tuple[Schedule, Schedule]:
    """The forward and backward schedule of causal attention, as the executor runs them."""
    visibility = Visibility(place(layout, tokens, num_ranks), CAUSAL)
    options = {"sizes": (num_ranks // inner, inner)} if strategy == "double_ring" else {}
    forward = GENERATORS[strategy](visibility, **options)
    return forward, reverse(forward)


def attention_time(run: Run, parallel: ParallelConfig, cluster: Cluster) -> tuple[Simulation, Simulation]:
    """One layer's attention, forward and backward, on one group of devices."""
    # Keep only the fields on which attention depends, so that equal cases are simulated once.
    samples = run.batch / parallel.num_batch
    config = ParallelConfig(
        context=parallel.context, tensor=parallel.tensor, strategy=parallel.strategy, layout=parallel.layout
    )
    return _attention_time(replace(run, batch=1), samples, config, cluster.resized(config.num_devices))


@functools.lru_cache(maxsize=1024)
def _attention_time(
    run: Run, samples: float, parallel: ParallelConfig, cluster: Cluster
) -> tuple[Simulation, Simulation]:
    model, num = run.model, parallel.context
    heads = max(1, model.num_heads // parallel.tensor)
    kv_heads = max(1, model.num_kv_heads // parallel.tensor)
    exchanges = (0.0, 0.0)  # forward and backward
    strategy, layout = parallel.strategy, parallel.layout
    if strategy == "ulysses" and num > 1:
        # Each rank computes its heads of the whole sequence: all-to-alls of q, k, v before, and of out after.
        shares, link = share_heads(heads, kv_heads, num), cluster.slowest(num, parallel.tensor)
        there, back = (
            2 * link.latency * num + samples * run.tokens / num * sent / link.bandwidth
            for sent in bytes_per_token(shares, model.head_dim, run.itemsize)
        )
        exchanges = (there, back)
        busiest = max(shares, key=lambda share: len(share.q))
        heads, kv_heads, num = len(busiest.q), len(busiest.kv), 1
        strategy, layout = "ring", "contiguous"
    shape = Shape(1, heads, kv_heads, model.head_dim, run.itemsize)
    scheduled = min(run.tokens, SCHEDULED * num)
    inner = max(1, min(num, cluster.per_node // parallel.tensor))
    found = []
    for schedule, exchange in zip(schedules(strategy, layout, scheduled, num, inner), exchanges, strict=True):
        one = simulate(
            schedule, shape, cluster, stride=parallel.tensor, scale=run.tokens / scheduled, num_batch=samples
        )
        found.append(one.delayed(exchange))
    return found[0], found[1]


def step_time(run: Run, parallel: ParallelConfig, cluster: Cluster) -> StepTime:
    """The time of a training step of one device among `parallel.num_devices`."""
    model, device, small = run.model, cluster.device, run.itemsize
    gradient_ranks = parallel.num_batch * parallel.context
    tokens = run.batch * run.tokens / gradient_ranks
    layer_parameters = (model.num_matrix_parameters - model.vocab_size * model.width) / parallel.tensor
    head_parameters = model.vocab_size * model.width / parallel.tensor
    speed = device.peak(small) * device.product_share
    traffic = device.bandwidth * device.traffic_share
    attend_forward, attend_backward = attention_time(run, parallel, cluster)

    matmuls = 2 * tokens * layer_parameters / speed
    loss = 6 * tokens * head_parameters / speed  # both gradients are computed in forward
    loss += tokens * model.vocab_size / parallel.tensor * moved_per_logit(run, parallel.tensor) / traffic
    memory_bound = tokens * model.num_layers * moved_per_token(run, parallel.tensor) / traffic
    casting = 6 * layer_parameters / traffic if small == 2 else 0.0
    layers_forward = matmuls + memory_bound + casting + model.num_layers * attend_forward.seconds
    host_forward, host_backward = host_time(run, device.launch)
    forward = max(layers_forward + loss, host_forward)
    layers_backward = 2 * matmuls + 2 * memory_bound + model.num_layers * attend_backward.seconds
    # Gradients of cast weights are cast back.
    layers_backward += casting
    if parallel.recompute == "full":
        layers_backward += layers_forward
        host_backward += host_forward
    elif parallel.recompute == "attention":
        layers_backward += layers_forward - model.num_layers * attend_forward.seconds
        host_backward += host_forward
    backward = max(layers_backward, host_backward)

    held = model.num_parameters / parallel.tensor
    split = parallel.shard * parallel.context if parallel.shard > 1 else 1
    mine = held / split / (gradient_ranks if parallel.sharded_optimizer and split == 1 else 1)
    # The host visits all parameters, about an operator's time each, before it launches one kernel.
    optimizer = 28 * mine / traffic + device.launch * num_tensors(model)
    communication = gradient_communication(parallel, cluster, 4 * held, forward, backward)
    communication += tensor_communication(
        parallel, cluster, model.num_layers * tokens * model.width * small, model.num_layers
    )
    attention = model.num_layers * (attend_forward.seconds + attend_backward.seconds)
    waiting = model.num_layers * (max(attend_forward.waiting) + max(attend_backward.waiting))
    return StepTime(forward, backward, optimizer, communication, attention, waiting)


def host_time(run: Run, launch: float) -> tuple[float, float]:
    """Seconds that the host takes to launch forward and backward: short kernels wait for it."""
    casts = CAST_OPERATORS if run.itemsize != run.wide else (0, 0)
    per_layer = [sum(counts) for counts in zip(LAYER_OPERATORS, casts, ATTENTION_OPERATORS, strict=True)]
    forward, backward = (
        launch * (run.model.num_layers * one + outer) for one, outer in zip(per_layer, OUTER_OPERATORS, strict=True)
    )
    return forward, backward


def num_tensors(model: LlamaConfig) -> int:
    """Parameter tensors: nine per layer, the embedding, the last norm, and the head unless tied."""
    return 9 * model.num_layers + (2 if model.tie_embeddings else 3)


def moved_per_token(run: Run, tensor: int) -> float:
    """Bytes that a layer's norms, RoPE, additions and gates read and write in forward, per token."""
    model, small = run.model, run.itemsize
    rows = model.head_dim * (model.num_heads + model.num_kv_heads) / tensor
    norms = 2 * (8 * model.width)
    casts = 5 * (4 + small) * model.width if small == 2 else 0
    rotation = rows * (2 * small + 4 * 4)
    additions = 2 * (8 + small) * model.width
    gate = 5 * small * model.ffn_width / tensor
    return norms + casts + rotation + additions + gate


def moved_per_logit(run: Run, tensor: int) -> float:
    """Bytes that the uncompiled loss reads and writes per logit, outside its matmuls. A test counts them."""
    small = run.itemsize
    if run.fused_loss(tensor):
        return 3.0 * small  # read for the sum and for the gradient, which overwrites it
    exponents = 4 * 6  # the maximum, differences to it, exponentials in place, and the sum
    gradient = 4 * 9  # a difference, its exponential, minus one at the target, times the loss mask
    target = 1 + 1 + 4  # a bool for the target, and its float
    back = 2 * small  # written over the logits
    casts = 2 * (4 + small) if small == 2 else 0
    return float(exponents + gradient + target + back + casts)


def gradient_communication(
    parallel: ParallelConfig, cluster: Cluster, gradient: float, forward: float, backward: float
) -> float:
    """Seconds of communicating gradients (and, if sharded, weights) that computation does not hide."""
    ranks = parallel.num_batch * parallel.context
    if ranks == 1:
        return 0.0
    link = cluster.slowest(ranks, parallel.tensor)
    part = (ranks - 1) / ranks * gradient / link.bandwidth
    if parallel.shard > 1:  # weights gathered twice, gradients scattered once
        gather, scatter = part + ranks * link.latency, part + ranks * link.latency
        return max(0.0, gather - forward) + max(0.0, gather + scatter - backward)
    extra = part if parallel.sharded_optimizer else 0.0  # updated weights are broadcast
    return max(0.0, 2 * part - backward) + 2 * ranks * link.latency + extra


def tensor_communication(parallel: ParallelConfig, cluster: Cluster, rows: float, num_layers: int) -> float:
    """Seconds of two all-reduces of a layer's rows forward and two backward, not overlapped."""
    if parallel.tensor == 1:
        return 0.0
    link = cluster.slowest(parallel.tensor)
    part = 2 * (parallel.tensor - 1) / parallel.tensor * rows / link.bandwidth
    return 4 * (part + num_layers * 2 * link.latency)
