"""The learning rate of a step: a linear warm-up, then a cosine."""

from __future__ import annotations

import math

from .config import OptimizerSection


def learning_rate(step: int, num_steps: int, options: OptimizerSection) -> float:
    """Rises during the warm-up, then falls along half a cosine to `final_lr` of the peak at the last step."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, num_steps - 1 - options.warmup)
    return options.lr * (options.final_lr + (1 - options.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
