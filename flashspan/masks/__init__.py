"""Masks for `attention(mask=...)`: the types `Band`, `Rows` and `Blocks`, and functions that return them."""

from flashspan.kernels.masks import Band, Blocks, Rows
from flashspan.masks.patterns import (
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
