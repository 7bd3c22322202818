"""The rooms of the package and who may import whom, held by reading the imports."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent / "flashspan"
# A room -> the rooms it may import. Some rooms are single modules: `files`, `launch`, `stdout`, `cli` and others.
ALLOWED = {
    "kernels": set(),
    "arguments": {"kernels"},
    "again": {"kernels"},
    "attention": {"kernels", "arguments", "again"},
    "masks": {"kernels"},
    "files": set(),
    "manifest": {"files"},
    "launch": {"scratch"},
    "scratch": set(),
    "stdout": set(),
    "context": {"kernels", "arguments", "attention"},
    "parallel": set(),
    "model": {"files", "manifest"},
    "plan": {"kernels", "context", "files", "model"},
    "train": {
        "kernels",
        "masks",
        "attention",
        "files",
        "manifest",
        "launch",
        "stdout",
        "context",
        "parallel",
        "model",
        "plan",
    },
    "generate": {"files", "kernels", "masks", "attention", "launch", "context", "parallel", "model", "train"},
    "bench": {
        "kernels",
        "masks",
        "arguments",
        "attention",
        "files",
        "launch",
        "context",
        "parallel",
        "model",
        "train",
        "generate",
        "plan",
    },
    "cli": {"launch", "stdout", "bench", "train", "generate", "plan"},
    "check": {"cli"},
    "__init__": {"masks", "attention"},
}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Rooms a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, f"{path}: a relative import stays in its folder"
            names = [] if node.level else [node.module or ""]
            if node.module == "flashspan":
                names = [f"flashspan.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("flashspan.")}
    return found


def test_imports_point_one_way() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        here = room(path)
        extra = imported(path) - {here} - ALLOWED.get(here, set())
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in extra]
    assert not wrong


def test_every_room_is_listed() -> None:
    assert {room(path) for path in ROOT.rglob("*.py")} <= set(ALLOWED)
