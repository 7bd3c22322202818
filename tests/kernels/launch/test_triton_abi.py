"""Every internal name of Triton that launches use exists and works as in the checked releases."""

from __future__ import annotations

import importlib
import operator
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.nvidia import compiler, driver
from triton.runtime.jit import JITFunction

from flashspan.kernels.launch import triton_abi

NAMES = {
    "triton.compiler": ["compile"],
    "triton.compiler.errors": ["CompilationError"],
    "triton.runtime.errors": ["OutOfResources", "PTXASError"],
    "triton.runtime.jit": ["JITFunction.warmup", "JITCallable.cache_key"],
    "triton.runtime.driver": ["DriverConfig.active", "DriverConfig.set_active"],
    "triton.backends.compiler": ["GPUTarget"],
    "triton.knobs": [
        *("runtime.interpret", "runtime.launch_enter_hook", "runtime.launch_exit_hook"),
        *("CompilationListener", "cache.dir"),
    ],
    "triton.compiler.compiler": ["CompiledKernel.run"],
    "triton.backends.nvidia.driver": [
        *("CudaLauncher", "wrap_handle_tensordesc", "make_tensordesc_arg", "libraries", "library_dirs", "include_dirs"),
    ],
    "triton.runtime.build": ["compile_module_from_src"],
}
"""Modules, and the names that must exist in them."""

ATTRIBUTES = {
    "triton.compiler.compiler:CompiledKernel": ["function", "packed_metadata", "metadata", "src"],
    "triton.runtime.jit:JITFunction": ["arg_names", "do_not_specialize"],
    "triton.runtime.jit:JITCallable": ["fn", "__globals__"],
    "triton.backends.driver:GPUDriver": ["get_current_stream"],
    "triton.backends.nvidia.driver:CudaUtils": ["get_device_properties"],
    "triton.backends.nvidia.driver:CudaLauncher": [
        *("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"),
    ],
    "triton.compiler.compiler:ASTSource": ["signature"],
}
"""Classes, and the attributes that their __init__ must set."""


ADDED = tl.constexpr(1)


def helper(x):
    return x + ADDED


def first_kernel(x):
    helper(x)


def second_kernel(x):
    helper(x)


def pairs(names: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(place, name) for place, found in names.items() for name in found]


def find(module: str, name: str) -> Any:
    return operator.attrgetter(name)(importlib.import_module(module))


def sets(place: str, name: str) -> bool:
    """Whether the __init__ of a class sets an attribute."""
    return name in find(*place.split(":")).__init__.__code__.co_names


@pytest.mark.parametrize(("module", "name"), pairs(NAMES))
def test_a_name_is_there_and_missed_when_it_is_gone(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(module, name)
    assert found is not None
    *path, last = name.split(".")
    owner = find(module, ".".join(path)) if path else importlib.import_module(module)
    if last in vars(owner):
        monkeypatch.delattr(owner, last)
        with pytest.raises(AttributeError):
            find(module, name)


@pytest.mark.parametrize(("place", "name"), pairs(ATTRIBUTES))
def test_an_attribute_is_set(place: str, name: str) -> None:
    assert sets(place, name)
    assert not sets(place, f"{name}_of_another_release")


def test_a_kernel_has_one_hash_whatever_was_hashed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = helper

    def hashes(*functions: Any) -> dict[str, str]:
        monkeypatch.setitem(globals(), "helper", JITFunction(plain))
        kernels = [JITFunction(function) for function in functions]
        for kernel in kernels:
            triton_abi.hash_in_order(kernel)
        return {kernel.fn.__name__: kernel.cache_key for kernel in kernels}

    assert hashes(first_kernel, second_kernel) == hashes(second_kernel, first_kernel)


def test_metadata_are_the_warps_the_clusters_and_the_shared_memory() -> None:
    metadata = SimpleNamespace(num_warps=4, num_ctas=1, shared=512)
    assert compiler.CUDABackend.pack_metadata(None, metadata) == (4, 1, 512)


def test_a_tensor_map_is_at_the_end_of_its_object() -> None:
    source = Path(driver.__file__).with_name("driver.c").read_text()
    (last,) = re.findall(r"PyObject_HEAD;\s*_Alignas\([^;]*\) CUtensorMap (\w+);\s*\} PyCUtensorMapObject;", source)
    assert last == "tensorMap"


PARAMETERS = {
    "3.6": (driver, r'params.append\("&global_scratch"\)\s*params.append\("&profile_scratch"\)\s*src ='),
    "3.7": (None, r"extractPointer\(params\[params_idx\+\+\], (?:global|profile)_scratch_obj"),
}
"""By release, where Triton's launcher adds two addresses of scratch memory after a kernel's parameters."""


def test_two_addresses_follow_the_parameters() -> None:
    module, pattern = PARAMETERS[".".join(triton.__version__.split(".")[:2])]
    place = Path(driver.__file__) if module is driver else Path(driver.__file__).with_name("driver.c")
    assert len(re.findall(pattern, place.read_text())) == (1 if module is driver else 2)


def test_without_a_compiler_launches_use_tritons_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*call: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(driver, "library_dirs", list)
    monkeypatch.setattr(triton_abi, "compile_module_from_src", fail)
    triton_abi.starter.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="Failed to find C compiler; kernels use Triton's own launcher"):
            assert triton_abi.starter() is None
        assert triton_abi.starter() is None, "one warning"
    finally:
        triton_abi.starter.cache_clear()


def test_this_release_was_read() -> None:
    assert triton_abi.is_known()
