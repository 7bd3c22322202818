"""Training: config, data, loop, checkpoints, metrics; composed from model, context and parallel."""

from .config import TrainConfig, parse
from .prepare import prepare
from .run import main, train

__all__ = ["TrainConfig", "main", "parse", "prepare", "train"]
