"""The error after which another implementation serves a call."""


class KernelFailed(RuntimeError):
    """A kernel could not be compiled or loaded on this machine; nothing was computed."""
