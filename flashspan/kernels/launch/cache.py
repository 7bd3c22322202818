"""The one cache of calls: compiled kernels, launches without their addresses, prepared calls of `attention`.

A cache key contains everything that its entry depends on, and begins with the entry's kind. No entry holds a tensor.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

KEPT = 4096
"""Number of entries at which the cache is cleared. Lengths are part of the keys, so there may be any number of keys."""


class Cache(dict[Hashable, Any]):
    """A dictionary of at most KEPT entries."""

    def keep(self, key: Hashable, entry: Any) -> None:
        if len(self) >= KEPT:
            self.clear()
        self[key] = entry


CACHE = Cache()
