"""Host code in files with kernels has types. mypy cannot check this, because kernels have no Python types."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import flashspan

ROOT = Path(flashspan.__path__[0])
FILES = sorted(file for folder in ("kernels", "*/kernels", "masks") for file in ROOT.glob(f"{folder}/**/*.py"))
DEVICE_CODE = ("jit", "builtin", "constexpr_function", "aggregate")


def is_device_code(function: ast.FunctionDef) -> bool:
    decorators = [x.func if isinstance(x, ast.Call) else x for x in function.decorator_list]
    return any(getattr(x, "attr", getattr(x, "id", "")) in DEVICE_CODE for x in decorators)


def untyped(tree: ast.AST) -> list[str]:
    """The host functions with a parameter or a result without a type."""
    found = []
    for function in (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and not is_device_code(x)):
        a = function.args
        parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        typed = all(x is None or x.annotation is not None or x.arg in ("self", "cls") for x in parameters)
        if not typed or function.returns is None:
            found.append(function.name)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_host_code_is_typed(file: Path) -> None:
    assert untyped(ast.parse(file.read_text())) == []


def test_what_is_not_typed_is_found() -> None:
    host = "def host(x) -> None: pass\ndef launch(x: int): pass\ndef good(*x: int) -> int: ..."
    source = f"@triton.jit\ndef kernel(x): pass\n{host}"
    assert untyped(ast.parse(source)) == ["host", "launch"]
