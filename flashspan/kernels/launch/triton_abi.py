"""Every undocumented name of Triton that a launch uses, in one place.

They were checked in the releases RELEASES; tests/kernels/launch/test_triton_abi.py lists and tests them. On other
releases, Triton's own launcher is used, with one warning about its cost.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as triton_compile
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.build import compile_module_from_src
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITCallable, JITFunction

RELEASES = ("3.6", "3.7")
SLOW = "kernels use Triton's own launcher, and a short call takes 2 to 5 times as long on the host"


@functools.cache
def is_known() -> bool:
    """Whether the launcher of this release was checked; warns if not."""
    known = ".".join(triton.__version__.split(".")[:2]) in RELEASES
    if not known:
        warnings.warn(
            f"flashspan's fast launcher was checked with Triton {', '.join(RELEASES)}, not with {triton.__version__}: "
            f"{SLOW}",
            RuntimeWarning,
            stacklevel=2,
        )
    return known


def is_kernel(x: object) -> bool:
    """Whether x is a kernel that Triton compiles, not one that it interprets."""
    return isinstance(x, JITFunction)


def is_interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return bool(knobs.runtime.interpret)


def is_watched() -> bool:
    """Whether a profiler has hooks on Triton's launches. Then all launches must use Triton's launcher."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))


def is_of_the_compiler(error: Exception) -> bool:
    """Whether this error means that a kernel failed to compile or load.

    A compiler pass that fails raises a plain RuntimeError, as a broken device does; the traceback distinguishes them.
    """
    compiling = any(frame.f_code is triton_compile.__code__ for frame, _ in walk_tb(error.__traceback__))
    return compiling or isinstance(error, (CompilationError, OutOfResources, PTXASError))


def stream_of(device_index: int) -> int:
    """The current stream of a GPU."""
    return driver.active.get_current_stream(device_index)


def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a program may use. For meta tensors, that of a GPU of `architecture`."""
    if device.type == "meta":
        return 227 * 1024 if architecture(device) in (90, 100, 103) else 99 * 1024
    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def architecture(device: torch.device) -> int:
    """The compute capability of an NVIDIA GPU, 90 for 9.0; 0 for other devices. For meta tensors, that of the GPU for
    which kernels are compiled: from `compile_for_architecture`, else this machine's GPU, else 90."""
    if device.type == "meta" and (_assumed or not torch.cuda.is_available()):
        return _assumed[0] if _assumed else 90
    if device.type not in ("cuda", "meta") or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(None if device.type == "meta" else device)
    return 10 * major + minor


def compile_kernel(kernel: Any, arguments: tuple[Any, ...], grid: tuple[int, ...], constants: dict[str, Any]) -> Any:
    """The kernel compiled for these arguments and the current device, or read from Triton's cache."""
    hash_in_order(kernel)
    return kernel.warmup(*arguments, grid=grid, **constants)


_hashed: dict[int, Any] = {}
"""The functions that hash_in_order has processed, by id, because hash(function) would compute the hash that it
prepares. They are kept alive, so that no other function gets their id."""


def hash_in_order(function: Any) -> None:
    """Compute the hashes of the functions that a Triton function calls, then its own.

    The hash of a kernel is part of its key in Triton's cache. Triton reads which constants a called function uses
    before it has visited that function. Without this, the key depends on what was compiled earlier, and a thread or a
    later process may compile the same kernel again.
    """
    if id(function) in _hashed or not isinstance(function, JITCallable):
        return
    scope, names = function.__globals__, function.fn.__code__.co_names
    used = [scope.get(name) for name in names]
    used += [getattr(module, name, None) for module in used if inspect.ismodule(module) for name in names]
    for value in used:
        methods = getattr(value, "hash_attrs", ())  # of an aggregate
        for called in (value, *methods):
            hash_in_order(called)
    _ = function.cache_key
    _hashed[id(function)] = function


def compile_and_load(kernel: Any, arguments: tuple[Any, ...], grid: tuple[int, ...], constants: dict[str, Any]) -> Any:
    """`compile_kernel`, then load the kernel on the current device."""
    compiled = compile_kernel(kernel, arguments, grid, constants)
    _ = compiled.run  # reading the attribute loads the kernel
    return compiled


_assumed: list[int] = []  # the architecture to compile for in place of the GPU's


def compile_for_architecture(architecture: int | str, kind: str = "cuda") -> None:
    """From now on, compile for an NVIDIA GPU of this compute capability (90 for 9.0), even if this machine has none, or
    for an AMD GPU: "gfx942" of the kind "hip"."""
    _assumed[:] = [int(architecture) if kind == "cuda" else 0]
    target = GPUTarget(kind, architecture, 32 if kind == "cuda" else 64)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: architecture,  # Triton caches a kernel's target by its device
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )


def count_compilations(count: Callable[[bool], None]) -> None:
    """Call `count` after each compilation. Its argument is whether the kernel was in Triton's cache."""
    knobs.compilation.listener = lambda *, cache_hit, **_: count(cache_hit)


def cache_folder() -> str:
    """The folder in which Triton stores compiled kernels."""
    return knobs.cache.dir


def run(compiled: Any, grid: tuple[int, ...], stream: int, arguments: list[Any]) -> None:
    """Launch through Triton's launcher object, without the lookup of the compiled kernel."""
    fixed = (compiled.function, compiled.packed_metadata, None, None, None)
    compiled.run(*(*grid, 1, 1)[:3], stream, *fixed, *arguments)


def launch_form(compiled: Any) -> tuple[tuple[int, int, int, bool], list[str], list[Any]] | None:
    """How the driver launches a kernel: its function, threads, bytes of shared memory, and whether it may start before
    the previous kernel ends; the types of its parameters, "constexpr" for those compiled into it; Triton's metadata of
    each descriptor. None for a kernel that only Triton can launch: of another vendor, with scratch memory or clusters.
    """
    launcher, metadata = compiled.run, compiled.metadata
    if metadata.target.backend != "cuda" or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    warps, blocks, shared = compiled.packed_metadata
    descriptors = list(getattr(metadata, "tensordesc_meta", None) or [])
    if blocks != 1 or launcher.launch_cooperative_grid or None in descriptors:
        return None
    kernel = (compiled.function, 32 * warps, shared, bool(launcher.launch_pdl))
    return kernel, list(compiled.src.signature.values()), descriptors


@functools.cache
def starter() -> Callable[[bytes, int, list[Any]], None] | None:
    """The C function of start.c, compiled by Triton and stored in its cache. None on an unknown release, or where it
    cannot be compiled: a machine without a compiler may have Triton's own modules in its cache."""
    if not is_known():
        return None
    from triton.backends.nvidia import driver as nvidia

    try:
        source = Path(__file__).with_name("start.c").read_text()
        libraries = (nvidia.library_dirs(), nvidia.include_dirs, nvidia.libraries)
        return compile_module_from_src(source, "flashspan_start", *libraries).start
    except Exception as error:
        warnings.warn(f"flashspan's fast launcher cannot be used: {error}; {SLOW}", RuntimeWarning, stacklevel=2)
        return None


def encode_descriptor(form: Any, metadata: Any, address: int) -> Any:
    """The encoding of a descriptor for a tensor at an address: the first of its arguments."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    form.base = SimpleNamespace(data_ptr=lambda: address)
    return make_tensordesc_arg(form, metadata)[0]
