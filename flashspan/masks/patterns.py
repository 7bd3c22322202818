"""Predefined masks. Each function returns a `Band`, `Rows` or `Blocks`; compose them with `&`, `|` and `~`.

mask = documents([5, 3, 8]) & causal()
mask = longformer(4096, window=256, num_global=16)

Pictures of all of them are in docs/sparse.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from flashspan.kernels.masks.band import Band
from flashspan.kernels.masks.block_map import check_block
from flashspan.kernels.masks.blocks import Blocks
from flashspan.kernels.masks.mask import Mask, check_whole
from flashspan.kernels.masks.rows import Rows


def full() -> Band:
    """Every query sees every key.

    Returns:
        A band without bounds.

    Example:
            attention(q, k, v, mask=masks.full())
    """
    return Band()


def causal(offset: int = 0) -> Band:
    """Query i sees keys up to i + offset.

    Args:
        offset: 0 aligns the first query with the first key, like PyTorch's `is_causal`; num_keys - num_queries aligns
            the last query with the last key, as for queries that continue a cache.

    Returns:
        A band.

    Example:
            attention(q, k, v, mask=masks.causal())
    """
    return Band(None, offset)


def window(left: int, right: int | None = None, *, offset: int = 0) -> Band:
    """Query i sees keys from i - left to i + right, shifted by offset.

    Args:
        left: Keys before the query, its own not counted.
        right: Keys after the query; by default `left`.
        offset: Shift of the window.

    Returns:
        A band.

    Example:
            attention(q, k, v, mask=masks.window(255, 0))  # a query and the 255 keys before it
    """
    left, right = check_whole(left=left, right=left if right is None else right)
    (offset,) = check_whole(None, offset=offset)
    return Band(offset - left, offset + right)


def documents(
    lengths: Sequence[int] | Tensor,
    key_lengths: Sequence[int] | Tensor | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Rows:
    """Packed documents: a query sees the keys of its own document only.

    Args:
        lengths: Tokens of each document; 0 is allowed.
        key_lengths: Keys of each document, if the queries are only a part of its tokens; by default `lengths`.
        device: Device of the mask.

    Returns:
        One interval of keys for each query.

    Example:
            attention(q, k, v, mask=masks.documents([300, 0, 700]) & masks.causal())
    """
    spans = _lengths(lengths)
    keys = spans if key_lengths is None else _lengths(key_lengths)
    if spans.dim() != 1 or spans.shape != keys.shape or bool((spans < 0).any()) or bool((keys < 0).any()):
        raise ValueError(
            f"documents needs a list of lengths >= 0, and as many key_lengths >= 0 if they are given: "
            f"got {spans.tolist()}" + ("" if keys is spans else f" and {keys.tolist()}")
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
    """A padded batch: in sequence b only the first key_lengths[b] keys exist.

    Args:
        key_lengths: Keys of each sequence.
        num_queries: Padded number of queries.
        num_keys: Padded number of keys.
        query_lengths: Queries of each sequence; the other rows see no key. By default all queries exist.
        device: Device of the mask.

    Returns:
        One interval of keys for each query of each sequence.

    Example:
            attention(q, k, v, mask=masks.ragged([512, 100], 512, 512))
    """
    num_queries, num_keys = check_whole(num_queries=num_queries, num_keys=num_keys)
    lengths = _lengths(key_lengths)
    queries = torch.full_like(lengths, num_queries) if query_lengths is None else _lengths(query_lengths)
    if lengths.dim() != 1 or lengths.shape != queries.shape:
        raise ValueError(f"ragged needs one length per sequence: got {lengths.tolist()} and {queries.tolist()}")
    for counts, limit, what in ((lengths, num_keys, "keys"), (queries, num_queries, "queries")):
        if bool(((counts < 0) | (counts > limit)).any()):
            raise ValueError(
                f"a sequence has 0 to {limit} {what} ({limit} is the padded length): got {counts.tolist()}"
            )
    exists = torch.arange(num_queries, device="cpu") < queries[:, None]
    end = torch.where(exists, lengths[:, None], 0)
    return Rows(torch.zeros_like(end).to(device), end.to(device), num_keys)


def prefix(length: int, num_tokens: int, *, device: torch.device | str = "cpu") -> Mask:
    """Prefix-LM: the first `length` tokens see each other in both directions, the rest is causal.

    Args:
        length: Tokens of the prefix.
        num_tokens: Number of tokens: queries and keys.
        device: Device of the mask.

    Returns:
        One interval of keys for each query.

    Example:
            attention(q, k, v, mask=masks.prefix(100, 1000))
    """
    length, num_tokens = check_whole(length=length, num_tokens=num_tokens)
    if length > num_tokens:
        raise ValueError(f"a prefix has 0 to num_tokens tokens: got {length} of {num_tokens}")
    end = torch.arange(1, num_tokens + 1, device=device).clamp(min=length)
    return Rows(torch.zeros_like(end), end, num_tokens)


def dilated(
    width: int, step: int, num_tokens: int, *, causal: bool = True, device: torch.device | str = "cpu"
) -> Blocks:
    """A window with gaps: query i sees the `width` keys i, i - step, i - 2 step, ... (not causal: also i + step, ...).

    Args:
        width: Number of keys, the query's own included.
        step: Distance between two neighbouring keys.
        num_tokens: Number of tokens: queries and keys.
        causal: Leave out the keys after the query.
        device: Device of the mask.

    Returns:
        A block map.

    Example:
            attention(q, k, v, mask=masks.dilated(64, 4, 1000))
    """
    width, step = check_whole(1, width=width, step=step)
    (num_tokens,) = check_whole(num_tokens=num_tokens)
    # A reach or step beyond num_tokens changes nothing. Clip both, so that they fit 32 bits.
    reach, step = min(width * step, max(1, num_tokens)), min(step, max(1, num_tokens))

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        behind = i - j
        seen = (behind % step == 0) & (behind.abs() < reach)
        return seen & (behind >= 0) if causal else seen

    return Blocks.from_rule(rule, num_tokens, num_tokens, device=device)


def streaming(num_sinks: int, window: int, num_tokens: int, *, device: torch.device | str = "cpu") -> Blocks:
    """Attention sinks: a query sees the first `num_sinks` tokens and the last `window`, its own included.

    Args:
        num_sinks: First tokens that every query sees.
        window: Last tokens that a query sees.
        num_tokens: Number of tokens: queries and keys.
        device: Device of the mask.

    Returns:
        A block map.

    Example:
            attention(q, k, v, mask=masks.streaming(4, 256, 1000))
    """
    num_sinks, num_tokens = check_whole(num_sinks=num_sinks, num_tokens=num_tokens)
    (window,) = check_whole(1, window=window)
    sinks = Rows(*_span(num_tokens, 0, num_sinks, device), num_tokens) & Band(None, 0)
    return Blocks.of(Band(1 - window, 0), num_tokens, num_tokens, device=device) | sinks


def longformer(
    num_tokens: int, *, window: int, num_global: int, causal: bool = False, device: torch.device | str = "cpu"
) -> Blocks:
    """Global tokens and a window: tokens up to `window` apart see each other; the first `num_global` tokens see all
    tokens, and all tokens see them.

    Args:
        num_tokens: Number of tokens: queries and keys.
        window: Largest distance of two tokens that see each other.
        num_global: First tokens that see, and are seen by, all.
        causal: Leave out the keys after the query.
        device: Device of the mask.

    Returns:
        A block map.

    Example:
            attention(q, k, v, mask=masks.longformer(1000, window=128, num_global=8))
    """
    num_tokens, window, num_global = check_whole(num_tokens=num_tokens, window=window, num_global=num_global)
    num_global = min(num_global, num_tokens)
    seen = Rows(*_span(num_tokens, 0, num_global, device), num_tokens)
    everyone = torch.where(torch.arange(num_tokens, device=device) < num_global, num_tokens, 0)
    seeing = Rows(torch.zeros_like(everyone), everyone, num_tokens)
    mask = Blocks.of(Band(-window, window), num_tokens, num_tokens, device=device) | seen | seeing
    return mask & Band(None, 0) if causal else mask


def random_blocks(
    num_tokens: int,
    share: float,
    *,
    seed: int = 0,
    num_heads: int = 1,
    size: int = 128,
    causal: bool = False,
    device: torch.device | str = "cpu",
) -> Blocks:
    """Each block of queries sees this share of the blocks of keys, chosen at random, and always its own.

    Args:
        num_tokens: Number of tokens: queries and keys.
        share: Share of the blocks of keys, above 0 and at most 1.
        seed: Random seed of the choice.
        num_heads: Number of heads, each with its own choice; 1 for the same choice in all heads.
        size: Tokens in a block.
        causal: Leave out the keys after the query.
        device: Device of the mask.

    Returns:
        A block map.

    Example:
            attention(q, k, v, mask=masks.random_blocks(4096, 0.25, seed=1))
    """
    (num_tokens,) = check_whole(num_tokens=num_tokens)
    size, num_heads = check_whole(1, size=size, num_heads=num_heads)
    (seed,) = check_whole(None, seed=seed)
    if not isinstance(share, (float, Real)) or not 0.0 < share <= 1.0 or not -(2**63) <= seed < 2**64:
        raise ValueError(f"random_blocks takes 0 < share <= 1 and a seed of 64 bits: got {share=}, {seed=}")
    num = -(-num_tokens // size)
    random = torch.Generator("cpu").manual_seed(seed)
    scores = torch.rand(num_heads, num, num, generator=random, dtype=torch.float32, device="cpu")
    chosen = _best(scores, max(1, round(share * num)), causal)
    mask = Blocks.from_coarse(chosen.to(device), num_tokens, num_tokens, size=size)
    return mask & Band(None, 0) if causal else mask


def bigbird(
    num_tokens: int,
    *,
    window: int,
    num_global: int,
    num_random: int,
    seed: int = 0,
    size: int = 128,
    causal: bool = False,
    device: torch.device | str = "cpu",
) -> Blocks:
    """BigBird: `longformer`, plus up to `num_random` random blocks of keys for each block of queries.

    Args:
        num_tokens: Number of tokens: queries and keys.
        window: Largest distance of two tokens that see each other.
        num_global: First tokens that see, and are seen by, all.
        num_random: Random blocks of keys; some may be visible already. With `causal`, blocks before the query's.
        seed: Random seed of the choice.
        size: Tokens in a block.
        causal: Leave out the keys after the query.
        device: Device of the mask.

    Returns:
        A block map.

    Example:
            attention(q, k, v, mask=masks.bigbird(4096, window=128, num_global=8, num_random=3))
    """
    num_tokens, num_random = check_whole(num_tokens=num_tokens, num_random=num_random)
    (size,) = check_whole(1, size=size)
    num = -(-num_tokens // size)
    share = min(1.0, (1 + num_random) / max(1, num))
    mask = longformer(num_tokens, window=window, num_global=num_global, causal=causal, device=device)
    return mask | random_blocks(num_tokens, share, seed=seed, size=size, causal=causal, device=device)


def top_blocks(q: Tensor, k: Tensor, keep: int, *, causal: bool = False, block: int = 128) -> Blocks:
    """A mask from data: each block of queries of each head sees `keep` blocks of keys: its own, and those whose mean
    key has the highest score with its mean query.

    Args:
        q: Queries [B, H, T, D].
        k: Keys [B, K, S, D].
        keep: Blocks of keys for each block of queries.
        causal: Leave out the keys after the query.
        block: Tokens in a block: 64 or 128.

    Returns:
        A block map, one for each sequence and head.

    Example:
            attention(q, k, v, mask=masks.top_blocks(q, k, keep=8, causal=True))
    """
    edges = check_block(block)
    if edges[0] != edges[1]:
        raise ValueError(f"top_blocks chooses square blocks: got block={block!r}; use block=64 or block=128")
    block = edges[0]
    (keep,) = check_whole(1, keep=keep)
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in (q, k)]
    fits = all(len(shape) == 4 for shape in shapes) and shapes[0][::3] == shapes[1][::3]
    if not fits or not k.shape[1] or q.shape[1] % k.shape[1]:
        got = [shape or type(x).__name__ for shape, x in zip(shapes, (q, k), strict=True)]
        raise ValueError(
            f"top_blocks needs tensors q [B, H, T, D] and k [B, K, S, D] with K dividing H: got q {got[0]}, k {got[1]}"
        )
    means = [_block_means(x.detach(), block) for x in (q, k)]
    scores = means[0] @ means[1].repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    mask = Blocks.from_coarse(_best(scores, keep, causal), q.shape[2], k.shape[2], size=block, block=block)
    return mask & Band(None, 0) if causal else mask


def _best(scores: Tensor, keep: int, causal: bool) -> Tensor:
    """bool [..., n, m]: the diagonal and the highest scores, `keep` in each row (with `causal`, none ahead)."""
    num_q, num_k = scores.shape[-2:]
    here = torch.arange(num_q, device=scores.device)[:, None] - torch.arange(num_k, device=scores.device)
    # topk would choose NaN first, and inf would tie with the diagonal.
    most = torch.finfo(scores.dtype).max
    scores = scores.nan_to_num(-most, most, -most).masked_fill(here == 0, torch.inf)
    if causal:
        scores = scores.masked_fill(here < 0, -torch.inf)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(-1, scores.topk(min(keep, num_k), -1).indices, True)
    return chosen & (here >= 0) if causal else chosen


def _block_means(x: Tensor, block: int) -> Tensor:
    """The mean of each block of tokens, float32 [B, H, blocks, D]."""
    short = -x.shape[2] % block
    sums = torch.nn.functional.pad(x.float(), (0, 0, 0, short)).unflatten(2, (-1, block)).sum(3)
    sizes = torch.full((sums.shape[2], 1), float(block), device=x.device)
    if short:
        sizes[-1] -= short
    return sums / sizes


def _span(num_tokens: int, start: int, end: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """The same interval of keys for each query."""
    first = torch.full((num_tokens,), start, device=device)
    return first, torch.full_like(first, min(end, num_tokens))


def _lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    """Lengths as int64 on the CPU."""
    try:
        tensor = torch.as_tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"lengths are whole numbers, in a list or a tensor: got {lengths!r}") from error
    if tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool):
        raise ValueError(f"lengths are whole numbers: got {tensor.tolist()}")
    return tensor.long()
