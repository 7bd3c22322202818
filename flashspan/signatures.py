"""The signature and the docstring of a function, read from its source: `flashspan NAME --help` must not wait for torch.

Only the names that annotations and defaults use are evaluated, not the rest of the module. A name that cannot be read
from source (a class of ours, the result of a call) is imported.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent


@cache
def parse_module(name: str) -> tuple[ast.Module, bool]:
    """The syntax tree of a module of this package, and whether it is a package itself."""
    path = PACKAGE.joinpath(*name.split(".")[1:])
    is_package = path.is_dir()
    source = path / "__init__.py" if is_package else path.with_suffix(".py")
    return ast.parse(source.read_text(encoding="utf-8")), is_package


def find_function(module: str, name: str) -> ast.FunctionDef:
    nodes = parse_module(module)[0].body
    return next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)


def read_doc(module: str, name: str) -> str:
    return ast.get_docstring(find_function(module, name)) or ""


def read_types(module: str, name: str) -> dict[str, Any]:
    """The types of a function's parameters by name. Defaults are not evaluated."""
    given, names = find_function(module, name).args, Names(module)
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return {arg.arg: Any if arg.annotation is None else names.evaluate(arg.annotation) for arg in arguments}


def read_signature(module: str, name: str) -> inspect.Signature:
    """The signature of a function, with evaluated annotations and defaults."""
    node, names = find_function(module, name), Names(module)
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    both, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    pairs: list[tuple[ast.arg, ast.expr | None, Any]] = list(
        zip(positional, defaults, [both] * len(positional), strict=True)
    )
    pairs += zip(given.kwonlyargs, given.kw_defaults, [keyword] * len(given.kwonlyargs), strict=True)
    parameters = [
        inspect.Parameter(
            arg.arg,
            place,
            default=inspect.Parameter.empty if default is None else names.evaluate(default),
            annotation=Any if arg.annotation is None else names.evaluate(arg.annotation),
        )
        for arg, default, place in pairs
    ]
    return inspect.Signature(parameters)


class Names(dict[str, Any]):
    """The global names of a module, each evaluated on first use."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.module = module

    def evaluate(self, node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), self.module, "eval"), {"__builtins__": builtins}, self)

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __missing__(self, name: str) -> Any:
        tree, is_package = parse_module(self.module)
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        package = self.module if is_package else self.module.rpartition(".")[0]
                        source = ".".join(filter(None, (package if node.level else "", node.module)))
                        self[name] = self._find(source, alias.name)
                        return self[name]
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if value is not None and any(isinstance(target, ast.Name) and target.id == name for target in targets):
                try:
                    self[name] = self.evaluate(value)
                except (NameError, AttributeError, KeyError):
                    break
                return self[name]
        if hasattr(builtins, name):
            raise KeyError(name)
        self[name] = getattr(importlib.import_module(self.module), name)
        return self[name]

    @staticmethod
    def _find(source: str, name: str) -> Any:
        if source.split(".")[0] != PACKAGE.name:
            return getattr(importlib.import_module(source), name)
        path = PACKAGE.joinpath(*source.split(".")[1:], name)
        return Names(f"{source}.{name}") if path.with_suffix(".py").exists() else Names(source)[name]
