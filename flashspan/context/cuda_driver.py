"""Operations of the CUDA driver that torch does not expose: flags that streams wait for, and copy-engine copies.

tests/context/test_peer_memory.py calls each of them on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Driver:
    """The driver's stream operations, and host memory mapped for the device."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        address, stream, word = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32
        self._wait = _function(library, "cuStreamWaitValue32_v2", stream, address, word, ctypes.c_uint)
        self._write = _function(library, "cuStreamWriteValue32_v2", stream, address, word, ctypes.c_uint)
        self._register = _function(library, "cuMemHostRegister_v2", address, ctypes.c_size_t, ctypes.c_uint)
        self._unregister = _function(library, "cuMemHostUnregister", address)
        self._device_address = _function(
            library, "cuMemHostGetDevicePointer_v2", ctypes.POINTER(ctypes.c_uint64), address, ctypes.c_uint
        )
        many, size, place = ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(CopyAttributes)
        arguments = (many, many, many, size, place, many, size, stream)
        name = "cuMemcpyBatchAsync_v2"
        self._copy = _function(library, name, *arguments) if hasattr(library, name) else None

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Let the stream wait until the word at this address equals `value`."""
        equal = 1
        _check(self._wait(stream.cuda_stream, address, value, equal), "cuStreamWaitValue32")

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Let the stream write a word, after all its earlier writes."""
        _check(self._write(stream.cuda_stream, address, value, 0), "cuStreamWriteValue32")

    def register(self, memory: Tensor) -> int:
        """Map host memory for devices, and return its device address."""
        for_all_contexts, mapped, found = 1, 2, ctypes.c_uint64()
        _check(self._register(memory.data_ptr(), memory.nbytes, for_all_contexts | mapped), "cuMemHostRegister")
        _check(self._device_address(ctypes.byref(found), memory.data_ptr(), 0), "cuMemHostGetDevicePointer")
        return found.value

    def unregister(self, memory: Tensor) -> None:
        _check(self._unregister(memory.data_ptr()), "cuMemHostUnregister")

    def copy(self, stream: torch.cuda.Stream, to: Tensor, source: Tensor) -> None:
        """Copy bytes with a copy engine. A plain copy inside a GPU is a kernel, which waits for a multiprocessor."""
        if self._copy is None:  # CUDA 12
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)
            return
        attributes = CopyAttributes(order=1, flags=1)  # in stream order; overlap with kernels
        places = [(ctypes.c_uint64 * 1)(x.data_ptr()) for x in (to, source)]
        sizes, first = (ctypes.c_size_t * 1)(source.nbytes), (ctypes.c_size_t * 1)(0)
        code = self._copy(*places, sizes, 1, ctypes.byref(attributes), first, 1, stream.cuda_stream)
        _check(code, "cuMemcpyBatchAsync")


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. The two locations (type and number) are hints that device memory does not need."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


def _function(library: ctypes.CDLL, name: str, *arguments: Any) -> Callable[..., int]:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


def _check(code: int, name: str) -> None:
    if code:
        raise RuntimeError(f"{name} failed: CUDA driver error {code}")
