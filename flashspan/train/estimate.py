"""What a run will hold, before it is started."""

from __future__ import annotations

from .config import TrainConfig


def describe_plan(config: TrainConfig, num_ranks: int) -> str:
    """The model, the mesh and the bytes of one rank, in words."""
    shape = config.model.resolve()
    degrees = config.parallel.degrees(num_ranks)
    ledger = estimate(config, num_ranks)
    lines = [
        f"model   {shape.num_parameters / 1e6:,.1f} M parameters, {shape.num_layers} layers of width {shape.width}",
        f"mesh    {' x '.join(f'{axis} {degree}' for axis, degree in degrees.items())} = {num_ranks} ranks",
        f"step    {config.train.batch} samples x {config.data.sequence} tokens = "
        f"{config.train.batch * config.data.sequence:,} tokens, {config.train.accumulate} backward passes",
        "memory  of one rank, MiB, about:",
        *(f"  {name:<12} {size / 2**20:12,.1f}" for name, size in ledger.items()),
        f"  {'total':<12} {sum(ledger.values()) / 2**20:12,.1f}",
    ]
    return "\n".join(lines)


def estimate(config: TrainConfig, num_ranks: int) -> dict[str, float]:
    """Bytes one rank holds: weights, gradients, optimizer, activations. What lives for a moment is not counted."""
    shape, degrees = config.model.resolve(), config.parallel.degrees(num_ranks)
    whole = shape.num_parameters / degrees["tensor"]
    split = degrees["shard"] * degrees["context"] if degrees["shard"] > 1 else 1
    held = 4.0 * whole / split
    gradient_ranks = degrees["data"] * degrees["shard"] * degrees["context"]
    moments = 2 * held / (gradient_ranks if config.optimizer.sharded and split == 1 else 1)
    tokens = config.train.batch * config.data.sequence / config.train.accumulate / gradient_ranks
    small = 4 if config.train.precision == "float32" else 2
    heads = shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)  # q, out, k, v
    inside: float = 2 * 4 * shape.width + 2 * small * shape.width
    inside += small * (heads + 4 * shape.ffn_width) / degrees["tensor"]
    kept = {"none": inside, "full": 4 * shape.width, "attention": 4 * shape.width + small * heads / degrees["tensor"]}
    activations = tokens * shape.num_layers * kept[config.train.recompute]
    if config.train.recompute != "none":
        activations += tokens * inside  # one layer at a time, again
    return {"weights": held, "gradients": held, "optimizer": moments, "activations": activations}
