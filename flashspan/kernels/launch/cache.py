"""The one cache of calls: compiled kernels, launches with all but their addresses, prepared calls of `attention`.

A key says all that its entry depends on, and begins with what the entry is for. No entry holds a tensor.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

KEPT = 4096
"""How many entries are kept; then the cache starts afresh. Lengths are part of keys: they can be without end."""


class Cache(dict[Hashable, Any]):
    """A dictionary of at most KEPT entries."""

    def keep(self, key: Hashable, entry: Any) -> None:
        if len(self) >= KEPT:
            self.clear()
        self[key] = entry


CACHE = Cache()
