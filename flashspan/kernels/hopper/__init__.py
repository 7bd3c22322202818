"""Gluon kernels for Hopper GPUs (sm_90), on the contract of kernels/contract.py.

Where they cannot be compiled the portable kernels serve, this call and all that follow, and `explain` says why.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashspan.kernels import dispatch, portable
from flashspan.kernels.contract import Carry, row_delta
from flashspan.kernels.hopper import launch
from flashspan.kernels.portable.faults import is_compile_error

__all__ = ["again", "backward", "backward_of_output", "forward"]

again = launch.again


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
    """Raise what does not say that nothing was launched."""
    if not is_compile_error(error):
        raise error
    dispatch.retire("hopper", f"could not be compiled here: {type(error).__name__}: {error}"[:500])
