"""Make Triton's interpreter faster, with the same results. Most of its time is spent in Python, not in NumPy.

Three of its functions waste time. Each call of a device function patches all of `triton.language` again, although the
kernel that calls it has done so. The check for integer overflow computes every sum again, but reports only in debug
mode. The NumPy type of a Triton type is looked up in a table that is built for each look-up.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from triton.runtime import interpreter

NAMES = (
    *("_get_np_dtype", "_patch_lang", "interpreter_semantic"),
    *("GridExecutor", "InterpretedFunction", "InterpreterError"),
)
POINTER = np.dtype(np.uint64)


def install() -> None:
    """Replace the three functions, in this process. Call it once, before any kernel runs. On a release of Triton with
    other names, it does nothing, and tests take longer."""
    if not all(hasattr(interpreter, name) for name in NAMES):
        return
    find_dtype = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: POINTER if kind.scalar.is_ptr() else find_dtype(kind.scalar)
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = lambda left, right, operation: None

    patched: set[int] = set()  # the globals of the functions that were called since the kernel began
    launch = interpreter.GridExecutor.__call__

    def launch_kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(id(self.fn.__globals__))
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launch_kernel
    interpreter.InterpretedFunction.__call__ = call_device_function
