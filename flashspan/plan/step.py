"""The time of a training step: products, attention by its schedule, operators that move memory, and communication."""

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

SCHEDULED = 64  # tokens per rank that a schedule is made for; longer shards are the same schedule, scaled
# Operators that PyTorch dispatches in forward and in backward: each takes the host's time, a view nearly as much as a
# kernel. A test counts them in the model.
LAYER_OPERATORS = (60, 107)
CAST_OPERATORS = (16, 26)  # more in a layer under autocast: weights and what enters the products, and their gradients
OUTER_OPERATORS = (50, 15)  # the embedding, the rotation, the last norm and the loss
ATTENTION_OPERATORS = (15, 25)  # what a call of our attention costs the host, in operators


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. Parts that overlap are counted where they show."""

    forward: float
    backward: float
    optimizer: float
    communication: float  # beyond attention's, and not hidden
    attention: float  # in forward and backward, waiting included
    waiting: float  # of it, the slowest rank's for keys and values

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.optimizer + self.communication


@functools.lru_cache(maxsize=256)
def schedules(strategy: str, layout: str, tokens: int, num_ranks: int, inner: int) -> tuple[Schedule, Schedule]:
    """The forward and backward schedule of causal attention, as the executor would run it."""
    visibility = Visibility(place(layout, tokens, num_ranks), CAUSAL)
    options = {"sizes": (num_ranks // inner, inner)} if strategy == "double_ring" else {}
    forward = GENERATORS[strategy](visibility, **options)
    return forward, reverse(forward)


def attention_time(run: Run, parallel: ParallelConfig, cluster: Cluster) -> tuple[Simulation, Simulation]:
    """One layer's attention, forward and backward, on one group of devices."""
    # What it does not depend on is made the same, so that it is simulated once.
    samples = run.batch / parallel.num_batch
    alike = ParallelConfig(
        context=parallel.context, tensor=parallel.tensor, strategy=parallel.strategy, layout=parallel.layout
    )
    return _attention_time(replace(run, batch=1), samples, alike, cluster.resized(alike.num_devices))


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
        # Each rank computes its heads of the whole sequence; q, k, v go there and out comes back.
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
    """The step of one device among `parallel.num_devices`."""
    model, device, small = run.model, cluster.device, run.itemsize
    gradient_ranks = parallel.num_batch * parallel.context
    tokens = run.batch * run.tokens / gradient_ranks
    layer_parameters = (model.num_matrix_parameters - model.vocab_size * model.width) / parallel.tensor
    head_parameters = model.vocab_size * model.width / parallel.tensor
    speed = device.peak(small) * device.product_share
    traffic = device.bandwidth * device.traffic_share
    attend_forward, attend_backward = attention_time(run, parallel, cluster)

    products = 2 * tokens * layer_parameters / speed
    loss = 6 * tokens * head_parameters / speed  # both gradients are made in forward
    loss += tokens * model.vocab_size / parallel.tensor * moved_per_logit(run, parallel.tensor) / traffic
    moving = tokens * model.num_layers * moved_per_token(run, parallel.tensor) / traffic
    casting = 6 * layer_parameters / traffic if small == 2 else 0.0
    layers_forward = products + moving + casting + model.num_layers * attend_forward.seconds
    host_forward, host_backward = host_time(run, device.launch)
    forward = max(layers_forward + loss, host_forward)
    layers_backward = 2 * products + 2 * moving + model.num_layers * attend_backward.seconds
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
    # The host goes through all parameters, about an operator's time each, before it launches the one kernel.
    optimizer = 28 * mine / traffic + device.launch * num_tensors(model)
    communication = gradient_communication(parallel, cluster, 4 * held, forward, backward)
    communication += tensor_communication(
        parallel, cluster, model.num_layers * tokens * model.width * small, model.num_layers
    )
    attention = model.num_layers * (attend_forward.seconds + attend_backward.seconds)
    waiting = model.num_layers * (max(attend_forward.waiting) + max(attend_backward.waiting))
    return StepTime(forward, backward, optimizer, communication, attention, waiting)


def host_time(run: Run, launch: float) -> tuple[float, float]:
    """Seconds that the host takes to launch forward and backward: the device waits for it where its work is short."""
    casts = CAST_OPERATORS if run.itemsize != run.wide else (0, 0)
    per_layer = [sum(counts) for counts in zip(LAYER_OPERATORS, casts, ATTENTION_OPERATORS, strict=True)]
    forward, backward = (
        launch * (run.model.num_layers * one + outer) for one, outer in zip(per_layer, OUTER_OPERATORS, strict=True)
    )
    return forward, backward


def num_tensors(model: LlamaConfig) -> int:
    """Parameters as the optimizer counts them: nine of a layer, the embedding, the last norm, and the head if apart."""
    return 9 * model.num_layers + (2 if model.tie_embeddings else 3)


def moved_per_token(run: Run, tensor: int) -> float:
    """Bytes that a layer's norms, rotations, additions and gates read and write in forward, per token."""
    model, small = run.model, run.itemsize
    rows = model.head_dim * (model.num_heads + model.num_kv_heads) / tensor
    norms = 2 * (8 * model.width)
    casts = 5 * (4 + small) * model.width if small == 2 else 0
    rotation = rows * (2 * small + 4 * 4)
    additions = 2 * (8 + small) * model.width
    gate = 5 * small * model.ffn_width / tensor
    return norms + casts + rotation + additions + gate


def moved_per_logit(run: Run, tensor: int) -> float:
    """Bytes that the loss, uncompiled, reads and writes for a logit between its products. A test counts them."""
    small = run.itemsize
    if run.fused_loss(tensor):
        return 3.0 * small  # read for the sum and for the gradient, which takes its place
    exponents = 4 * 6  # the largest, differences to it, their exponentials in place, and the sum
    slope = 4 * 9  # a difference, its exponential, less one at the target, times whether it counts
    target = 1 + 1 + 4  # whether it is one, and that as a number
    back = 2 * small  # into the logits' place
    casts = 2 * (4 + small) if small == 2 else 0
    return float(exponents + slope + target + back + casts)


def gradient_communication(
    parallel: ParallelConfig, cluster: Cluster, gradient: float, forward: float, backward: float
) -> float:
    """Seconds of gradient (and, sharded, weight) exchange that computing does not hide."""
    ranks = parallel.num_batch * parallel.context
    if ranks == 1:
        return 0.0
    link = cluster.slowest(ranks, parallel.tensor)
    part = (ranks - 1) / ranks * gradient / link.bandwidth
    if parallel.shard > 1:  # weights gathered twice, gradients scattered once
        gather, scatter = part + ranks * link.latency, part + ranks * link.latency
        return max(0.0, gather - forward) + max(0.0, gather + scatter - backward)
    extra = part if parallel.sharded_optimizer else 0.0  # updated weights go back out
    return max(0.0, 2 * part - backward) + 2 * ranks * link.latency + extra


def tensor_communication(parallel: ParallelConfig, cluster: Cluster, rows: float, num_layers: int) -> float:
    """Two all-reduces of a layer's rows forward and two backward, which nothing hides."""
    if parallel.tensor == 1:
        return 0.0
    link = cluster.slowest(parallel.tensor)
    part = 2 * (parallel.tensor - 1) / parallel.tensor * rows / link.bandwidth
    return 4 * (part + num_layers * 2 * link.latency)
