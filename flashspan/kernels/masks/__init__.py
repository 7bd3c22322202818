"""Masks as values that state which keys each query sees. They can be sliced, and composed with &, | and ~ (mask.py).

A slice of a band is a band if the ranges have equal steps, otherwise rows. A slice of rows is rows, and a slice of
blocks is blocks. `&` of bands and rows is a band or rows. `|` and `~` give blocks, with two exceptions that give bands:
`|` of bands that overlap or touch, and `~` of a band with one bound. flashspan/masks/patterns.py has ready masks.
"""

from flashspan.kernels.masks.band import CAUSAL, EVERYTHING, NOTHING, Band
from flashspan.kernels.masks.blocks import Blocks
from flashspan.kernels.masks.intervals import Positions
from flashspan.kernels.masks.mask import EMPTY, FULL, PARTIAL, Mask
from flashspan.kernels.masks.rows import Rows
from flashspan.kernels.masks.views import count, dense, unpack

__all__ = [
    "CAUSAL",
    "EMPTY",
    "EVERYTHING",
    "FULL",
    "NOTHING",
    "PARTIAL",
    "Band",
    "Blocks",
    "Mask",
    "Positions",
    "Rows",
    "count",
    "dense",
    "unpack",
]
