"""Masks as values: which keys each query sees. They can be sliced, and composed with &, | and ~ (mask.py).

A slice of a band by ranges of one step is a band, every other slice of a band or of rows is rows, a slice of blocks is
blocks. `&` of bands and rows is a band or rows. `|` and `~` give blocks, except `|` of bands that overlap or touch and
`~` of a band with one bound: those are bands. Ready masks are in patterns.py.
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
