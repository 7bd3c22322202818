"""Types of host functions in the rooms of kernels: mypy cannot tell them from kernels, so its override is for both."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashspan.kernels

KERNEL_DECORATORS = {"jit", "builtin", "constexpr_function"}
"""Of functions that Triton compiles: their parameters are tiles, pointers and constants."""


def host_functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method that no decorator makes part of a kernel."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            called = [x.func if isinstance(x, ast.Call) else x for x in node.decorator_list]
            if not {getattr(x, "attr", getattr(x, "id", "")) for x in called} & KERNEL_DECORATORS:
                yield node


def untyped(source: str) -> list[str]:
    """Host functions with a parameter, or a result, of no stated type."""
    found = []
    for function in host_functions(source):
        x = function.args
        parameters = [*x.posonlyargs, *x.args, *x.kwonlyargs, *(y for y in (x.vararg, x.kwarg) if y)]
        missing = [y.arg for y in parameters if y.annotation is None and y.arg not in ("self", "cls")]
        if missing or function.returns is None:
            found.append(f"{function.name} (line {function.lineno}): {', '.join(missing) or 'result'}")
    return found


@pytest.mark.parametrize("room", ["hopper", "portable"])
def test_host_functions_state_their_types(room: str) -> None:
    files = sorted((Path(flashspan.kernels.__path__[0]) / room).glob("*.py"))
    assert files
    wrong = {file.name: names for file in files if (names := untyped(file.read_text()))}
    assert not wrong


def test_an_untyped_host_function_is_found_and_a_kernel_is_not() -> None:
    kernels = "@gluon.jit\ndef f(x): ...\n@triton.jit(do_not_specialize=['n'])\ndef g(p, n): ...\n"
    assert not untyped(kernels + "class A:\n    def h(self, x: int, *rest: int) -> None: ...\n")
    assert untyped("def f(x: int, y) -> int: ...") == ["f (line 1): y"]
    assert untyped("def f(x: int): ...") == ["f (line 1): result"]
    assert untyped("@cache\ndef f(*x) -> int: ...") == ["f (line 2): x"]
