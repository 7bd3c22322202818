"""Compile a kernel launch without its GPU, and report its cost: registers, spills, shared memory, instructions (SASS).

    python -m benchmarks.compile_kernels         # every shipped tile of the Hopper and the portable kernels, for sm_90

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

from flashspan.kernels.launch import triton_abi
from flashspan.kernels.launch.compiling import launches_of
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.masks import CAUSAL, Blocks, Mask


@dataclass(frozen=True)
class Cost:
    """The cost of one kernel, as ptxas and the disassembler report it."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int
    instructions: collections.Counter[str]
    loops: list[collections.Counter[str]]  # instructions of each innermost loop with matmuls, in code order
    bursts: list[int]  # for each of these loops, the longest sequence of exponentials
    warnings: list[str]


def compile_launch(launch: Launch) -> Cost:
    """Compile a launch for sm_90, and read its cost from the machine code."""
    import triton

    compiled = compile_for(launch, "cuda", 90)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return _inspect(compiled.asm["ptx"], tools, compiled.metadata)


def compile_for(launch: Launch, kind: str, architecture: int | str) -> Any:
    """Triton's compiled kernel for an NVIDIA GPU ("cuda", 90) or an AMD GPU ("hip", "gfx942"). The launch's tensors may
    be on the meta device. `metadata.shared` of the result is a program's shared memory in bytes."""
    triton_abi.compile_for_architecture(architecture, kind)
    return triton_abi.compile_kernel(launch.kernel, launch.arguments, launch.grid, launch.constants)


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
    """Return the names of all instructions, and of the instructions in each innermost loop with matmuls."""
    names: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_]+)([^;]*);", line):
            target = re.search(r"`\((\.L_x_\d+)\)", found[3])
            # An unconditional jump back is not a loop: it ends code that the compiler moved out of line.
            if found[1] and found[2] == "BRA" and target and target[1] in labels:
                jumps.append((labels[target[1]], len(names)))
            names.append(found[2])
    loops = [(a, b) for a, b in jumps if "HGMMA" in names[a : b + 1]]
    inner = [(a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]
    return names, [names[a : b + 1] for a, b in inner]


def shipped_launches(dtype: torch.dtype, head_dim: int, **options: Any) -> dict[str, Launch]:
    """The launches of one call of the portable kernels on meta tensors, by pass."""
    from flashspan.kernels.contract import Problem
    from flashspan.kernels.portable.backward import backward_launches
    from flashspan.kernels.portable.forward import forward_launch

    mask, carry, dropout = options.get("mask", CAUSAL), options.get("carry", False), options.get("dropout")
    q, k, v, dout = (torch.empty(1, 8, 4096, head_dim, dtype=dtype, device="meta") for _ in range(4))
    rows = torch.empty(1, 8, 4096, device="meta")
    out, dq, dk, dv = (x.float() if carry else x for x in (q, q, k, v))
    forward = forward_launch(q, k, v, out, rows, mask, 0.125, carry, dropout)
    inputs, problem = (dout, q, k, v, rows, rows), Problem(mask, 0.125, dropout)
    return {"out": forward} | backward_launches(inputs, problem, (dq, dk, dv), carry)


def hopper_launches(
    dtype: torch.dtype,
    head_dim: int,
    *,
    mask: Mask = CAUSAL,
    carry: bool = False,
    num_batch: int = 1,
    num_key_heads: int = 8,
    num_tokens: int = 4096,
    scale: float = 0.125,
) -> dict[str, Launch]:
    """The launches of attention with 8 heads on the Hopper kernels, by name: "forward"; "float16" before it, if
    V is converted to float16; "repair" after it, if rows may need repair; "backward" in one pass, if the head size
    allows it; "keys" and "queries", the two passes. With a carry, the gradients are added into float32."""
    from flashspan.kernels import hopper
    from flashspan.kernels.contract import Carry, Problem
    from flashspan.kernels.hopper.tensors import block_dim
    from flashspan.kernels.hopper.tiles import BACKWARD

    q = torch.empty(num_batch, 8, num_tokens, head_dim, dtype=dtype, device="meta")
    k = torch.empty(num_batch, num_key_heads, num_tokens, head_dim, dtype=dtype, device="meta")
    rows = q.new_empty(q.shape[:3], dtype=torch.float32)
    past = Carry(q.float(), rows) if carry else None
    dq, dk = (x.float() if carry else x for x in (q, k))
    problem = Problem(mask.to("meta"), scale)

    def backward(problem: Problem) -> list[Launch]:
        tensors = (q, q, k, k, rows, rows)
        return launches_of(lambda: hopper.backward(*tensors, problem, dq=dq, dk=dk, dv=dk, accumulate=carry))

    found = launches_of(lambda: hopper.forward(q, k, k, problem, carry=past, out_dtype=dtype))
    launches = {launch.kernel.__name__.removesuffix("_kernel"): launch for launch in found}
    assert launches["forward"].kernel.is_gluon(), "portable kernels serve this call"
    if block_dim(head_dim) in BACKWARD:
        launches["backward"] = backward(problem)[1]
    if not isinstance(mask, Blocks):  # block maps have no backward in two passes
        _, launches["keys"], *_, launches["queries"] = backward(problem._replace(deterministic=True))
    return launches


def product_launches(dtype: torch.dtype, head_dim: int) -> dict[str, Launch]:
    """The launches of a layer's matmuls with their epilogues, on meta tensors."""
    from flashspan.ops.kernels.gated import gated, gated_backward
    from flashspan.ops.kernels.projection import project
    from flashspan.ops.kernels.residual import sum_of_products

    M, E, F = 4096, 2048, 8192
    narrow, wide, weight, weight_t, square = (
        torch.empty(*shape, dtype=dtype, device="meta") for shape in ((M, E), (M, F), (F, E), (E, F), (E, E))
    )
    angles = torch.empty(M, head_dim // 2, device="meta")
    calls = {
        "projection": lambda: project(narrow, (square, square, square), angles, angles, 0.125),
        "gated": lambda: gated(narrow, weight, weight),
        "gated backward": lambda: gated_backward(narrow, weight_t, wide, wide),
        "residual": lambda: sum_of_products(narrow, (wide, weight_t), transposed=True),
        "gradients": lambda: sum_of_products(None, *[(wide, weight)] * 3, transposed=False),
    }
    return {name: launches_of(call)[0] for name, call in calls.items()}


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
