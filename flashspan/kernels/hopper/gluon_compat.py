"""The names of Gluon that its releases spell differently or do not export.

Everything else the kernels use is the same in Triton 3.6 and 3.7. Importing this fails on a release that has neither
spelling; the portable kernels then serve.
"""

from __future__ import annotations

import inspect
from typing import Any, dataclass_transform

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""All threads of this partition meet (3.7: barrier, 3.6: thread_barrier)."""

if not hasattr(tma, "async_copy_global_to_shared"):
    raise ImportError("this Triton release names its asynchronous copies differently")


@builtin
def reduce_add(desc, coord, source, _semantic=None):
    """Add a tile of shared memory into global memory by the copy engine. Gluon has public names for copies only."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, source.handle)


_aggregate = getattr(gl, "aggregate", None) or core._aggregate


@dataclass_transform()
def aggregate(cls: type) -> Any:
    """A class of named values that kernels pass to their functions (3.6, 3.7: core._aggregate, later: gl.aggregate).

    Its constructor takes the fields by position or by name. A field is what its annotation says: gl.tensor,
    gl.constexpr, gl.shared_memory_descriptor, a descriptor of the copy engine, or one of several.
    """
    kinds = inspect.get_annotations(cls, eval_str=True)

    @gluon.constexpr_function
    def initialize(self, *values, **named):
        for name, value in {**dict(zip(kinds, values, strict=False)), **named}.items():
            setattr(self, name, value if isinstance(value, core.base_value) else gl.constexpr(value))

    cls.__annotations__ = kinds
    cls.__init__ = initialize  # type: ignore[misc]
    return _aggregate(cls)
