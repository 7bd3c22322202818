"""A GPU for launches on CPU tensors, which only records them."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from flashspan.kernels.launch import replay, triton_abi
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.launch.replay import FORMATS
from flashspan.kernels.portable import few_tiles
from tests.kernels.hopper_cases import let_hopper_serve_short_calls


class Gpu:
    """Hopper launches on CPU tensors: records the kernels' parameters that reach Triton's C function or start.c, and
    checks every replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, short: bool = False) -> None:
        """short: the kernels for few tiles run short calls, as they do outside of tests."""
        if not short:
            let_hopper_serve_short_calls(monkeypatch)
        self.hopper = pytest.importorskip("flashspan.kernels.hopper.launch")
        self.nvidia = pytest.importorskip("triton.backends.nvidia.driver")
        self.seen, self.plain, self.encoded = [], 0, 0
        self.functions: dict[tuple[Any, ...], int] = {}
        self.types: dict[int, list[str]] = {}
        monkeypatch.setattr(triton_abi, "stream_of", lambda index: 7)
        monkeypatch.setattr(self.nvidia, "make_tensordesc_arg", self.encode)
        monkeypatch.setattr(triton_abi, "starter", lambda: self.start_pass if triton_abi.is_known() else None)
        monkeypatch.setattr(Launch, "compiled", lambda launch: self.compiled(launch))
        monkeypatch.setattr(Launch, "start", lambda launch, compiled: self.start(launch, compiled))
        for module in (self.hopper, few_tiles):
            monkeypatch.setattr(module, "replay", self.replay)

    def encode(self, descriptor: Any, metadata: Any) -> list[Any]:
        self.encoded += 1
        x = (descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides, *descriptor.block_shape, metadata)
        return [x, *descriptor.shape, *descriptor.strides]

    def c_function(self, *arguments: Any) -> None:
        """Triton's C function."""
        *first, last = arguments
        flat = [*first, *(last if isinstance(last, (list, tuple)) else [last])]  # some releases take a list
        function, early, types = flat[4], flat[6], self.types[flat[4]]
        values = zip(types, flat[len(flat) - len(types) :], strict=True)
        parameters = [self.parameter(kind, x) for kind, x in values if kind != "constexpr"]
        self.seen.append([function, *flat[:3], 32 * 4, 0, early, *parameters, 0, 0])

    def parameter(self, kind: str, x: Any) -> Any:
        x = x.data_ptr() if isinstance(x, Tensor) else x
        return struct.unpack("f", struct.pack("f", x))[0] if kind == "fp32" else x

    def start_pass(self, launches: bytes, stream: int, values: list[Any]) -> None:
        """The C function of start.c."""
        assert stream == 7
        while launches:
            *head, num_parameters = struct.unpack_from("Q7I", launches)
            kinds = [kind for kind in self.types[head[0]] if kind != "constexpr"] + ["u64"] * 2
            assert num_parameters == len(kinds)
            found, launches = launches[40 : 40 + 16 * len(kinds)], launches[40 + 16 * len(kinds) :]
            parameters = []
            for i, kind in enumerate(kinds):
                place, *constant = struct.unpack_from("q" + FORMATS.get(kind, "Q"), found, 16 * i)
                parameters.append(values[place] if place >= 0 else constant[0])
            self.seen.append([*head, *parameters])

    def compiled(self, launch: Launch) -> Any:
        kinds = {"tensordesc": "tensordesc<fp16[1]>", Tensor: "*fp16", bool: "u1", int: "i64", float: "fp32"}
        kinds[type(None)] = "constexpr"
        types = [kinds["tensordesc" if hasattr(x, "block_shape") else type(x)] for x in launch.arguments]
        types += ["constexpr"] * len(launch.constexprs())
        metadata = [f"descriptor {i}" for i in range(sum(kind.startswith("tensordesc") for kind in types))]
        run = object.__new__(self.nvidia.CudaLauncher)
        vars(run).update(
            launch=self.nvidia.wrap_handle_tensordesc(self.c_function, dict(enumerate(types)), metadata),
            num_ctas=1,
            launch_cooperative_grid=False,
            launch_pdl=True,
            arg_annotations=["a"],
            kernel_signature=b"s",
            global_scratch_size=0,
            global_scratch_align=1,
            profile_scratch_size=0,
            profile_scratch_align=1,
        )
        # Triton compiles another kernel if an address is not a multiple of 16.
        tensors = [x for x in launch.arguments if isinstance(x, Tensor)]
        name = (launch.kernel.__name__, *launch.constants.values(), *(x.data_ptr() & 15 for x in tensors), *types)
        function = self.functions.setdefault(name, len(self.functions))
        self.types[function] = []
        for x, kind in zip([*launch.arguments, *launch.constexprs()], types, strict=True):
            described = kind.startswith("tensordesc")
            self.types[function] += ["map", *["i32"] * len(x.shape), *["i64"] * len(x.shape)] if described else [kind]
        return SimpleNamespace(
            run=run,
            function=function,
            packed_metadata=(4, 1, 0),
            metadata=SimpleNamespace(target=SimpleNamespace(backend="cuda"), tensordesc_meta=metadata),
            src=SimpleNamespace(signature=dict(enumerate(types))),
        )

    def start(self, launch: Launch, compiled: Any) -> None:
        """Launch through all the Python code of Triton's launcher. Every other way must do the same."""
        self.plain += 1
        compiled.run(
            *(*launch.grid, 1, 1)[:3],
            7,
            compiled.function,
            (4, 1, 0),
            None,
            None,
            None,
            *launch.arguments,
            *launch.constexprs(),
        )

    def replay(self, make: Any, given: Any, tables: Any, made: Any, *what: Any) -> bool:
        self.seen = []
        done = replay.replay(make, given, tables, made, *what)
        replayed, plain, self.seen = self.seen, self.plain, []
        for launch in make((*given, *tables.tensors, *made), *tables.what, *what) or ():
            launch()
        self.plain = plain
        assert replayed == self.seen
        assert done is bool(replayed)
        return done
