"""The mask of a config's `[attention]` section: which earlier tokens each token sees."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashspan import masks
from flashspan.kernels.masks import CAUSAL, Mask, count

from .config import AttentionSection

MAKERS: dict[str, Callable[[AttentionSection, int, torch.device], Mask]] = {
    "causal": lambda a, n, device: CAUSAL,
    "window": lambda a, n, device: masks.window(a.window, 0),
    "dilated": lambda a, n, device: masks.dilated(a.width, a.step, n, device=device),
    "streaming": lambda a, n, device: masks.streaming(a.num_sinks, a.window, n, device=device),
    "longformer": lambda a, n, device: masks.longformer(
        n, window=a.window, num_global=a.num_global, causal=True, device=device
    ),
    "random_blocks": lambda a, n, device: masks.random_blocks(
        n, a.share, seed=a.seed, size=a.size, causal=True, device=device
    ),
    "bigbird": lambda a, n, device: masks.bigbird(
        n,
        window=a.window,
        num_global=a.num_global,
        num_random=a.num_random,
        seed=a.seed,
        size=a.size,
        causal=True,
        device=device,
    ),
}


def make_pattern(section: AttentionSection, num_tokens: int, device: torch.device) -> Mask:
    """The mask of a whole sequence. Make it once: layers and steps that share the object share its cached slices."""
    return MAKERS[section.pattern](section, num_tokens, device)


def visible_share(mask: Mask, num_tokens: int) -> float:
    """The visible pairs of this mask as a share of those of a causal mask of this length."""
    return count(mask, num_tokens, num_tokens) / count(CAUSAL, num_tokens, num_tokens)
