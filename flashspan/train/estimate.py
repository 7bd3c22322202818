"""What a run will hold, before it is started."""

from __future__ import annotations

import torch

from flashspan.plan.memory import Ledger, Mixture, Run, ledger

from .config import TrainConfig
from .pattern import make_pattern, visible_share


def describe_plan(config: TrainConfig, num_ranks: int) -> str:
    """The model, the mesh and the bytes of one rank, in words."""
    shape = config.model.resolve()
    degrees = config.parallel.degrees(num_ranks)
    held = estimate(config, num_ranks)
    num_tokens = config.data.sequence
    share = visible_share(make_pattern(config.attention, num_tokens, torch.device("cpu")), num_tokens)
    lines = [
        f"model   {shape.num_parameters / 1e6:,.1f} M parameters, {shape.num_layers} layers of width {shape.width}",
        f"mesh    {' x '.join(f'{axis} {degree}' for axis, degree in degrees.items())} = {num_ranks} ranks",
        f"step    {config.train.batch} samples x {config.data.sequence} tokens = "
        f"{config.train.batch * config.data.sequence:,} tokens, {config.train.accumulate} backward passes",
        f"sight   {config.attention.pattern}: {share:.1%} of the pairs that causal attention sees",
        "memory  of one rank, MiB, about:",
        *(f"  {name:<12} {size / 2**20:12,.1f}" for name, size in held.items()),
        f"  {'peak':<12} {held.peak / 2**20:12,.1f}",
    ]
    return "\n".join(lines)


def estimate(config: TrainConfig, num_ranks: int) -> Ledger:
    """Bytes one rank holds, by the planner's count."""
    degrees = config.parallel.degrees(num_ranks)
    # Of the batch, what one backward pass sees: that many tokens' activations live at a time.
    batch = max(1, config.train.batch // config.train.accumulate)
    on_gpu = config.parallel.device != "cpu" and torch.cuda.is_available()
    run = Run(
        config.model.resolve(),
        batch,
        config.data.sequence,
        config.train.precision,
        config.train.weights,
        fused_norms=on_gpu,
    )
    mixture = Mixture(
        **degrees,
        strategy=config.parallel.strategy,
        layout=config.parallel.layout,
        recompute=config.train.recompute,
        sharded_optimizer=config.optimizer.sharded,
        offload=config.train.offload,
    )
    return ledger(run, mixture)
