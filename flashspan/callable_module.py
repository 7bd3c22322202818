"""A package that can be called: `flashspan.train(...)` is a function, and `flashspan.train.config` a module in it.

Importing a submodule binds its name in the parent package, so a function of the same name would be lost with the first
`import flashspan.train.config`. A module whose class has `__call__` is both.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A package whose call is the function of the same name in its module `api`."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*args, **options)

    @property
    def __wrapped__(self) -> Any:
        """The function: `inspect.signature(flashspan.train)` is its signature."""
        api = importlib.import_module(f"{self.__name__}.api")
        return getattr(api, self.__name__.rpartition(".")[2])


def make_callable(name: str) -> None:
    """Make the package of this name callable. Its `__init__` calls this function."""
    sys.modules[name].__class__ = CallableModule
