"""Every undocumented name of Triton that a launch uses, in one place.

They were checked in the releases RELEASES. On another release Triton's own launcher is used, with one warning about its
cost. `NAMES` and `ATTRIBUTES` list them for the tests.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

import triton
from triton import knobs
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
    "triton.runtime.driver": ["DriverConfig.active"],
    "triton.knobs": ["runtime.interpret", "runtime.launch_enter_hook", "runtime.launch_exit_hook"],
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
    """Whether the launcher of this release was checked; warns if not."""
    known = ".".join(triton.__version__.split(".")[:2]) in RELEASES
    if not known:
        warnings.warn(
            f"the launcher of Triton {triton.__version__} was not checked, only those of {', '.join(RELEASES)}: "
            f"kernels use Triton's own launcher, and a short call takes 2 to 5 times as long on the host",
            RuntimeWarning,
            stacklevel=2,
        )
    return known


def is_kernel(x: object) -> bool:
    """Whether it is a kernel that Triton compiles, not one that it interprets."""
    return isinstance(x, JITFunction)


def is_interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return bool(knobs.runtime.interpret)


def is_watched() -> bool:
    """Whether a profiler has hooks on Triton's launches: then all of them must use Triton's launcher."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))


def is_of_the_compiler(error: Exception) -> bool:
    """Whether a kernel failed to compile or load.

    A compiler pass that fails raises a plain RuntimeError, as a broken device does; the traceback distinguishes them.
    """
    compiling = any(frame.f_code is triton_compile.__code__ for frame, _ in walk_tb(error.__traceback__))
    return compiling or isinstance(error, (CompilationError, OutOfResources, PTXASError))


def stream_of(device_index: int) -> int:
    """The current stream of a GPU."""
    return driver.active.get_current_stream(device_index)


def shared_memory(device_index: int) -> int:
    """The bytes of shared memory that a program may use."""
    return driver.active.utils.get_device_properties(device_index)["max_shared_mem"]


def compile_and_load(kernel: Any, arguments: tuple[Any, ...], grid: tuple[int, ...], constants: dict[str, Any]) -> Any:
    """A kernel compiled for these arguments and loaded on the current device."""
    compiled = kernel.warmup(*arguments, grid=grid, **constants)
    _ = compiled.run  # asking for it loads the kernel
    return compiled


def run(compiled: Any, grid: tuple[int, ...], stream: int, arguments: list[Any]) -> None:
    """Launch through Triton's launcher object, without the lookup before it."""
    fixed = (compiled.function, compiled.packed_metadata, None, None, None)
    compiled.run(*(*grid, 1, 1)[:3], stream, *fixed, *arguments)


def c_launcher(compiled: Any, grid: tuple[int, ...]) -> tuple[Callable[[int, list[Any]], None], list[Any]] | None:
    """Triton's C function as a function of a stream and the arguments, and Triton's metadata of each descriptor.

    None where it cannot be called directly: another vendor, a kernel with scratch memory, an unknown release.
    """
    launcher = compiled.run
    if compiled.metadata.target.backend != "cuda" or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    launch, metadata = launcher.launch, []
    if inspect.isfunction(launch):  # a Python function that encodes descriptors and then calls it
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
    """The encoding of a descriptor for a tensor at an address: the first of its arguments."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    form.base = SimpleNamespace(data_ptr=lambda: address)
    return make_tensordesc_arg(form, metadata)[0]
