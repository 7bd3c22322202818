"""flashspan: exact attention on one device or many."""

from flashspan import masks
from flashspan.attention import attention, explain

__version__ = "0.1.0"
__all__ = ["attention", "explain", "masks"]
