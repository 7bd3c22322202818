"""Ready masks. Each returns a value of masks.py; compose them with `&`.

mask = documents([5, 3, 8]) & causal()
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashspan.kernels.masks import Band, Mask, Rows


def full() -> Band:
    """Every query sees every key."""
    return Band()


def causal(offset: int = 0) -> Band:
    """Query i sees keys up to i + offset. 0 aligns the first query with the first key (like PyTorch's `is_causal`);
    num_keys - num_queries aligns the last with the last, as when the queries continue a cache."""
    return Band(None, offset)


def window(left: int, right: int | None = None, *, offset: int = 0) -> Band:
    """Query i sees keys from i - left to i + right (right = left unless given), shifted by offset."""
    right = left if right is None else right
    if left < 0 or right < 0:
        raise ValueError(f"a window reaches 0 or more keys to each side: got left={left}, right={right}")
    return Band(offset - left, offset + right)


def documents(
    lengths: Sequence[int] | Tensor,
    key_lengths: Sequence[int] | Tensor | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Rows:
    """Packed documents: a query sees the keys of its own document only. Lengths may be 0.

    `key_lengths` is for documents whose queries are only a part of their keys; the two lists pair up.
    """
    spans = _lengths(lengths)
    keys = spans if key_lengths is None else _lengths(key_lengths)
    if spans.dim() != 1 or spans.shape != keys.shape or bool((spans < 0).any()) or bool((keys < 0).any()):
        raise ValueError(
            f"documents needs one list of lengths >= 0 (and, if given, as many key lengths): "
            f"got {spans.tolist()} and {keys.tolist()}"
        )
    end = keys.cumsum(0)
    start = end - keys
    return Rows(start.repeat_interleave(spans).to(device), end.repeat_interleave(spans).to(device), int(keys.sum()))


def ragged(
    key_lengths: Sequence[int] | Tensor,
    num_queries: int,
    num_keys: int,
    *,
    query_lengths: Sequence[int] | Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Rows:
    """A padded batch: in sequence b only the first key_lengths[b] keys exist (and, if given, the first queries)."""
    lengths = _lengths(key_lengths)
    queries = torch.full_like(lengths, num_queries) if query_lengths is None else _lengths(query_lengths)
    if lengths.dim() != 1 or lengths.shape != queries.shape:
        raise ValueError(f"ragged needs one length per sequence: got {lengths.tolist()} and {queries.tolist()}")
    for given, limit, what in ((lengths, num_keys, "keys"), (queries, num_queries, "queries")):
        if bool(((given < 0) | (given > limit)).any()):
            raise ValueError(f"a sequence has 0 to {limit} {what} of the padded {limit}: got {given.tolist()}")
    exists = torch.arange(num_queries, device="cpu") < queries[:, None]
    end = torch.where(exists, lengths[:, None], 0)
    return Rows(torch.zeros_like(end).to(device), end.to(device), num_keys)


def prefix(length: int, num_tokens: int, *, device: torch.device | str = "cpu") -> Mask:
    """Prefix-LM: the first `length` tokens see each other both ways, the rest look back."""
    if not 0 <= length <= num_tokens:
        raise ValueError(f"a prefix has 0 to num_tokens tokens: got {length} of {num_tokens}")
    end = torch.arange(1, num_tokens + 1, device=device).clamp(min=length)
    return Rows(torch.zeros_like(end), end, num_tokens)


def _lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    """Lengths as int64 on the CPU."""
    given = torch.as_tensor(lengths, device="cpu")
    if given.numel() and (given.is_floating_point() or given.dtype == torch.bool):
        raise ValueError(f"lengths are whole numbers: got {given.tolist()}")
    return given.long()
