"""The key of a launch's compiled kernel, and repeated launches that equal the first one. No GPU is needed."""

from __future__ import annotations

import copy
import ctypes
import gc
import random
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import PTXASError

from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.failure import KernelFailed
from flashspan.kernels.launch import cache, replay, triton_abi
from flashspan.kernels.launch.launch import Launch, _Places
from flashspan.kernels.launch.replay import PreparedPass
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Mask, Rows
from flashspan.kernels.portable import few_tiles
from flashspan.kernels.torch_private import empty_strided
from flashspan.masks.patterns import documents, ragged
from tests.kernels.launch.recording_gpu import Gpu

KERNEL = SimpleNamespace(arg_names=["x", "stride", "T", "scale", "BLOCK"], do_not_specialize=["T"])


def key(x: torch.Tensor, stride: int, length: int, scale: float, block: int) -> tuple[Any, ...]:
    launch = Launch(KERNEL, (1,), (x, stride, length, scale), {"BLOCK": block})
    return _Places.of(launch).key(launch)


def test_a_launch_wants_the_kernel_of_its_types_alignment_and_constants() -> None:
    x = torch.zeros(64)
    first = key(x, 16, 100, 0.5, 32)
    assert first == key(x, 16, 7, 0.25, 32), "lengths and scales compile nothing"
    for other in (
        key(x.half(), 16, 100, 0.5, 32),
        key(x[1:], 16, 100, 0.5, 32),
        key(x, 1, 100, 0.5, 32),
        key(x, 16, 2**31, 0.5, 32),
        key(x, 16, 100, 0.5, 64),
    ):
        assert other != first


def test_lengths_without_end_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel(SimpleNamespace):
        def warmup(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(run=print)

    class OnGpu(Tensor):
        is_cuda = True

    kernel, x = Kernel(**vars(KERNEL)), torch.zeros(64).as_subclass(OnGpu)
    monkeypatch.setattr(triton_abi, "JITFunction", Kernel)
    monkeypatch.setattr(cache, "KEPT", 5)
    for stride in range(20):
        assert Launch(kernel, (1,), (x, stride, 100, 0.5), {"BLOCK": 32}).compiled().run is print
        assert 1 <= len(cache.CACHE) <= 5


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with torch.no_grad():
        yield Gpu(monkeypatch)


def attend(gpu: Gpu, x: list[Tensor], mask: Mask, scale: float = 0.125, carried: bool = False) -> Carry:
    """Forward and backward over q, k, v and dout."""
    q, k, v, dout = x
    carry = gpu.hopper.forward(q, k, v, Problem(mask, scale), out_dtype=torch.float32 if carried else q.dtype)
    if carried:
        carry = gpu.hopper.forward(q, k, v, Problem(mask, scale), carry=carry)
    into = [torch.empty_like(y, dtype=torch.float32) if carried else torch.empty_like(y) for y in (q, k, v)]
    for repeatable in (False, True):
        gpu.hopper.backward(
            dout,
            q,
            k,
            v,
            carry.lse,
            carry.lse.clone(),
            Problem(mask, scale, deterministic=repeatable),
            dq=into[0],
            dk=into[1],
            dv=into[2],
            accumulate=carried,
        )
    return carry


def some_tensor(choice: random.Random, heads: int, tokens: int) -> Tensor:
    """Zeros [2, heads, tokens, 64] at some address, in one of four layouts, the last of which is not aligned."""
    kind = choice.choice(("BHTD", "BTHD", "fused", "odd"))
    if kind == "BHTD":
        return torch.zeros(2, heads, tokens, 64).half()
    if kind == "odd":
        return torch.zeros(2 * heads * tokens * 64 + 1).half()[1:].view(2, heads, tokens, 64)
    wide = torch.zeros(2, tokens, heads * 64 * (3 if kind == "fused" else 1)).half()
    return wide[..., : heads * 64].unflatten(-1, (heads, 64)).transpose(1, 2)


def test_a_launch_replayed_is_the_launch_itself(gpu: Gpu) -> None:
    choice = random.Random(0)
    odd = documents([20, 50])
    odd.start, odd.end = (torch.cat([x[:1], x])[1:] for x in (odd.start, odd.end))  # not 16-byte aligned
    masks: list[Mask] = [
        EVERYTHING,
        CAUSAL,
        Band(-9, 3),
        Band(-9, 4),
        documents([40, 30]),
        odd,
        ragged([30, 70], 70, 70),
    ]
    held: list[Any] = []
    for _ in range(200):
        kv_heads = choice.choice((1, 2))
        x = [some_tensor(choice, heads, 70) for heads in (2, kv_heads, kv_heads, 2)]
        if choice.random() < 0.3:
            x[2] = x[1]
        if choice.random() < 0.3 and kv_heads == 2:
            x[1] = x[0]
        held = [*held[-choice.randrange(4) :], attend(gpu, x, choice.choice(masks), choice.choice((0.125, 0.5)))]
    cache.CACHE.clear()
    for mask in masks:
        for carried in (False, True):
            x = [torch.zeros(2, 2, 70, 64).half() for _ in range(4)]
            attend(gpu, x, mask, carried=carried)
            before, x = gpu.plain, [y.clone() for y in x]
            attend(gpu, x, mask, carried=carried)
            assert gpu.plain == before, "a call of a known kind goes the short way"
            x[1] = x[0]
            attend(gpu, x, mask, carried=carried)
            assert gpu.plain == before


def test_parts_of_query_heads_are_replayed(gpu: Gpu) -> None:
    """With few key heads, backward writes dK and dV to temporary tensors. The launch that casts dQ adds them, or one
    more."""
    for carried in (False, True):
        x = [torch.zeros(1, heads, 300, 64).half() for heads in (8, 1, 1, 8)]
        before = gpu.plain
        attend(gpu, x, CAUSAL, carried=carried)
        whole = 7 + (3 - 1) * carried  # the repair of forward, a second forward and its repair, no cast
        assert gpu.plain - before == whole + 1 + carried, "the launch that casts dq, if there is one, adds the parts"
        before = gpu.plain
        attend(gpu, [y.clone() for y in x], CAUSAL, carried=carried)
        assert gpu.plain == before


def tensor_at(address: int, like: Tensor) -> Tensor:
    """The tensor at an address, with the layout of a meta tensor."""
    memory = (ctypes.c_uint8 * like.untyped_storage().nbytes()).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


def test_temporary_tensors_do_not_overlap() -> None:
    sizes = [1, 255, 256, 257, 100000]
    results = [torch.empty(3, device="meta")]
    like = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    room = replay.Room.of([*like[:2], results[0], *like[2:]], results, counter=lambda device: torch.zeros(4))
    cpu = torch.device("cpu")
    addresses, (memory, counter) = room.allocate([48], cpu, empty_strided(cpu))
    assert addresses.pop(2) == 48
    assert addresses.pop() == counter.data_ptr()
    begins = [address - memory.data_ptr() for address in addresses]
    assert all(begin % 256 == 0 for begin in begins)
    ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    assert all(end <= begin for end, begin in zip(ends, [*begins[1:], memory.numel()], strict=True))
    assert replay.Room.of(()).allocate([48], cpu, empty_strided(cpu)) == ([], [])


@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)])
@pytest.mark.parametrize(("length", "head_dim"), [(300, 64), (600, 160)])
def test_a_repeated_backward_launches_what_backward_launches(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, length: int, head_dim: int, heads: tuple[int, int], repeatable: bool
) -> None:
    """At 160, the keys of the pass for dq are divided."""
    H, K = heads
    q, k, v, dout, out = (torch.zeros(1, n, length, head_dim).half() for n in (H, K, K, H, H))
    lse, problem = torch.zeros(1, H, length), Problem(CAUSAL, 0.125, deterministic=repeatable)
    tensors = (dout, q, k, v, out, lse)
    assert gpu.hopper.repeat_backward(*tensors, problem) is None, "nothing has run yet"
    into = {name: torch.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    gpu.hopper.backward_of_output(*tensors, problem, **into)
    repeat = gpu.hopper.repeat_backward(*tensors, problem)
    launched: list[list[int]] = []
    given = PreparedPass.__call__
    monkeypatch.setattr(PreparedPass, "__call__", lambda *call: (launched.append(call[1]), given(*call)))
    gpu.seen = []
    grads = repeat(*tensors, CAUSAL)
    repeated, gpu.seen = gpu.seen, []
    (addresses,) = launched
    meta = [x.to("meta") for x in (q, k, v)]
    two_passes = repeatable or head_dim > 128
    parts = gpu.hopper.count_key_parts(q, k, CAUSAL, False, not two_passes)
    dq_parts = gpu.hopper.count_dq_parts(q, k, CAUSAL, False)
    assert dq_parts == (2 if head_dim > 128 else 1)
    made = gpu.hopper._backward_tensors(*meta[:2], parts, dq_parts, False, two_passes, *meta)
    outputs = [tensor_at(address, x) for address, x in zip(addresses[9:], made, strict=True)]
    values = (problem.scale, False, two_passes, True)
    inputs = (dout, q, k, v, lse, out, *grads)
    for launch in gpu.hopper._backward_launches((*inputs, *outputs), *CAUSAL.packed.what, *values):
        launch()
    assert repeated == gpu.seen
    assert len(repeated) == 3 + (two_passes and (H > K or dq_parts > 1))
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    odd = torch.zeros(dout.numel() + 1).half()[1:].view_as(dout)
    assert repeat(odd, *tensors[1:], CAUSAL) is None, "not on 16 bytes"


@pytest.mark.parametrize("in_float16", [False, True])
@pytest.mark.parametrize("mask", [CAUSAL, EVERYTHING, documents([100, 200])], ids=["causal", "full", "documents"])
def test_a_repeated_forward_launches_what_forward_launches(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, mask: Mask, in_float16: bool
) -> None:
    monkeypatch.setattr(gpu.hopper, "is_faster", lambda *call: in_float16)
    q, k, v = (torch.zeros(2, n, 300, 64).bfloat16() for n in (4, 2, 2))
    problem = Problem(mask, 0.125)
    assert gpu.hopper.repeat_forward(q, k, v, problem, q.dtype) is None, "nothing has run yet"
    gpu.hopper.forward(q, k, v, problem, out_dtype=q.dtype)
    repeat = gpu.hopper.repeat_forward(q, k, v, problem, q.dtype)
    launched: list[list[int]] = []
    given = PreparedPass.__call__
    monkeypatch.setattr(PreparedPass, "__call__", lambda *call: (launched.append(call[1]), given(*call)))
    gpu.seen = []
    carry = repeat(q, k, v, mask)
    repeated, gpu.seen = gpu.seen, []
    tables = mask.packed.tensors
    marks = gpu.hopper.marks_rows(q, k, mask, q.dtype, in_float16)
    assert marks == (in_float16 or mask not in (CAUSAL, EVERYTHING)), "short causal calls have no second launch"
    like = [*gpu.hopper._forward_tensors(q, v, in_float16, marks), torch.zeros(4).int()]
    temporary = [tensor_at(at, x) for at, x in zip(launched[0][5 + len(tables) :], like, strict=True)]
    tensors = (q, k, v, *tables, *carry, *temporary)
    for launch in gpu.hopper._forward_launches(tensors, *mask.packed.what, 0.125, None, q.dtype, in_float16, marks):
        launch()
    assert repeated == gpu.seen
    assert len(repeated) == 1 + in_float16 + marks
    assert (carry.out.shape, carry.out.dtype) == (q.shape, q.dtype)
    assert (carry.lse.shape, carry.lse.dtype) == (q.shape[:3], torch.float32)


@pytest.mark.parametrize("mask", [CAUSAL, documents([30, 40])], ids=["causal", "documents"])
def test_short_calls_are_one_launch_a_pass_and_repeated(monkeypatch: pytest.MonkeyPatch, mask: Mask) -> None:
    gpu = Gpu(monkeypatch, short=True)
    q, k, v, dout, out = (torch.zeros(1, n, 70, 64).half() for n in (4, 2, 2, 4, 4))
    tensors, problem = (dout, q, k, v, out, torch.zeros(1, 4, 70)), Problem(mask, 0.125)
    into = {name: torch.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    assert gpu.hopper.repeat_forward(q, k, v, problem, q.dtype) is None, "nothing has run yet"
    assert gpu.hopper.repeat_backward(*tensors, problem) is None
    for first in (True, False):
        before = gpu.plain
        gpu.hopper.forward(q, k, v, problem, out_dtype=q.dtype)
        gpu.hopper.backward_of_output(*tensors, problem, **into)
        assert gpu.plain == before + 2 * first
    gpu.seen = []
    carry = gpu.hopper.repeat_forward(q, k, v, problem, q.dtype)(q, k, v, mask)
    grads = gpu.hopper.repeat_backward(*tensors, problem)(*tensors, mask)
    repeated, gpu.seen = gpu.seen, []
    values, tables = (*mask.packed.what, 0.125), mask.packed.tensors
    forward, backward = few_tiles.forward_tile(q, k, mask), few_tiles.backward_tile(q, k, mask)
    launches = few_tiles._forward_launches((q, k, v, *tables, *carry), *values, q.dtype, forward)
    given = (dout, q, k, v, tensors[5], out, *grads, *tables)
    for launch in (*launches, *few_tiles._backward_launches(given, *values, backward)):
        launch()
    assert repeated == gpu.seen
    assert len(repeated) == 2


@pytest.mark.parametrize("chip", [1, 1000])
def test_a_repeated_backward_has_the_room_that_this_gpu_needs(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, chip: int
) -> None:
    """A GPU with few multiprocessors needs no parts of heads for which an H200 does: dk and dv are written directly."""
    one_pass = pytest.importorskip("flashspan.kernels.hopper.one_pass")
    monkeypatch.setattr(one_pass, "multiprocessors", lambda device: 132 if device.type == "meta" else chip)
    q, k, v, dout, out = (torch.zeros(1, n, 300, 64).half() for n in (8, 1, 1, 8, 8))
    tensors, problem = (dout, q, k, v, out, torch.zeros(1, 8, 300)), Problem(CAUSAL, 0.125)
    into = {name: torch.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    gpu.hopper.backward_of_output(*tensors, problem, **into)
    launched: list[list[int]] = []
    monkeypatch.setattr(PreparedPass, "__call__", lambda launches, addresses, stream: launched.append(addresses))
    grads = gpu.hopper.repeat_backward(*tensors, problem)(*tensors, CAUSAL)
    parts = launched[0][9 + 3 : 9 + 5]  # after the inputs and gradients: -lse, -delta, sums, parts of dk and dv
    assert [x == grad.data_ptr() for x, grad in zip(parts, grads[1:], strict=True)] == [chip == 1] * 2


def test_replaying_keeps_no_tensor_and_not_everything(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = Rows(torch.zeros(70).int(), torch.full((70,), 70).int(), 70)
    x = [torch.zeros(1, 2, 70, 64).half() for _ in range(4)]
    carry = attend(gpu, x, mask)
    attend(gpu, x, mask)
    gone = [weakref.ref(y.untyped_storage()) for y in (*x, *carry, mask.start)]
    del x, carry, mask
    gpu.seen = []
    gc.collect()
    assert not any(reference() for reference in gone)
    monkeypatch.setattr(cache, "KEPT", 5)
    monkeypatch.setattr(replay, "KEPT_ADDRESSES", 3)
    for tokens in range(1, 30):
        attend(gpu, [torch.zeros(1, 2, tokens, 64).half() for _ in range(4)], CAUSAL)
    held = [[torch.zeros(1, 2, 20, 64).half() for _ in range(4)] for _ in range(9)]
    for x in held:
        attend(gpu, x, CAUSAL)
    assert 1 <= len(cache.CACHE) <= 5
    assert all(len(maps) <= 3 for known in cache.CACHE.values() for _, maps in known.descriptors)


def test_no_kernel_of_a_call_runs_before_all_of_them_are_compiled(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    # If a kernel failed after others have accumulated, another backend would add their results a second time.
    hopper = pytest.importorskip("flashspan.kernels.hopper")
    compiled = Launch.compiled

    def some_fail(launch: Launch) -> Any:
        if launch.kernel.__name__ == "queries_kernel":
            raise KernelFailed("no")
        return compiled(launch)

    monkeypatch.setattr(Launch, "compiled", some_fail)
    x = [torch.zeros(1, 2, 70, 64).half() for _ in range(4)]
    rows, into = torch.zeros(1, 2, 70), [torch.zeros(1, 2, 70, 64) for _ in range(3)]
    before, problem = gpu.plain, Problem(CAUSAL, 0.125, deterministic=True)
    with pytest.raises(KernelFailed):
        hopper.backward(x[3], *x[:3], rows, rows, problem, dq=into[0], dk=into[1], dv=into[2], accumulate=True)
    assert gpu.plain == before


def test_what_the_compiler_raises_is_told_from_what_the_device_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    class OnGpu(Tensor):
        is_cuda = True

    (tmp_path / "kernel.ttir").write_text("no such instruction")

    def a_pass_fails(*_: Any, **__: Any) -> None:
        triton.compile(str(tmp_path / "kernel.ttir"), target=GPUTarget("cuda", 90, 32))

    def ptxas_fails(*_: Any, **__: Any) -> None:
        raise PTXASError("no such instruction")

    def the_device_fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(triton_abi, "JITFunction", SimpleNamespace)
    for warmup, error in ((a_pass_fails, KernelFailed), (ptxas_fails, KernelFailed), (the_device_fails, RuntimeError)):
        kernel = SimpleNamespace(**vars(KERNEL), warmup=warmup)
        with pytest.raises(RuntimeError) as caught:
            Launch(kernel, (1,), (torch.zeros(64).as_subclass(OnGpu), 16, 100, 0.5), {"BLOCK": 32}).compiled()
        assert type(caught.value) is error


def test_a_mask_is_looked_at_once_and_forgotten_with_it() -> None:
    one, other = documents([40, 30]), documents([20, 50])
    assert one.packed is one.packed
    assert other.packed.layouts == one.packed.layouts, "what was made for one serves for the other"
    assert other.packed.addresses != one.packed.addresses
    assert CAUSAL.packed.what != one.packed.what
    assert documents([40, 31]).packed.layouts != one.packed.layouts
    copied = copy.deepcopy(one)
    assert copied.packed.addresses != one.packed.addresses, "a copy is asked anew"


def test_an_address_is_described_once(gpu: Gpu) -> None:
    x = [torch.zeros(1, 2, 70, 64).half() for _ in range(3)]
    kept = gpu.hopper.forward(*x, Problem(EVERYTHING, 0.125))
    held = []
    for _ in range(2):
        held.append(gpu.hopper.forward(*x, Problem(EVERYTHING, 0.125)))
    known = cache.CACHE.popitem()[1]
    addresses = {y.data_ptr() for y in (*x, kept.out, *(carry.out for carry in held))}
    assert all(set(maps) <= addresses for _, maps in known.descriptors)
    assert [x[0].data_ptr()] == list(known.descriptors[0][1])


def test_a_profiler_sees_every_launch(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    x = [torch.zeros(1, 2, 70, 64).half() for _ in range(4)]
    attend(gpu, x, CAUSAL)
    from triton import knobs

    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [lambda metadata: None])
    before = gpu.plain
    attend(gpu, x, CAUSAL)
    assert gpu.plain == before + 7, "forward, rows, backward, cast; rows and the two passes"


def test_releases_that_were_not_read_go_the_plain_way(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.__version__", "3.99.0")
    triton_abi.is_known.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(2):
                before = gpu.plain
                attend(gpu, [torch.zeros(1, 2, 70, 64).half() for _ in range(4)], CAUSAL)
                assert gpu.plain == before + 7
        (warning,) = warned
        assert "3.99.0" in str(warning.message)
        assert "3.6, 3.7" in str(warning.message)
    finally:
        triton_abi.is_known.cache_clear()


@pytest.mark.parametrize(("shape", "num_keys"), [((1, 1, 1024), 0), ((8, 1, 128), 0), ((0, 0, 16), 16)])
def test_what_others_serve_is_not_done_again(shape: tuple[int, int, int], num_keys: int) -> None:
    launch = pytest.importorskip("flashspan.kernels.hopper.launch")
    heads, key_heads, num_queries = shape
    q, x = (torch.zeros(1, n, t, 64, dtype=torch.bfloat16) for n, t in ((heads, num_queries), (1, 64)))
    k = q.new_zeros(1, key_heads, num_keys, 64)
    assert launch.repeat_forward(q, k, k, Problem(EVERYTHING, 0.1), q.dtype) is None
    assert launch.repeat_forward(x, x, x, Problem(EVERYTHING, -0.1), q.dtype) is None
