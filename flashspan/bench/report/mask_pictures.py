"""Pictures of the ready masks, for docs/sparse.md.

flashspan bench masks docs/patterns
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from flashspan import masks
from flashspan.files import make_folder
from flashspan.kernels.masks import Mask, dense

TOKENS, PIXELS = 1024, 128


def _topics() -> Mask:
    """The mask `top_blocks` for tokens of five topics, in which every block of tokens has one topic."""
    random = torch.Generator("cpu").manual_seed(1)
    topics = torch.randn(5, 16, generator=random)[torch.randint(0, 5, (TOKENS // 64,), generator=random)]
    x = topics.repeat_interleave(64, 0) + 0.5 * torch.randn(TOKENS, 16, generator=random)
    return masks.top_blocks(x[None, None], x[None, None], 3, causal=True, block=64)


PATTERNS: dict[str, Callable[[], Mask]] = {
    "causal": lambda: masks.causal(),
    "window": lambda: masks.window(150),
    "causal-window": lambda: masks.window(200, 0),
    "dilated": lambda: masks.dilated(16, 24, TOKENS),
    "documents": lambda: masks.documents([150, 400, 90, 384]) & masks.causal(),
    "prefix": lambda: masks.prefix(300, TOKENS),
    "streaming": lambda: masks.streaming(40, 200, TOKENS),
    "longformer": lambda: masks.longformer(TOKENS, window=90, num_global=48),
    "random-blocks": lambda: masks.random_blocks(TOKENS, 0.2, size=64),
    "bigbird": lambda: masks.bigbird(TOKENS, window=60, num_global=48, num_random=2, size=64),
    "top-blocks": _topics,
}


def draw(folder: Path) -> list[Path]:
    """Draw a picture per pattern; return the paths. Queries run down, keys across; dark pixels have visible pairs."""
    from matplotlib.image import imsave

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, make in PATTERNS.items():
        step = TOKENS // PIXELS
        seen = dense(make(), TOKENS, TOKENS).float().view(PIXELS, step, PIXELS, step).amax((1, 3))
        paths.append(folder / f"{name}.png")
        imsave(paths[-1], seen.numpy(), cmap="Blues", vmin=0, vmax=1.2)
    return paths


def bench_masks(folder: Path = Path("docs/patterns")) -> int:
    """Draw the ready masks, one picture each, for docs/sparse.md.

    Args:
        folder: Folder for the pictures.
    """
    for path in draw(make_folder(folder, "flashspan bench masks FOLDER")):
        print(path)
    return 0
