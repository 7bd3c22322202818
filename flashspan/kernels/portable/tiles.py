"""Tile sizes, in tables of measured values (nothing is tuned at start-up), and the precision of float32 matmuls.

The key of an entry is (result of the pass, bytes per element, padded head size). The values are the block of queries,
the block of keys, the width of edge tiles, warps, pipeline stages, and the number of columns of a head that are
multiplied at a time. They were measured on an H200 (docs/log/portable.md); those for GPUs with less shared memory were
found by compiling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import Tensor

from flashspan.kernels.launch import triton_abi


@dataclass(frozen=True)
class Tile:
    block_q: int
    block_k: int
    edge: int
    num_warps: int
    num_stages: int
    slice: int = 256
    edge_slice: int = 256  # slice in the partial tiles of a block map
    edge_stages: int = 1  # pipeline stages of edge tiles in forward and in passes over keys
    query_parts: int = 1  # programs of a block of keys, each with a part of the queries (few_tiles.py)
    key_parts: int = 1  # programs of a block of queries, each with a part of the keys (few_tiles.py)

    def within(self, block: tuple[int, int]) -> Tile:
        """This tile, cut to a block of queries and keys."""
        block_q, block_k = min(self.block_q, block[0]), min(self.block_k, block[1])
        return replace(self, block_q=block_q, block_k=block_k, edge=min(self.edge, *block))

    def constants(self, head_dim: int) -> dict[str, int]:
        """The tile sizes as compile-time arguments of a kernel."""
        columns = {"D": head_dim, "BD": block_dim(head_dim), "BC": min(self.slice, block_dim(head_dim))}
        blocks = {"BM": self.block_q, "BN": self.block_k, "BE": self.edge}
        return {**columns, **blocks, "num_warps": self.num_warps, "num_stages": self.num_stages}


TABLE: dict[tuple[str, int, int], Tile] = {
    ("out", 2, 16): Tile(128, 64, 64, 4, 3),
    ("out", 2, 32): Tile(128, 64, 32, 4, 3),
    ("out", 2, 64): Tile(128, 128, 64, 8, 3),
    ("out", 2, 128): Tile(128, 64, 64, 8, 4),
    ("out", 2, 256): Tile(128, 32, 16, 8, 3),
    ("out", 4, 16): Tile(64, 64, 32, 4, 1),
    ("out", 4, 32): Tile(64, 64, 32, 4, 1),
    ("out", 4, 64): Tile(64, 64, 32, 4, 1),
    ("out", 4, 128): Tile(64, 64, 32, 4, 1),
    ("out", 4, 256): Tile(128, 64, 32, 8, 1, 64),
    ("dk dv", 2, 16): Tile(64, 64, 64, 4, 3),
    ("dk dv", 2, 32): Tile(64, 64, 64, 4, 3),
    ("dk dv", 2, 64): Tile(64, 64, 64, 4, 3),
    ("dk dv", 2, 128): Tile(64, 128, 64, 8, 3, edge_stages=2),
    ("dk", 2, 256): Tile(32, 128, 32, 8, 2),
    ("dv", 2, 256): Tile(32, 128, 32, 8, 3),
    ("dk dv", 4, 16): Tile(64, 64, 32, 4, 1),
    ("dk dv", 4, 32): Tile(64, 64, 32, 4, 1),
    ("dk dv", 4, 64): Tile(64, 128, 32, 8, 1),
    ("dk dv", 4, 128): Tile(32, 128, 32, 8, 1),
    ("dk", 4, 256): Tile(32, 128, 32, 8, 1, 64),
    ("dv", 4, 256): Tile(32, 128, 32, 8, 1, 64),
    ("dq", 2, 16): Tile(64, 64, 64, 4, 3),
    ("dq", 2, 32): Tile(64, 64, 64, 4, 3),
    ("dq", 2, 64): Tile(64, 64, 64, 4, 3),
    ("dq", 2, 128): Tile(128, 64, 32, 8, 3),
    ("dq", 2, 256): Tile(128, 32, 16, 8, 2),
    ("dq", 4, 16): Tile(64, 64, 32, 4, 1),
    ("dq", 4, 32): Tile(64, 64, 32, 4, 1),
    ("dq", 4, 64): Tile(64, 64, 32, 4, 1),
    ("dq", 4, 128): Tile(128, 32, 32, 8, 1),
    ("dq", 4, 256): Tile(128, 32, 32, 8, 1, 64),
}

BITS: dict[tuple[str, int, int], Tile] = {
    ("dk", 2, 256): Tile(32, 128, 16, 8, 2),
    ("dq", 2, 256): Tile(128, 32, 16, 8, 2, edge_slice=128),
}
"""Tiles for block maps, if the bits need registers that TABLE's tiles do not leave free."""

DROPOUT: dict[tuple[str, int, int], Tile] = {
    ("dk dv", 2, 128): Tile(32, 128, 32, 8, 3, edge_stages=2),
}
"""Tiles for dropout, if its hashes need registers that TABLE's tiles do not leave free."""

TF32: dict[tuple[str, int, int], Tile] = {
    ("out", 4, 64): Tile(128, 64, 32, 8, 3),
    ("out", 4, 128): Tile(128, 32, 32, 8, 3),
    ("dk dv", 4, 128): Tile(64, 128, 32, 8, 1),
    ("dq", 4, 32): Tile(64, 64, 32, 4, 2),
    ("dq", 4, 64): Tile(128, 64, 32, 8, 2),
    ("dq", 4, 128): Tile(128, 64, 32, 8, 1),
}
"""Tiles for float32 inputs if they are multiplied as tf32, which needs a third of the registers. Not for block maps,
for which they were not measured."""

SMALL: dict[tuple[str, int, int], Tile] = {
    ("out", 2, 64): Tile(128, 64, 32, 8, 3),
    ("out", 2, 128): Tile(64, 64, 32, 4, 2),
    ("out", 2, 256): Tile(64, 32, 32, 8, 2),
    ("out", 4, 16): Tile(128, 64, 32, 8, 2),
    ("out", 4, 32): Tile(128, 64, 32, 8, 2),
    ("out", 4, 64): Tile(64, 32, 32, 4, 2),
    ("out", 4, 128): Tile(64, 32, 32, 8, 2, 32),
    ("out", 4, 256): Tile(32, 32, 32, 8, 1, 32),
    ("dk dv", 2, 128): Tile(64, 64, 32, 4, 2),
    ("dk", 2, 256): Tile(32, 64, 32, 8, 1),
    ("dv", 2, 256): Tile(32, 64, 32, 8, 2),
    ("dk dv", 4, 16): Tile(32, 64, 32, 4, 2),
    ("dk dv", 4, 32): Tile(32, 64, 32, 4, 2),
    ("dk dv", 4, 64): Tile(32, 64, 32, 4, 1, 32),
    ("dk dv", 4, 128): Tile(32, 64, 32, 8, 1, 32),
    ("dk", 4, 256): Tile(32, 32, 32, 8, 1, 32),
    ("dv", 4, 256): Tile(32, 32, 32, 8, 1, 32),
    ("dq", 2, 128): Tile(64, 64, 32, 4, 2),
    ("dq", 2, 256): Tile(64, 32, 32, 8, 1),
    ("dq", 4, 16): Tile(64, 32, 32, 4, 2),
    ("dq", 4, 32): Tile(64, 32, 32, 4, 2),
    ("dq", 4, 64): Tile(64, 32, 32, 4, 2),
    ("dq", 4, 128): Tile(64, 32, 32, 4, 1, 32),
    ("dq", 4, 256): Tile(32, 32, 32, 8, 1, 32),
}
"""Tiles for GPUs for which `is_small` is True. They fit in 99 KiB of shared memory, on AMD GPUs in 64 KiB."""


def precision(device: torch.device) -> str:
    """The input_precision of float32 matmuls, as exact as float32 unless `torch.set_float32_matmul_precision` allows
    tf32.

    bf16x6 is six matmuls of the three bfloat16 parts of each number; tf32x3 is three matmuls of the two tf32 parts.
    """
    if triton_abi.is_interpreting():
        return "ieee"  # the interpreter knows no other name
    if torch.version.hip is not None:  # the only precision that all AMD GPUs support
        return "bf16x6"
    if torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "tf32x3" if is_small(device) else "bf16x6"


def block_dim(head_dim: int) -> int:
    """The head size padded to a power of two, 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tile(result: str, q: Tensor, *, bits: bool = False, dropout: bool = False) -> Tile:
    """The tile sizes of the pass for "out", "dq", "dk", "dv" or "dk dv", for inputs like q; bits: for a block map."""
    key = (result, q.element_size(), block_dim(q.shape[-1]))
    tf32 = precision(q.device) == "tf32" and not bits
    tables = [(SMALL, is_small(q.device)), (DROPOUT, dropout), (BITS, bits), (TF32, tf32), (TABLE, True)]
    return next(table[key] for table, applies in tables if applies and key in table)


@cache
def is_small(device: torch.device) -> bool:
    """Whether a GPU has too little shared memory for TABLE's tiles: true for all but datacenter GPUs since Hopper."""
    return device.type in ("cuda", "meta") and triton_abi.shared_memory(device) < 227 * 1024


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel can start before the previous kernel has ended, and wait for it later (programmatic dependent
    launch)."""
    return not triton_abi.is_interpreting() and triton_abi.architecture(device) >= 90


def early_launch(early: bool) -> dict[str, bool]:
    """The launch option of a kernel that starts early."""
    return {"launch_pdl": True} if early else {}


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; for other devices, that of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def key_passes(q: Tensor, *, bits: bool = False, dropout: bool = False) -> dict[str, Tile]:
    """The tile of each pass over keys for inputs like q: one pass for dk and dv, or one for each."""
    fused = ("dk dv", q.element_size(), block_dim(q.shape[-1])) in TABLE
    names = ("dk dv",) if fused else ("dk", "dv")
    return {name: tile(name, q, bits=bits, dropout=dropout) for name in names}


@lru_cache(4096)
def fill(num_streams: int, num_tiles: int, slots: int, least: float = 0.95) -> int:
    """The least number of parts that keeps a GPU within 95% (`least`) of the best utilisation that any number of parts
    reaches.

    The GPU runs `slots` programs at once, and in the last round most slots may be empty.
    """
    most = max(1, min(num_tiles // 2, 4 * slots // num_streams))
    busy = []
    for num_splits in range(1, most + 1):
        rounds = num_streams * num_splits / slots
        busy.append(rounds / math.ceil(rounds))
    return 1 + next(i for i, share in enumerate(busy) if share >= least * max(busy))
