"""The one error that lets another implementation serve a call."""


class KernelFailed(RuntimeError):
    """A kernel could not be compiled or loaded on this machine; nothing was computed."""
