"""Every internal name of Triton that launches use exists and works as in the checked releases."""

from __future__ import annotations

import importlib
import operator
from typing import Any

import pytest
import triton.language as tl
from triton.backends.nvidia import driver
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
    "triton.backends.nvidia.driver": ["CudaLauncher", "wrap_handle_tensordesc", "make_tensordesc_arg"],
}
"""Modules, and the names that must exist in them."""

ATTRIBUTES = {
    "triton.compiler.compiler:CompiledKernel": ["function", "packed_metadata", "metadata"],
    "triton.runtime.jit:JITFunction": ["arg_names", "do_not_specialize"],
    "triton.runtime.jit:JITCallable": ["fn", "__globals__"],
    "triton.backends.driver:GPUDriver": ["get_current_stream"],
    "triton.backends.nvidia.driver:CudaUtils": ["get_device_properties"],
    "triton.backends.nvidia.driver:CudaLauncher": [
        *("launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"),
    ],
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


def test_descriptors_are_made_inside_a_closure_of_these_names() -> None:
    wrapped = driver.wrap_handle_tensordesc(print, {0: "tensordesc<fp16[1]>"}, ["metadata"])
    within = dict(zip(wrapped.__code__.co_freevars, (cell.cell_contents for cell in wrapped.__closure__), strict=True))
    assert within["launcher"] is print
    assert within["tensordesc_meta"] == ["metadata"]
    assert driver.wrap_handle_tensordesc(print, {0: "i32"}, None) is print


def test_this_release_was_read() -> None:
    assert triton_abi.is_known()
