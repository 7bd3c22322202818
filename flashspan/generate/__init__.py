"""Generation: decoding with a cache of keys and values.

This package is callable: `flashspan.generate("runs/tiny", "Once upon a time", tokens=100)` continues a text.
`help(flashspan.generate.__wrapped__)` describes the arguments.
"""

from flashspan.callable_module import make_callable

from .cache import Cache, Whole
from .command import generate, load
from .decode import decode
from .sample import Sampling
from .split import Split

__all__ = ["Cache", "Sampling", "Split", "Whole", "decode", "generate", "load"]

make_callable(__name__)
