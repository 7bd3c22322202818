"""Compile a kernel launch without its GPU, and report its cost: registers, spills, shared memory, instructions (SASS).

    python -m flashspan.kernels.compile          # every shipped tile of the Hopper and the portable kernels, for sm_90

It needs Triton and no GPU: ptxas and the disassembler are part of Triton's wheel.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashspan.kernels.launch.launch import Launch

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Cost:
    """The cost of one kernel, as ptxas and the disassembler report it."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int
    instructions: collections.Counter[str]
    loops: list[collections.Counter[str]]  # instructions of each innermost loop that multiplies, in the code's order
    bursts: list[int]  # for each of these loops, the longest row of exponentials
    warnings: list[str]


def compile_launch(launch: Launch) -> Cost:
    """Compile for sm_90 and read the cost from the machine code."""
    import triton

    compiled = compile_for(launch, "cuda", 90)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return _inspect(compiled.asm["ptx"], tools, compiled.metadata)


def compile_for(launch: Launch, kind: str, architecture: int | str) -> Any:
    """Triton's compiled kernel for an NVIDIA GPU ("cuda", 90) or an AMD GPU ("hip", "gfx942"). The launch's tensors may
    be on the meta device. `metadata.shared` of the result is the shared memory of a program."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function = launch.kernel
    source_of = GluonASTSource if function.is_gluon() else ASTSource
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    options = {name: launch.constants[name] for name in ("num_warps", "num_stages") if name in launch.constants}
    free = set(function.do_not_specialize)
    for index, name in enumerate(function.arg_names):
        value = launch.arguments[index] if index < len(launch.arguments) else launch.constants[name]
        signature[name], aligned = _type_of(value, index >= len(launch.arguments), name in free)
        if signature[name] == "constexpr":
            constants[(index,)] = value
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = source_of(function, signature, constants, attributes)
    target = GPUTarget(kind, architecture, 32 if kind == "cuda" else 64)
    return triton.compile(source, target=target, options=options)


def _type_of(value: Any, constant: bool, free: bool) -> tuple[str, bool]:
    """Triton's type of an argument and whether 16 divides it, as its launcher would find them."""
    if constant:
        return "constexpr", False
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}", True
    if isinstance(value, float):
        return "fp32", False
    if hasattr(value, "block_shape"):  # a descriptor of the copy engine
        block = ",".join(str(size) for size in value.block_shape)
        return f"tensordesc<{TYPES[value.base.dtype]}[{block}],{value.layout!r}>", False
    if value == 1 and not free:
        return "constexpr", False
    return ("i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"), not free and value % 16 == 0


def _inspect(ptx: str, tools: Path, metadata: Any) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        code, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        code.write_text(ptx)
        log = subprocess.run(
            [tools / "ptxas", "-v", "--gpu-name=sm_90a", code, "-o", binary],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        sass = subprocess.run([tools / "nvdisasm", "-c", binary], capture_output=True, text=True, check=True).stdout
    names, loops = _instructions(sass)
    bursts = [
        max((len(list(run)) for name, run in itertools.groupby(loop) if name == "MUFU"), default=0) for loop in loops
    ]
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    return Cost(
        registers=int(registers.group(1)) if registers else 0,
        spilled_bytes=int(spills.group(1)) + int(spills.group(2)) if spills else 0,
        shared_bytes=metadata.shared,
        num_warps=metadata.num_warps,
        instructions=collections.Counter(names),
        loops=[collections.Counter(loop) for loop in loops],
        bursts=bursts,
        warnings=[line for line in log.splitlines() if "warning" in line.lower() or "C75" in line],
    )


def _instructions(sass: str) -> tuple[list[str], list[list[str]]]:
    """The names of all instructions, and of those in each of the innermost loops that multiply."""
    names: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_]+)([^;]*);", line):
            target = re.search(r"`\((\.L_x_\d+)\)", found[3])
            # A jump back without a condition is no loop: it ends code that the compiler moved out of line.
            if found[1] and found[2] == "BRA" and target and target[1] in labels:
                jumps.append((labels[target[1]], len(names)))
            names.append(found[2])
    loops = [(a, b) for a, b in jumps if "HGMMA" in names[a : b + 1]]
    inner = [(a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]
    return names, [names[a : b + 1] for a, b in inner]


def shipped_launches(dtype: torch.dtype, head_dim: int, **options: Any) -> dict[str, Launch]:
    """The launches of one call of the portable kernels on meta tensors, by pass."""
    from flashspan.kernels.masks import CAUSAL
    from flashspan.kernels.portable.backward import backward_launches
    from flashspan.kernels.portable.forward import forward_launch

    mask, carry, dropout = options.get("mask", CAUSAL), options.get("carry", False), options.get("dropout")
    q, k, v, dout = (torch.empty(1, 8, 4096, head_dim, dtype=dtype, device="meta") for _ in range(4))
    rows = torch.empty(1, 8, 4096, device="meta")
    out, dq, dk, dv = (x.float() if carry else x for x in (q, q, k, v))
    forward = forward_launch(q, k, v, out, rows, mask, 0.125, carry, dropout)
    return {"out": forward} | backward_launches(dout, q, k, v, rows, rows, mask, 0.125, dq, dk, dv, carry, dropout)


def hopper_launches(dtype: torch.dtype, head_dim: int, **options: Any) -> dict[str, Launch]:
    """The launches of one call of the Hopper kernels on meta tensors: "finer" if V is converted to float16, "forward"
    and "repair", "backward" in one pass if the head size has one, and "keys" and "queries", the two passes."""
    from flashspan.kernels.hopper.finer import finer_launch, pays, room_for
    from flashspan.kernels.hopper.launch import forward_launch
    from flashspan.kernels.hopper.one_pass import backward_launch
    from flashspan.kernels.hopper.parts import new_rows
    from flashspan.kernels.hopper.tensors import block_dim
    from flashspan.kernels.hopper.tiles import BACKWARD
    from flashspan.kernels.hopper.two_pass import two_pass_launches
    from flashspan.kernels.masks import CAUSAL, Blocks
    from flashspan.kernels.portable.forward import forward_launch as repair_launch
    from flashspan.kernels.portable.head_parts import room_for_parts

    mask, carry = options.get("mask", CAUSAL), options.get("carry", False)
    T, K, scale = options.get("num_tokens", 4096), options.get("num_key_heads", 8), options.get("scale", 0.125)
    q, dout = (torch.empty(1, 8, T, head_dim, dtype=dtype, device="meta") for _ in range(2))
    k, v = (torch.empty(1, K, T, head_dim, dtype=dtype, device="meta") for _ in range(2))
    rows, bad = torch.empty(1, 8, T, device="meta"), torch.empty(1, 8, T // 64, dtype=torch.int32, device="meta")
    out, dq, dk, dv = (x.float() if carry else x for x in (q, q, k, v))
    if options.get("parts"):  # of the query heads of each key head
        dk, dv = (room_for_parts(x, options["parts"]) for x in (k, v))
    launches, values = {}, v
    if pays(q, k, mask):
        values = room_for(v)
        launches["finer"] = finer_launch(v, values)
    launches["forward"] = forward_launch(q, k, values, out, rows, bad, mask, scale, carry)
    launches["repair"] = repair_launch(q, k, v, out, rows, mask, scale, carry, None, only=bad)
    given = (dout, q, k, v, new_rows(q), new_rows(q), mask, scale)
    counter = torch.empty(4, dtype=torch.int32, device="meta")
    if block_dim(head_dim) in BACKWARD:
        sums = q.float() if carry else torch.empty(q.numel() // 256, 256, device="meta")
        launches["backward"] = backward_launch(*given, sums, dk, dv, carry, counter, counter)
    if isinstance(mask, Blocks):  # which have no backward in two passes
        return launches
    launches["keys"], launches["queries"] = two_pass_launches(*given, dq, dk, dv, carry, counter, counter)
    return launches


def product_launches(dtype: torch.dtype, head_dim: int) -> dict[str, Launch]:
    """The launches of a layer's matmuls with their epilogues, on meta tensors."""
    from flashspan.kernels.hopper.gated import gated_backward_launch, gated_launch
    from flashspan.kernels.hopper.projection import projection_launch
    from flashspan.kernels.hopper.residual import sum_launch

    M, E, F = 4096, 2048, 8192
    narrow, wide, weight, turned = (
        torch.empty(*shape, dtype=dtype, device="meta") for shape in ((M, E), (M, F), (F, E), (E, F))
    )
    angles = torch.empty(M, head_dim // 2, device="meta")
    return {
        "projection": projection_launch(narrow, (turned[:, :E],) * 3, angles, angles, 0.125, (narrow,) * 3),
        "gated": gated_launch(narrow, weight, weight, (wide,) * 3),
        "gated backward": gated_backward_launch(narrow, turned, wide, wide, (wide,) * 3),
        "residual": sum_launch(narrow, narrow, [(wide, turned)], turned=True),
        "gradients": sum_launch(narrow, None, [(wide, weight)] * 3, turned=False),
    }


def main() -> None:
    """Print the cost of every shipped tile."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from flashspan.kernels.hopper.tiles import FORWARD
    from flashspan.kernels.portable.tiles import TABLE

    tables = {f"d{head_dim}": hopper_launches(torch.bfloat16, head_dim) for head_dim in FORWARD}
    tables["a layer's"] = product_launches(torch.bfloat16, 128)
    for of, launches in tables.items():
        for kind, launch in launches.items():
            cost = compile_launch(launch)
            print(
                f"hopper {kind:14} {of:9} registers {cost.registers:3} spilled {cost.spilled_bytes:4} "
                f"shared {cost.shared_bytes:6} HGMMA {cost.instructions['HGMMA']:3} "
                f"exponentials in a row {max(cost.bursts, default=0)}",
                *cost.warnings,
            )
    for (kind, size, head_dim), shape in TABLE.items():
        dtype = torch.bfloat16 if size == 2 else torch.float32
        cost = compile_launch(shipped_launches(dtype, head_dim)[kind])
        print(
            f"{kind:8} {str(dtype)[6:]:9} d{head_dim:<4}{shape!s:72} registers {cost.registers:3} spilled "
            f"{cost.spilled_bytes:4} shared {cost.shared_bytes:6} HGMMA {cost.instructions['HGMMA']}",
            *cost.warnings,
        )


if __name__ == "__main__":
    main()
