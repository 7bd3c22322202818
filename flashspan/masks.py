"""Masks for `attention(mask=...)`: `Band`, `Rows` and `Blocks`, and functions that return them."""

from flashspan.kernels.masks import Band, Blocks, Rows
from flashspan.kernels.masks.patterns import (
    bigbird,
    causal,
    dilated,
    documents,
    full,
    longformer,
    prefix,
    ragged,
    random_blocks,
    streaming,
    top_blocks,
    window,
)

__all__ = [
    "Band",
    "Blocks",
    "Rows",
    "bigbird",
    "causal",
    "dilated",
    "documents",
    "full",
    "longformer",
    "prefix",
    "ragged",
    "random_blocks",
    "streaming",
    "top_blocks",
    "window",
]
