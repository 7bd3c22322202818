"""flashspan: exact attention on one device or many."""

from flashspan.attention import attention, explain
from flashspan.kernels import patterns as masks

__version__ = "0.1.0"
__all__ = ["attention", "explain", "masks"]
