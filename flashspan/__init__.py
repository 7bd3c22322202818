"""flashspan: exact attention on one device or many."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flashspan import masks
from flashspan.attention import attention, explain

if TYPE_CHECKING:  # the same names, found on first use by __getattr__
    from flashspan.context import context_parallel
    from flashspan.generate.api import generate
    from flashspan.train.api import train

__version__ = "0.1.0"
__all__ = ["attention", "context_parallel", "explain", "generate", "masks", "train"]


def __getattr__(name: str) -> Any:
    """The names that bring torch.distributed or the trainer with them: imported on first use."""
    if name == "context_parallel":
        return importlib.import_module("flashspan.context").context_parallel
    if name in ("generate", "train"):
        return importlib.import_module(f"flashspan.{name}")  # a package that can be called: see callable_module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
