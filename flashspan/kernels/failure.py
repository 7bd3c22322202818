"""The error of a kernel after which another implementation runs the call."""


class KernelFailed(RuntimeError):
    """A kernel could not be compiled or loaded on this machine; nothing was computed."""
