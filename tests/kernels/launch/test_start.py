"""start.c starts the launches that it is given: compiled here with a driver that only records them."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.nvidia import driver

from flashspan.kernels.launch import replay
from flashspan.kernels.launch.replay import CONSTANT, _parameter

DRIVER = """
#include "cuda.h"
#include <stdint.h>
uint64_t seen[256];
int num_seen, num_launches, failing = -1, contexts;
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)(uintptr_t)contexts; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)(uintptr_t)(8 + device); return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { contexts = (int)(uintptr_t)context; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult code, const char **text) { *text = "no such kernel"; return CUDA_SUCCESS; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **parameters, void **extra) {
  if (num_launches++ == failing) return CUDA_ERROR_NOT_FOUND;
  uint64_t head[] = {(uint64_t)function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY,
    c->blockDimZ, c->sharedMemBytes, (uint64_t)c->hStream, c->numAttrs, c->attrs->id,
    c->attrs->value.programmaticStreamSerializationAllowed};
  for (int i = 0; i < 12; i++) seen[num_seen++] = head[i];
  for (int i = 0; i < (int)(uint64_t)function; i++) seen[num_seen++] = *(uint64_t *)parameters[i];
  return CUDA_SUCCESS;
}
"""
"""A driver in whose launches the function is the number of parameters."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ctypes.CDLL]:
    """start.c, and its driver. A process loads one driver."""
    tmp_path = tmp_path_factory.mktemp("start")
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None or torch.cuda.is_available():
        pytest.skip("needs a C compiler, and no driver that is loaded already")
    (tmp_path / "driver.c").write_text(DRIVER)
    source, library = Path(replay.__file__).with_name("start.c"), tmp_path / "libcuda.so.1"
    module = tmp_path / f"flashspan_start{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = [f"-I{folder}" for folder in (*driver.include_dirs, sysconfig.get_paths()["include"])]
    common = [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", *include]
    subprocess.run([*common, tmp_path / "driver.c", "-Wl,-soname,libcuda.so.1", "-o", library], check=True)
    linked = [f"-L{tmp_path}", "-l:libcuda.so.1", f"-Wl,-rpath,{tmp_path}"]
    subprocess.run([*common, source, *linked, "-o", module], check=True)
    spec = importlib.util.spec_from_file_location("flashspan_start", module)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded, ctypes.CDLL(str(library))


def forgotten(built: tuple[Any, ctypes.CDLL]) -> tuple[Any, ctypes.CDLL]:
    for name, value in (("num_seen", 0), ("num_launches", 0), ("failing", -1), ("contexts", 0)):
        ctypes.c_int.in_dll(built[1], name).value = value
    return built


def launch(early: bool, *parameters: bytes) -> bytes:
    return struct.pack("Q7I4x", len(parameters), 5, 6, 7, 128, 4096, early, len(parameters)) + b"".join(parameters)


def test_all_launches_of_a_pass_start_with_their_parameters(built: tuple[Any, ctypes.CDLL]) -> None:
    module, fake = forgotten(built)
    seen = (ctypes.c_uint64 * 256).in_dll(fake, "seen")
    one = launch(True, _parameter(1), _parameter(CONSTANT, "i", -3), _parameter(0))
    two = launch(False, _parameter(CONSTANT, "f", 0.5), _parameter(CONSTANT, "q", 2**40))
    assert module.start(one + two, 99, [2**63 + 1, 2**40 + 2]) is None
    common = [5, 6, 7, 128, 1, 1, 4096, 99]
    first = [3, *common, 1, 6, 1, 2**40 + 2, 2**32 - 3, 2**63 + 1]
    second = [2, *common, 0, 6, 1, struct.unpack("I", struct.pack("f", 0.5))[0], 2**40]
    assert list(seen)[: ctypes.c_int.in_dll(fake, "num_seen").value] == first + second
    assert ctypes.c_int.in_dll(fake, "contexts").value == 8, "a new thread gets the context of device 0"


def test_a_tensor_map_is_passed_where_it_is(built: tuple[Any, ctypes.CDLL]) -> None:
    module, fake = forgotten(built)

    class Ends:
        __slots__ = tuple(f"x{i:02}" for i in range(16))  # the last 128 bytes of its object

    x = Ends()
    x.x00 = held = object()
    module.start(launch(False, _parameter(0)), 0, [x])
    assert (ctypes.c_uint64 * 256).in_dll(fake, "seen")[12] == id(held)


def test_a_launch_that_fails_is_the_last_and_an_error(built: tuple[Any, ctypes.CDLL]) -> None:
    module, fake = forgotten(built)
    ctypes.c_int.in_dll(fake, "failing").value = 1
    with pytest.raises(RuntimeError, match=r"Triton Error \[CUDA\]: no such kernel"):
        module.start(launch(False) * 3, 0, [])
    assert ctypes.c_int.in_dll(fake, "num_launches").value == 2
    with pytest.raises(TypeError):
        module.start(launch(False), 0, (1,))
    with pytest.raises(OverflowError):
        module.start(launch(False), 0, [-1])
