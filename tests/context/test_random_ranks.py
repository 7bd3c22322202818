"""Random calls across ranks against one device in float64: forward and all gradients.

pytest -m campaign -s tests/context/test_random_ranks.py      # 500 calls on groups of 1 to 8 gloo processes
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashspan.context import LAYOUTS, STRATEGIES
from tests.context.cases import DRAWN, MASKS, Case, blocks_of_five, ratios, run_cases

OnRanks = Callable[..., list[Any]]
LENGTHS = (0, 1, 2, 5, 8, 17, 33, 64, 97, 128, 200)
HEADS = ((1, 1), (2, 1), (4, 2), (4, 4), (6, 3), (5, 1), (8, 2), (6, 2))
DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)
BATCH = 20  # number of calls that ranks make before they answer


def draw(seed: int) -> Case:
    pick = random.Random(seed)
    strategy = pick.choice(STRATEGIES)
    mask = pick.choice((*MASKS, *DRAWN, "causal", "nothing"))
    heads, kv_heads = pick.choice(HEADS)
    options: dict[str, Any] = {}
    if pick.random() < 0.3:
        options["head_chunks"] = pick.choice((1, 2, 3))
    if strategy == "hybrid":
        options["across"] = pick.choice(("ring", "gather", "helper", "double_ring"))
    return Case(
        ranks=pick.choice((2, 4, 6, 8) if strategy == "hybrid" else range(1, 9)),
        strategy=strategy,
        layout=pick.choice((*LAYOUTS, blocks_of_five)),
        mask=mask,
        T=pick.choice(LENGTHS),
        heads=heads,
        kv_heads=kv_heads,
        D=pick.choice((1, 3, 8, 20, 64)),
        batch=2 if mask == "ragged" else pick.choice((1, 2)),
        dtype=pick.choice(DTYPES),
        dropout=pick.choice((0.0, 0.0, 0.2)),
        sharpness=pick.choice((1.0, 1.0, 0.1, 5.0, 30.0, -1.0)),
        seed=seed,
        options=options,
    )


def search(on_ranks: OnRanks, first: int, count: int) -> None:
    """Make this many random calls. Print the worst one, and fail with all that exceed their bound."""
    worst: dict[tuple[str, str], tuple[float, int]] = {}
    sizes: Counter[int] = Counter()
    broken = []
    begin = time.perf_counter()
    for start in range(first, first + count, BATCH):
        cases = [draw(seed) for seed in range(start, min(start + BATCH, first + count))]
        sizes.update(case.ranks for case in cases)
        answers = on_ranks(run_cases, cases, timeout=300.0)
        for index, case in enumerate(cases):
            for name, ratio in ratios(case, [answer[index] for answer in answers]).items():
                key = str(case.dtype).removeprefix("torch."), name
                worst[key] = max(worst.get(key, (0.0, 0)), (ratio, case.seed))
                if not ratio <= 1.0:
                    broken.append(f"{name} {ratio:.3g} times what is allowed: {case}")
    for (dtype, name), (ratio, seed) in sorted(worst.items()):
        print(f"{dtype:<9} {name:<4} at most {ratio:.3f} of what is allowed (seed {seed})")
    spent = time.perf_counter() - begin
    print(f"{sizes.total()} calls, seeds from {first}, {spent:.0f} s; by ranks: {dict(sorted(sizes.items()))}")
    assert not broken, f"{len(broken)} over the promise:\n" + "\n".join(broken[:20])


def test_random_calls_across_ranks_keep_the_promise(on_ranks: OnRanks) -> None:
    search(on_ranks, 0, 10)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_five_hundred_random_calls_across_ranks(on_ranks: OnRanks) -> None:
    search(on_ranks, 1_000, 500)
