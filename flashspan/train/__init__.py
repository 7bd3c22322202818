"""Training: config, data, loop, checkpoints, metrics; composed from model, context and parallel."""

from .config import TrainConfig, parse
from .run import main, train

__all__ = ["TrainConfig", "main", "parse", "train"]
