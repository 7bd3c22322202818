"""Compare the machine code of every Hopper kernel in two checkouts, compiled for sm_90 on a machine without a GPU.

    git worktree add ../before COMMIT
    python benchmarks/compare_sass.py ../before .                  # every variant, some 15 minutes the first time
    python benchmarks/compare_sass.py ../before . --only 'forward d64'

Each checkout builds its own launches (benchmarks/compile_kernels.py), so module and constant names may differ between
the two. A variant counts as equal if Triton's own representation (TTGIR), from which the machine code is made, is the
same; then its machine code is not made, except with --assemble. If the TTGIR differs, SASS is compared: without
addresses, with labels and registers numbered in the order of their first use. Kernels are compiled without line
information: with it, ptxas orders instructions by the numbers of source lines, so a comment would change the code.
Results are kept under --cache, by a hash of the checkout's sources and Triton's release.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MASKS: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "full": {"mask": "full"},
    "window": {"mask": "window"},
    "rows": {"mask": "rows"},
    "blocks": {"mask": "blocks"},
    "long": {"mask": "causal", "num_tokens": 8192},
    "grouped": {"mask": "causal", "num_key_heads": 2, "num_batch": 4},
    "short": {"mask": "causal", "num_tokens": 1024, "num_batch": 8},
    "few": {"mask": "causal", "num_tokens": 256, "num_key_heads": 1, "num_batch": 128, "scale": 0.6931471805599453},
    "wide": {"mask": "wide", "num_tokens": 8192},
    "long rows": {"mask": "long rows", "num_tokens": 32768},
    "unit": {"mask": "causal", "num_key_heads": 2, "num_batch": 8, "scale": 0.6931471805599453},
    "unit window": {"mask": "window", "num_batch": 8, "scale": 0.6931471805599453},
    "parts": {"mask": "causal", "num_key_heads": 1, "num_batch": 2},
}
"""`num_batch` determines the number of parts of a group of query heads (4 in "parts", 1 in the others), and is so large
that few_tiles.py does not run the call."""


def names() -> Iterator[str]:
    """Every variant: kernel, head size, dtype, mask, and plain or carry (continues a carry or adds into gradients)."""
    passes = ("forward", "backward", "keys", "queries")
    for head_dim in (64, 128, 256):
        for dtype, mask in (("bfloat16", "causal"), ("bfloat16", "full"), ("float16", "causal")):
            yield from (f"{kind} d{head_dim} {dtype} {mask} plain" for kind in passes)
        for mask in ("window", "rows", "causal", "full"):
            yield from (f"{kind} d{head_dim} bfloat16 {mask} carry" for kind in passes)
    for carry in ("plain", "carry"):
        yield from (f"forward d160 bfloat16 {mask} {carry}" for mask in ("causal", "full", "short", "window", "rows"))
        for head_dim in (64, 128):
            yield from (f"{kind} d{head_dim} bfloat16 blocks {carry}" for kind in ("forward", "backward"))
            yield from (f"forward d{head_dim} bfloat16 {mask} {carry}" for mask in ("short", "wide", "long rows"))
        for mask in ("unit", "unit window", "few"):
            yield from (f"{kind} d64 bfloat16 {mask} {carry}" for kind in ("forward", "backward"))
    yield from (f"{kind} d{head_dim} bfloat16 rows plain" for head_dim in (64, 128) for kind in ("forward", "backward"))
    yield from (f"backward d128 bfloat16 {mask} plain" for mask in ("long", "grouped"))
    for carry in ("plain", "carry"):
        yield from (f"backward d{head_dim} bfloat16 parts {carry}" for head_dim in (64, 128))
        yield f"keys d256 bfloat16 parts {carry}"
    yield "forward d64 float16 blocks plain"
    for kind in ("projection", "gated", "gated backward", "residual", "gradients"):
        yield f"product {kind} d128 bfloat16"
    yield "product projection d64 bfloat16"
    yield "product residual d128 float16"


def launch_of(name: str) -> Any:
    """The launch of one variant, on meta tensors; None if there is no such kernel (one pass for heads of 256)."""
    import torch

    if name.startswith("product "):
        kind, head_dim, dtype = name.removeprefix("product ").rsplit(" ", 2)
        return _program().product_launches(getattr(torch, dtype), int(head_dim[1:]))[kind]
    kind, head_dim, dtype, *mask, carry = name.split(" ")
    options = dict(MASKS[" ".join(mask)])
    options["mask"] = _mask(options["mask"])
    launches = _program().hopper_launches(getattr(torch, dtype), int(head_dim[1:]), **options, carry=carry == "carry")
    return launches.get(kind)


def _program() -> Any:
    """The module that builds launches and compiles them, from the checkout in which this process runs."""
    place = "benchmarks.compile_kernels"
    if not Path("benchmarks", "compile_kernels.py").exists():
        place = "flashspan.kernels.compile"  # where older commits have it
    return importlib.import_module(place)


def _mask(name: str) -> Any:
    from flashspan import masks
    from flashspan.kernels.masks import CAUSAL, EVERYTHING

    makers: dict[str, Callable[[], Any]] = {
        "causal": lambda: CAUSAL,
        "full": lambda: EVERYTHING,
        "window": lambda: masks.Band(-100, 0),
        "wide": lambda: masks.Band(-4095, 0),
        "rows": lambda: masks.documents([1000] * 4 + [96]),
        "long rows": lambda: masks.documents([16384, 16384]),
        "blocks": lambda: masks.Blocks.of(CAUSAL, 4096, 4096).to("meta"),
    }
    return makers[name]()


class Stopped(Exception):
    """Ends a compilation after its TTGIR is made."""


def compile_variants(folder: Path, assemble: bool, wanted: list[str]) -> None:
    """Compile variants of the checkout that is imported here, and write the results to a folder."""
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    def stop(*stage: Any, **_: Any) -> None:
        raise Stopped(next(x for x in stage if hasattr(x, "str_nodebug")).str_nodebug())

    if not assemble:
        CUDABackend.make_llir = stop
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for number, name in enumerate(wanted):
        print(f"{number + 1}/{len(wanted)} {name}", file=sys.stderr)
        launch = launch_of(name)
        record: dict[str, Any] = {}
        if launch is not None:
            try:
                compiled = _program().compile_for(launch, "cuda", 90)
                record = _inspect(compiled.asm["cubin"], compiled.metadata.shared, tools)
            except Stopped as stopped:
                record = {"ttgir": str(stopped)}
        _file(folder, name, assemble).write_text(json.dumps(record))


def _file(folder: Path, name: str, assemble: bool) -> Path:
    return folder / f"{name.replace(' ', '_')}.{'sass' if assemble else 'ttgir'}"


def _inspect(cubin: bytes, shared: int, tools: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "kernel.cubin"
        file.write_bytes(cubin)
        usage = _output(tools / "cuobjdump", "-res-usage", file)
        code = _output(tools / "nvdisasm", "-c", file)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    sass = normalised(code)
    local = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in sass)
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "local": local,
        "shared": shared,
        "sass": sass,
    }


def _output(*command: Any) -> str:
    return subprocess.run([str(x) for x in command], capture_output=True, text=True, check=True).stdout


def normalised(code: str) -> list[str]:
    """Instructions without addresses; registers, predicates and labels are numbered in the order of their first use."""
    numbers: dict[str, dict[str, str]] = collections.defaultdict(dict)

    def number(match: re.Match[str]) -> str:
        kind = match[1]
        return numbers[kind].setdefault(match[2], f"{kind}{len(numbers[kind])}")

    lines = []
    for line in code.splitlines():
        if found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*;)|^\s*(\.L_x_\d+:)", line):
            text = found[1] or found[2]
            lines.append(re.sub(r"(\.L_x_|\bUR|\bUP|\bR|\bP|\bB)(\d+)\b", number, text))
    return lines


def measure(checkout: Path, cache: Path, assemble: bool, wanted: list[str]) -> dict[str, dict[str, Any]]:
    """The results of every variant of a checkout: from the cache, or compiled in a separate process."""
    import triton

    sources = hashlib.sha256(triton.__version__.encode())
    files = [*checkout.glob("flashspan/**/kernels/**/*.py"), *checkout.glob("benchmarks/compile_kernels.py")]
    for file in sorted(files):
        sources.update(str(file.relative_to(checkout)).encode() + file.read_bytes())
    folder = cache / sources.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in wanted if not _file(folder, name, assemble).exists()]
    if missing:
        with tempfile.TemporaryDirectory() as empty:
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(x for x in (str(checkout), _path_to_triton()) if x),
                "TRITON_INTERPRET": "0",
                "TRITON_DISABLE_LINE_INFO": "1",
                "TRITON_CACHE_DIR": str(cache / "triton") if assemble else empty,
            }
            stage = "--assemble" if assemble else "--quick"
            command = [sys.executable, __file__, stage, "--compile", str(folder), *missing]
            subprocess.run(command, env=environment, cwd=checkout, check=True)
    return {name: json.loads(_file(folder, name, assemble).read_text()) for name in wanted}


def _path_to_triton() -> str:
    """The folder from which this process imported Triton, if PYTHONPATH has it; otherwise empty."""
    import triton

    place = str(Path(triton.__file__).parents[1])
    return place if place in os.environ.get("PYTHONPATH", "").split(os.pathsep) else ""


def compare(name: str, before: dict[str, Any], after: dict[str, Any]) -> tuple[bool, str]:
    """Whether the code is equal, and a line that says so or how it differs."""
    if before == after:
        return True, f"{name:50} equal (SASS)" if before else f"{name:50} no such kernel"
    if not before or not after:
        return False, f"{name:50} only {'before' if before else 'after'}"
    costs = [f"{key} {before[key]} -> {after[key]}" for key in before if key != "sass" and before[key] != after[key]]
    counts = [collections.Counter(_opcode(line) for line in x["sass"]) for x in (before, after)]
    changes = [
        f"{op} {counts[1][op] - counts[0][op]:+}"
        for op in sorted(counts[0] | counts[1])
        if counts[0][op] != counts[1][op]
    ]
    lines = f"lines {len(before['sass'])} -> {len(after['sass'])}"
    same = "same instructions in another order" if not changes else " ".join(changes)
    worse = any(after[key] > before[key] for key in ("registers", "stack", "local", "shared"))
    return False, f"{name:50} {'WORSE' if worse else 'differs'}: {', '.join([*costs, lines, same])}"


def _opcode(line: str) -> str:
    found = re.match(r"(?:@!?U?P[\dT]+ )?\s*([A-Z0-9_]+)", line)
    return found[1] if found else "label"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="checkout to compare with")
    parser.add_argument("after", type=Path, nargs="?", help="changed checkout")
    parser.add_argument("--only", default="", help="regular expression that names of variants must contain")
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "flashspan" / "sass", help="folder of results"
    )
    parser.add_argument(
        "--assemble", action="store_true", help="machine code of every variant, also of those equal before"
    )
    parser.add_argument("--quick", action="store_true", help="no machine code, also of those that differ")
    parser.add_argument("--compile", nargs="+", metavar="FOLDER VARIANT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_variants(Path(options.compile[0]), options.assemble, options.compile[1:])
        return
    if options.before is None or options.after is None:
        parser.error("needs two checkouts: before and after")
    wanted = [name for name in dict.fromkeys(names()) if re.search(options.only, name)]
    checkouts = [checkout.resolve() for checkout in (options.before, options.after)]
    lines, equal = [], 0
    if not options.assemble:
        before, after = (measure(checkout, options.cache, False, wanted) for checkout in checkouts)
        same = [name for name in wanted if before[name] == after[name]]
        lines += [f"{name:50} {'equal (TTGIR)' if before[name] else 'no such kernel'}" for name in same]
        wanted, equal = [name for name in wanted if name not in same], len(same)
    if options.quick:
        lines += [f"{name:50} differs (TTGIR)" for name in wanted]
    else:
        before, after = (measure(checkout, options.cache, True, wanted) for checkout in checkouts)
        results = [compare(name, before[name], after[name]) for name in wanted]
        lines += [line for _, line in results]
        equal += sum(same for same, _ in results)
    print(*lines, f"{equal} of {len(lines)} equal", sep="\n")


if __name__ == "__main__":
    main()
