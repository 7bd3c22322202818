"""Training: config, data, loop, checkpoints, metrics; composed from model, context and parallel.

This package is callable: `flashspan.train(preset="tiny", steps=20, context=2)` trains.
`help(flashspan.train.__wrapped__)` describes the arguments.
"""

import importlib
from typing import TYPE_CHECKING, Any

from flashspan.callable_module import make_callable

if TYPE_CHECKING:  # at run time, __getattr__ imports the same names on first use
    from .config import TrainConfig
    from .options import parse
    from .run import main, train

__all__ = ["TrainConfig", "main", "parse", "train"]

_HOMES = {"TrainConfig": "config", "main": "run", "parse": "options", "train": "run"}
"""The module of each public name. Only run.py imports torch, which `flashspan train --help` must not wait for."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


make_callable(__name__)
