"""Generation: decoding with a cache of keys and values."""

from flashspan.callable_module import make_callable

from .cache import Cache, Whole
from .command import generate, load
from .decode import decode
from .sample import Sampling
from .split import Split

__all__ = ["Cache", "Sampling", "Split", "Whole", "decode", "generate", "load"]

make_callable(__name__)
