"""Kernels compiled in several threads, and before the call that launches them.

Triton's compiler holds Python's lock only for a small part of its time, so threads compile in parallel. A call on meta
tensors runs no kernel. `launches_of` returns the launches that it would make; so kernels can be compiled before the
tensors exist.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any

from flashspan.kernels.launch import triton_abi
from flashspan.kernels.launch.launch import RECORDED, Launch, on_index

MAX_THREADS = 16

PENDING: dict[int, list[Future[Any]]] = {}
"""Compilations that were started ahead, by the id of their kernel, until a launch of the kernel waits for them."""


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """The launches that a call on meta tensors would make, in order."""
    launches: list[Launch] = []
    token = RECORDED.set(launches)
    try:
        call()
    finally:
        RECORDED.reset(token)
    return launches


def compile_together(launches: Sequence[Launch]) -> list[Any]:
    """`Launch.compiled` of each launch. Kernels that are not in the cache compile in parallel."""
    missing = [launch for launch in launches if launch.is_missing()]
    for launch in missing:
        wait(PENDING.pop(id(launch.kernel), ()))
    if len(missing) > 1:
        wait([start(launch, launch.first.device.index) for launch in missing])
    return [launch.compiled() for launch in launches]


def launch_together(launches: Sequence[Launch]) -> list[Any]:
    """Launch in order, and return the compiled kernels. All compile before the first one runs: if one does not compile,
    nothing has been computed yet, and another backend can run the call."""
    if launches and launches[0].first.is_meta:
        for launch in launches:
            launch()
        return []
    kernels = compile_together(launches)
    for launch, kernel in zip(launches, kernels, strict=True):
        launch.start(kernel)
    return kernels


def compile_ahead(launches: Sequence[Launch], device_index: int) -> None:
    """Start compiling launches on meta tensors for a GPU. A launch of the same kernel waits for them."""
    for launch in launches:
        # A loaded kernel never waits, so drop finished compilations, which would pile up over calls of new lengths.
        running = [future for future in PENDING.get(id(launch.kernel), ()) if not future.done()]
        PENDING[id(launch.kernel)] = [*running, start(launch, device_index)]


def start(launch: Launch, device_index: int | None) -> Future[Any]:
    """Compile a launch's kernel in another thread: for the GPU of this index, or for the GPU that Triton is set to."""

    def compile_one() -> Any:
        with on_index(device_index):
            return triton_abi.compile_kernel(launch.kernel, launch.arguments, launch.grid, launch.constants)

    return _threads().submit(compile_one)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="flashspan-compile")


def _forget_threads() -> None:
    PENDING.clear()
    _threads.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)  # a child has no threads, and would wait for them forever
