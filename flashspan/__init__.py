"""flashspan: exact attention on one device or many."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time, __getattr__ imports the same names on first use
    from flashspan import masks
    from flashspan.attention import attention, explain
    from flashspan.context import context_parallel
    from flashspan.generate.api import generate
    from flashspan.train.api import train

__version__ = "0.1.0"
__all__ = ["attention", "context_parallel", "explain", "generate", "masks", "train"]

_HOMES = {"attention": "attention", "explain": "attention", "context_parallel": "context"}
"""The modules of public functions. The other public names are modules; two can be called, see callable_module.py."""


class _Package(ModuleType):
    """This package: `flashspan.attention` is the function, also after an import of the module of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_module = name == "attention" and isinstance(value, ModuleType)
        super().__setattr__(name, value.attention if is_module else value)


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `flashspan --help` must not wait for torch, whose import takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    module = importlib.import_module(f"flashspan.{_HOMES.get(name, name)}")
    globals()[name] = getattr(module, name) if name in _HOMES else module
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
