"""The names of Gluon that differ between its releases, or that it does not export.

All other names that the kernels use are the same in Triton 3.6 and 3.7. Importing this module fails on a release that
has neither name; attention then uses the portable kernels.
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
"""Synchronise all threads of this partition (3.7: barrier, 3.6: thread_barrier)."""

if not hasattr(tma, "async_copy_global_to_shared"):
    raise ImportError("this Triton release names its asynchronous copies differently")


@builtin
def reduce_add(desc, coord, source, _semantic=None):
    """Let the copy engine add a tile of shared memory into global memory. Gluon has public names only for copies."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, source.handle)


_aggregate = getattr(gl, "aggregate", None) or core._aggregate


@dataclass_transform()
def aggregate(cls: type) -> Any:
    """A class of named values that kernels pass to their functions (3.6, 3.7: core._aggregate, later: gl.aggregate).

    Its constructor takes the fields by position or by name. A field's annotation is gl.tensor, gl.constexpr,
    gl.shared_memory_descriptor, a descriptor of the copy engine, or a union of these.
    """
    kinds = inspect.get_annotations(cls, eval_str=True)

    @gluon.constexpr_function
    def initialize(self, *values, **named):
        for name, value in {**dict(zip(kinds, values, strict=False)), **named}.items():
            setattr(self, name, value if isinstance(value, core.base_value) else gl.constexpr(value))

    cls.__annotations__ = kinds
    cls.__init__ = initialize  # type: ignore[misc]
    return _aggregate(cls)
