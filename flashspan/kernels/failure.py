"""The error of a kernel after which another implementation runs the call."""

import warnings


class KernelFailed(RuntimeError):
    """A kernel could not be compiled or loaded on this machine; nothing was computed."""


def give_up(failed: list[str], failure: KernelFailed, warning: str) -> None:
    """Warn, and note that these kernels must not be tried again: `failed` is no longer empty. "{}" in the warning is
    the reason."""
    failed.append(str(failure))
    warnings.warn(warning.replace("{}", str(failure)), RuntimeWarning, stacklevel=3)
