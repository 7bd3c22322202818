"""Tile sizes, chosen once by measurement and kept in a table, so that nothing is tuned at start-up, and how float32
is multiplied in them.

A row: (what the pass makes, bytes per element, padded head size) -> block of queries, block of keys, width of the tiles
at the edge of a mask, warps, pipeline stages, and how much of a head is multiplied at a time. Measured on an H200
(docs/log/portable.md); for GPUs with less shared memory chosen by compiling for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

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
    edge_slice: int = 256  # in partial tiles of a block map
    edge_stages: int = 1  # in passes over keys

    def within(self, block: tuple[int, int]) -> Tile:
        """This tile, no larger than a block of queries and keys."""
        block_q, block_k = min(self.block_q, block[0]), min(self.block_k, block[1])
        return replace(self, block_q=block_q, block_k=block_k, edge=min(self.edge, *block))

    def constants(self, head_dim: int) -> dict[str, int]:
        """As a kernel's compile-time arguments."""
        return {
            "D": head_dim,
            "BD": block_dim(head_dim),
            "BC": min(self.slice, block_dim(head_dim)),
            "BM": self.block_q,
            "BN": self.block_k,
            "BE": self.edge,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


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
"""Tiles of block maps where bits take registers that TABLE's do not leave."""

DROPOUT: dict[tuple[str, int, int], Tile] = {
    ("dk dv", 2, 128): Tile(32, 128, 32, 8, 3, edge_stages=2),
}
"""Tiles under dropout where its hashes do."""

TF32: dict[tuple[str, int, int], Tile] = {
    ("out", 4, 64): Tile(128, 64, 32, 8, 3),
    ("out", 4, 128): Tile(128, 32, 32, 8, 3),
    ("dk dv", 4, 128): Tile(64, 128, 32, 8, 1),
    ("dq", 4, 32): Tile(64, 64, 32, 4, 2),
    ("dq", 4, 64): Tile(128, 64, 32, 8, 2),
    ("dq", 4, 128): Tile(128, 64, 32, 8, 1),
}
"""Tiles of float32 by one product of tf32, which takes a third of the registers of six; not measured for block maps."""

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
"""Tiles of GPUs that `is_small`: 99 KiB hold them, on AMD's 64."""


def precision(device: torch.device) -> str:
    """How float32 products are formed: as six of the three bfloat16 parts of each number, or as three of its two tf32
    parts, whose sums are as exact as float32; or as one of tf32 where PyTorch was told that it may
    (`torch.set_float32_matmul_precision`)."""
    if triton_abi.is_interpreting():
        return "ieee"  # it multiplies as it is, and knows fewer names
    if torch.version.hip is not None:  # the only one of these that all of AMD's have
        return "bf16x6"
    if torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "tf32x3" if is_small(device) else "bf16x6"


def block_dim(head_dim: int) -> int:
    """The head size as a kernel holds it: the next power of two, 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tile(made: str, q: Tensor, *, bits: bool = False, dropout: bool = False) -> Tile:
    """The tile sizes of the pass that makes "out", "dq", "dk", "dv" or "dk dv", for inputs like q (and block maps)."""
    key = (made, q.element_size(), block_dim(q.shape[-1]))
    loose = precision(q.device) == "tf32" and not bits
    kinds = [(SMALL, is_small(q.device)), (DROPOUT, dropout), (BITS, bits), (TF32, loose), (TABLE, True)]
    return next(table[key] for table, applies in kinds if applies and key in table)


@cache
def is_small(device: torch.device) -> bool:
    """Whether a GPU has less shared memory than TABLE's tiles take: all but those of datacenters since Hopper."""
    return device.type in ("cuda", "meta") and triton_abi.shared_memory(device) < 227 * 1024


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel can start before the one before it has ended, and then wait for it (programmatic dependent
    launch)."""
    return not triton_abi.is_interpreting() and triton_abi.architecture(device) >= 90


@cache
def multiprocessors(device: torch.device) -> int:
    """How many of them a GPU has; an H200's elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def key_passes(q: Tensor, *, bits: bool = False, dropout: bool = False) -> dict[str, Tile]:
    """The passes over keys for inputs like q: one for dk and dv, or one for each."""
    fused = ("dk dv", q.element_size(), block_dim(q.shape[-1])) in TABLE
    names = ("dk dv",) if fused else ("dk", "dv")
    return {name: tile(name, q, bits=bits, dropout=dropout) for name in names}
