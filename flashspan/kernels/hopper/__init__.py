"""Gluon kernels for Hopper GPUs (sm_90), on the contract of kernels/contract.py.

Where they cannot be compiled the portable kernels serve, this call and all that follow, and `explain` says why.
"""

from __future__ import annotations

from traceback import walk_tb
from typing import Any

from torch import Tensor
from triton.compiler import compile as triton_compile
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from flashspan.kernels import dispatch, portable
from flashspan.kernels.contract import Carry, row_delta
from flashspan.kernels.hopper import launch

__all__ = ["again", "backward", "backward_of_output", "forward"]

again = launch.again

UNUSABLE = (CompilationError, OutOfResources, PTXASError)
"""What says that a kernel was not launched at all."""


def forward(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Carry:
    """See contract.py."""
    try:
        return launch.forward(q, k, v, **rest)
    except Exception as error:
        _retire(error)
        return portable.forward(q, k, v, **rest)


def backward(*inputs: Tensor, repeatable: bool = False, **rest: Any) -> None:
    """See contract.py; `repeatable` asks for gradients that repeat bit for bit."""
    try:
        launch.backward(*inputs, repeatable=repeatable, **rest)
    except Exception as error:
        _retire(error)
        portable.backward(*inputs, **rest)


def backward_of_output(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, repeatable: bool = False, **rest: Any
) -> None:
    """See contract.py."""
    try:
        launch.backward(dout, q, k, v, lse, None, out=out, accumulate=False, repeatable=repeatable, **rest)
    except Exception as error:
        _retire(error)
        portable.backward(dout, q, k, v, lse, row_delta(dout, out), accumulate=False, **rest)


def _retire(error: Exception) -> None:
    """Raise what does not say so. A pass of the compiler that fails is a mere RuntimeError, as a failure of the device
    is, which no other kernel would survive: where it was raised tells them apart."""
    compiling = any(frame.f_code is triton_compile.__code__ for frame, _ in walk_tb(error.__traceback__))
    if not (compiling or isinstance(error, UNUSABLE)):
        raise error
    dispatch.retire("hopper", f"could not be compiled here: {type(error).__name__}: {error}"[:500])
