"""Which errors of a launch say that nothing ran, so that another kernel may serve the call."""

from __future__ import annotations

from traceback import walk_tb

from triton.compiler import compile as triton_compile
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

UNUSABLE = (CompilationError, OutOfResources, PTXASError)


def is_compile_error(error: Exception) -> bool:
    """Whether a kernel was not launched at all. A compiler pass that fails raises a plain RuntimeError, as a failure of
    the device does, which no other kernel would survive: where it was raised tells them apart."""
    compiling = any(frame.f_code is triton_compile.__code__ for frame, _ in walk_tb(error.__traceback__))
    return compiling or isinstance(error, UNUSABLE)
