"""Which room of the package may import which, and that no files import each other, read from the source."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent / "flashspan"
# A room -> the rooms it may import. Some rooms are single modules: `files`, `launch`, `stdout`, `cli` and others.
ALLOWED = {
    "kernels": set(),
    "arguments": {"kernels", "masks"},
    "call_cache": {"kernels"},
    "ops": {"kernels"},
    "attention_operator": {"kernels", "arguments", "call_cache"},
    "attention": {"kernels", "arguments", "call_cache", "attention_operator"},
    "masks": {"kernels"},
    "promise": {"kernels"},
    "agreement": set(),
    "files": set(),
    "lock": set(),
    "manifest": {"files"},
    "launch": {"scratch", "process", "stdout"},
    "process": set(),
    "callable_module": set(),
    "scratch": set(),
    "stdout": set(),
    "signatures": set(),
    "completion": set(),
    "progress": set(),
    "context": {"kernels", "arguments", "attention", "attention_operator", "agreement"},
    "parallel": {"agreement"},
    "model": {"files", "manifest"},
    "data": {"files", "progress", "launch", "process", "lock", "model"},
    "checkpoint": {"agreement", "files", "manifest", "model", "parallel"},
    "plan": {"progress", "stdout", "kernels", "context", "files", "model"},
    "train": {
        "completion",
        "callable_module",
        "process",
        "agreement",
        "kernels",
        "masks",
        "attention",
        "ops",
        "files",
        "lock",
        "manifest",
        "launch",
        "stdout",
        "context",
        "parallel",
        "model",
        "data",
        "checkpoint",
        "plan",
    },
    "generate": {
        "callable_module",
        "agreement",
        "files",
        "kernels",
        "masks",
        "attention",
        "launch",
        "progress",
        "process",
        "context",
        "parallel",
        "model",
        "data",
        "checkpoint",
    },
    "bench": {
        "kernels",
        "masks",
        "arguments",
        "attention",
        "files",
        "launch",
        "progress",
        "context",
        "parallel",
        "model",
        "data",
        "train",
        "generate",
        "plan",
    },
    "commands": {
        "stdout",
        "kernels",
        "promise",
        "arguments",
        "attention",
        "ops",
        "files",
        "launch",
        "progress",
        "context",
        "model",
        "train",
        "generate",
        "plan",
        "bench",
    },
    "integrations": {"kernels", "masks", "arguments", "attention"},
    "cli": {"signatures", "completion", "stdout", "commands", "bench", "train", "generate", "plan"},
    "__main__": {"cli"},
    "check": {"cli"},
    "__init__": {"masks", "attention", "context", "generate", "train"},
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in ROOT.rglob("*.py")}


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of the package that a module imports, at its top or inside a function."""
    path, found = MODULES[module], set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, f"{path}: a relative import stays in its folder"
            source = ".".join(filter(None, (package if node.level else "", node.module)))
            whole = {f"{source}.{alias.name}" for alias in node.names}
            found |= (whole & MODULES.keys()) or {source}
    return frozenset(found & MODULES.keys() - {module})


def room(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def reachable(module: str) -> set[str]:
    """Every module that this one imports, directly or through others."""
    seen, ahead = set[str](), list(imports(module))
    while ahead:
        if (other := ahead.pop()) not in seen:
            seen.add(other)
            ahead += imports(other)
    return seen


def test_imports_point_one_way() -> None:
    wrong = []
    for module in MODULES:
        here = room(module)
        extra = {room(other) for other in imports(module)} - {here, "__init__"} - ALLOWED.get(here, set())
        wrong += [f"{module} imports {name}" for name in sorted(extra)]
    assert not wrong


def test_every_room_is_listed() -> None:
    assert {room(module) for module in MODULES} == set(ALLOWED)


def test_no_file_is_in_a_circle_of_imports() -> None:
    """Late imports count too."""
    assert not sorted(module for module in MODULES if module in reachable(module))


def test_no_file_is_too_long_to_read_in_one_go() -> None:
    """At most 400 lines, a test at most 500."""
    for folder, most in (("flashspan", 400), ("benchmarks", 400), ("examples", 400), ("tests", 500)):
        for path in (ROOT.parent / folder).rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= most, f"{path.relative_to(ROOT.parent)} has {lines} lines"
