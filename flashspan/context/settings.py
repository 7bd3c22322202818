"""The settings of `context_parallel`, checked once, and the values that ranks compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from flashspan.context.generators import GENERATORS
from flashspan.context.layout import Layout, check_name
from flashspan.context.symmetric import TRANSPORTS, TransportName
from flashspan.kernels.backends import BACKENDS

STRATEGIES = (*GENERATORS, "ulysses", "hybrid")


@dataclass(frozen=True)
class Settings:
    """The arguments of `context_parallel`, except its groups. ValueError if one is invalid."""

    layout: Layout
    strategy: str
    across: str
    sizes: Sequence[int] | None
    head_chunks: int | None
    num_tokens: int | None
    backend: str
    deterministic: bool
    transport: TransportName
    timeout: float

    def __post_init__(self) -> None:
        strategy, across, sizes = self.strategy, self.across, self.sizes
        if strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")
        if strategy == "hybrid" and (not isinstance(across, str) or across not in GENERATORS):
            raise ValueError(f"across must be one of {', '.join(GENERATORS)} for hybrid: got {across!r}")
        if (sizes is not None) != (self.schedule == "double_ring"):
            raise ValueError(
                f"sizes=(nodes, ranks per node) is needed by double_ring and only by it: got sizes={sizes} "
                f"with strategy={strategy!r}"
            )
        if self.head_chunks is not None and (type(self.head_chunks) is not int or self.head_chunks < 1):
            raise ValueError(f"head_chunks must be 1 or more, or None for the default: got {self.head_chunks!r}")
        num = self.num_tokens
        if num is not None and (not isinstance(num, Integral) or num < 0):
            raise ValueError(f"num_tokens must be 0 or more, or None to gather it in each call: got {num!r}")
        if not isinstance(self.timeout, (int, float)) or not 0 < self.timeout < math.inf:
            remedy = "to wait for days, use 1e6" if self.timeout in (math.inf, None) else "the default is 300"
            raise ValueError(f"timeout must be above 0 seconds and finite: got {self.timeout!r}; {remedy}")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}: got {self.transport!r}")
        if not callable(self.layout):
            check_name(self.layout)
        backend, known = self.backend, ("auto", *BACKENDS)
        if not isinstance(backend, str) or backend not in known:
            raise ValueError(f"backend must be one of {', '.join(known)}: got {backend!r}")

    @property
    def schedule(self) -> str:
        """The name in GENERATORS of the outer group's strategy."""
        return {"hybrid": self.across, "ulysses": "ring"}.get(self.strategy, self.strategy)

    def check_sizes(self, num_ranks: int) -> None:
        """ValueError unless `sizes` are (nodes, ranks per node) of this many ranks."""
        sizes = self.sizes
        pair = isinstance(sizes, Sequence) and len(sizes) == 2 and all(isinstance(n, Integral) and n > 0 for n in sizes)
        if sizes is not None and not (pair and math.prod(sizes) == num_ranks):
            raise ValueError(
                f"double_ring's sizes must be (nodes, ranks per node), each 1 or more, and multiply to the number of "
                f"ranks: got {sizes!r} for {num_ranks} ranks"
            )

    def compared(self) -> tuple[object, ...]:
        """The values that must be equal on all ranks. A layout function is compared by name, because addresses
        differ."""
        layout = self.layout if isinstance(self.layout, str) else getattr(self.layout, "__qualname__", "a function")
        num_tokens = None if self.num_tokens is None else int(self.num_tokens)
        sizes = tuple(self.sizes or ())
        chosen = (self.backend, self.deterministic, self.transport)
        return layout, self.strategy, self.schedule, sizes, self.head_chunks, num_tokens, *chosen
