"""Every name inside Triton that a launch uses beyond what Triton documents, in one place.

They were read in the releases RELEASES. On another release launches go through Triton's own launcher, and one warning
says what that costs. `NAMES` lists them for the tests, one by one.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
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
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITFunction

RELEASES = ("3.6", "3.7")

NAMES = {
    "triton.compiler": ["compile"],
    "triton.compiler.errors": ["CompilationError"],
    "triton.runtime.errors": ["OutOfResources", "PTXASError"],
    "triton.runtime.jit": ["JITFunction.warmup"],
    "triton.runtime.driver": ["DriverConfig.active", "DriverConfig.set_active"],
    "triton.backends.compiler": ["GPUTarget"],
    "triton.knobs": [
        *("runtime.interpret", "runtime.launch_enter_hook", "runtime.launch_exit_hook"),
        *("CompilationListener", "cache.dir"),
    ],
    "triton.compiler.compiler": ["CompiledKernel.run"],
    "triton.backends.nvidia.driver": ["CudaLauncher", "wrap_handle_tensordesc", "make_tensordesc_arg"],
}
"""Modules and the names in them."""

ATTRIBUTES = {
    "triton.compiler.compiler:CompiledKernel": ["function", "packed_metadata", "metadata"],
    "triton.runtime.jit:JITFunction": ["arg_names", "do_not_specialize"],
    "triton.backends.driver:GPUDriver": ["get_current_stream"],
    "triton.backends.nvidia.driver:CudaUtils": ["get_device_properties"],
    "triton.backends.nvidia.driver:CudaLauncher": [
        *("launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"),
    ],
}
"""Classes and what their __init__ sets."""


@functools.cache
def is_known() -> bool:
    """Whether this release's launcher was read; warns if not."""
    known = ".".join(triton.__version__.split(".")[:2]) in RELEASES
    if not known:
        warnings.warn(
            f"Triton {triton.__version__} is not one of the releases whose launcher was read ({', '.join(RELEASES)}): "
            f"kernels go through Triton's own launcher, and a short call takes the host 2 to 5 times as long",
            RuntimeWarning,
            stacklevel=2,
        )
    return known


def is_kernel(x: object) -> bool:
    """Whether it is compiled, not interpreted."""
    return isinstance(x, JITFunction)


def is_interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return bool(knobs.runtime.interpret)


def is_watched() -> bool:
    """Whether somebody, a profiler, listens to Triton's launches: they must all go Triton's way then."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))


def is_of_the_compiler(error: Exception) -> bool:
    """Whether a kernel failed to compile or load. A pass of the compiler that fails raises a mere RuntimeError, as the
    device does when it fails and no kernel can run any more: where it was raised tells them apart."""
    compiling = any(frame.f_code is triton_compile.__code__ for frame, _ in walk_tb(error.__traceback__))
    return compiling or isinstance(error, (CompilationError, OutOfResources, PTXASError))


def stream_of(device_index: int) -> int:
    """The current stream of a GPU."""
    return driver.active.get_current_stream(device_index)


def shared_memory(device: torch.device) -> int:
    """How many bytes of shared memory a program may have; meta tensors stand for a GPU of `architecture`."""
    if device.type == "meta":
        return 227 * 1024 if architecture(device) in (90, 100, 103) else 99 * 1024
    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def architecture(device: torch.device) -> int:
    """The compute capability of an NVIDIA GPU, 90 for 9.0; 0 of other devices. Meta tensors stand for the GPU that is
    compiled for: the one asked for, else the one here, else a Hopper GPU."""
    if device.type == "meta" and (_assumed or not torch.cuda.is_available()):
        return _assumed[0] if _assumed else 90
    if device.type not in ("cuda", "meta") or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(None if device.type == "meta" else device)
    return 10 * major + minor


def compile_kernel(kernel: Any, arguments: tuple[Any, ...], grid: tuple[int, ...], constants: dict[str, Any]) -> Any:
    """A kernel compiled for these arguments and the current device, or read from Triton's cache."""
    return kernel.warmup(*arguments, grid=grid, **constants)


def compile_and_load(kernel: Any, arguments: tuple[Any, ...], grid: tuple[int, ...], constants: dict[str, Any]) -> Any:
    """The same, and loaded there."""
    compiled = compile_kernel(kernel, arguments, grid, constants)
    _ = compiled.run  # asking for it loads the kernel
    return compiled


_assumed: list[int] = []  # the architecture to compile for in place of the GPU's


def compile_for_architecture(architecture: int) -> None:
    """From now on compile for an NVIDIA GPU of this compute capability (90 for 9.0), which need not be here."""
    _assumed[:] = [architecture]
    target = GPUTarget("cuda", architecture, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )


def count_compilations(count: Callable[[bool], None]) -> None:
    """Call `count` after each compilation, with whether the kernel was in Triton's cache."""
    knobs.compilation.listener = lambda *, cache_hit, **_: count(cache_hit)


def cache_folder() -> str:
    """Where Triton keeps compiled kernels."""
    return knobs.cache.dir


def run(compiled: Any, grid: tuple[int, ...], stream: int, arguments: list[Any]) -> None:
    """Launch by the Python part of Triton's launcher alone."""
    fixed = (compiled.function, compiled.packed_metadata, None, None, None)
    compiled.run(*(*grid, 1, 1)[:3], stream, *fixed, *arguments)


def c_launcher(compiled: Any, grid: tuple[int, ...]) -> tuple[Callable[[int, list[Any]], None], list[Any]] | None:
    """Triton's C function for a compiled kernel, of a stream and the arguments, and what it knows of each descriptor.
    None where it cannot be called alone: another vendor, a kernel that wants scratch memory, an unknown release."""
    launcher = compiled.run
    if compiled.metadata.target.backend != "cuda" or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    launch, metadata = launcher.launch, []
    if inspect.isfunction(launch):  # it lies within a Python function, which makes descriptors for it
        cells = zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True)
        within = {name: cell.cell_contents for name, cell in cells}
        launch, metadata = within["launcher"], within["tensordesc_meta"]
    if None in metadata:
        return None
    size = (*grid, 1, 1)[:3]
    kernel = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    hooks, scratch, packed = (None, None, None), (None, None), compiled.packed_metadata
    if triton.__version__.startswith("3.6."):
        fixed: tuple[Any, ...] = (*kernel, *scratch, packed, *hooks)
        return lambda stream, arguments: launch(*size, stream, *fixed, *arguments), metadata
    if triton.__version__.startswith("3.7."):
        fixed = (*kernel, packed, *hooks, *scratch, launcher.arg_annotations, launcher.kernel_signature)
        return lambda stream, arguments: launch(*size, stream, *fixed, arguments), metadata
    return None


def encode_descriptor(form: Any, metadata: Any, address: int) -> Any:
    """What the copy engine is told of a tensor at an address: the first of a descriptor's arguments."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    form.base = SimpleNamespace(data_ptr=lambda: address)
    return make_tensordesc_arg(form, metadata)[0]
