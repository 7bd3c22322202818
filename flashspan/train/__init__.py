"""Training: config, data, loop, checkpoints, metrics; composed from model, context and parallel."""

from flashspan.callable_module import make_callable

from .config import TrainConfig, parse
from .run import main, train

__all__ = ["TrainConfig", "main", "parse", "train"]

make_callable(__name__)
