"""AdamW in one launch compared with PyTorch's, in the interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashspan.ops.adamw import AdamW
from flashspan.ops.kernels import adamw as kernel
from flashspan.ops.kernels.adamw import BLOCK, adamw, fits

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SIZES = [(BLOCK + 16,), (16,), (3, 2 * BLOCK), (BLOCK,)]


def groups(params: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]


def take_steps(optimizer: type[torch.optim.AdamW], dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Parameters, moments and step counts after four steps, of which the third is skipped, as float64."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(*shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]
    made = optimizer(groups(params), lr=1e-2, betas=(0.9, 0.95), fused=True)
    made.grad_scale = torch.full((), 4.0, device=DEVICE)  # type: ignore[attr-defined]
    for step in range(4):
        for param in params:
            param.grad = torch.randn(*param.shape, generator=generator).to(DEVICE, dtype)
        params[-1].grad = None if step == 1 else params[-1].grad  # so that it takes one step less than the others
        made.found_inf = torch.full((), float(step == 2), device=DEVICE)  # type: ignore[attr-defined]
        made.step()
    kept = [made.state[param][key] for param in params for key in ("exp_avg", "exp_avg_sq", "step")]
    return [x.detach().double() for x in (*params, *kept)]


def is_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    """Whether the error is at most that of rounding to the dtype after each of four steps, relative to the largest
    number."""
    return bool((got - want).abs().max() <= 4 * torch.finfo(dtype).eps * want.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shapes", "launches"), [(SIZES, 8), ([(7,), (3, 5), (BLOCK + 1,), (16,)], 0)])
def test_a_launch_a_group_takes_the_steps_of_pytorch_s_optimizer(
    dtype: torch.dtype, shapes: list[tuple[int, ...]], launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def count(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        adamw(*args, **kwargs)

    monkeypatch.setattr(kernel, "adamw", count)
    for got, want in zip(take_steps(AdamW, dtype, shapes), take_steps(torch.optim.AdamW, dtype, shapes), strict=True):
        assert is_near(got, want, dtype)
    assert calls == launches


def test_a_step_without_a_scale_or_a_guard() -> None:
    param = nn.Parameter(torch.ones(64, device=DEVICE))
    param.grad = torch.full_like(param, 3.0)
    AdamW([param], lr=0.5, weight_decay=0.1, fused=True).step()
    # The update of a first step is the learning rate, for any gradient.
    assert torch.allclose(param, torch.full_like(param, 1 - 0.5 * 0.1 - 0.5))


def test_a_rate_that_is_a_tensor_is_left_to_pytorch() -> None:
    param = nn.Parameter(torch.ones(64, device=DEVICE))
    param.grad = torch.ones_like(param)
    AdamW([param], lr=torch.tensor(0.5), weight_decay=0.0, fused=True).step()
    assert torch.allclose(param, torch.full_like(param, 0.5))


def test_what_does_not_fit() -> None:
    x = torch.zeros(64, device=DEVICE)
    assert fits([x], [x.clone()])
    assert not fits([x], [x.half()])
    assert not fits([x.double()], [x.double()])
    assert not fits([x[1:33]])
    assert not fits([x[:9]])
    assert not fits([x.view(8, 8).T])


@pytest.mark.gpu
def test_tensors_past_two_billion_numbers_are_reached() -> None:
    param = nn.Parameter(torch.zeros(2**31 + 64, dtype=torch.bfloat16, device="cuda"))
    param.grad = torch.ones_like(param)
    AdamW([param], lr=0.5, weight_decay=0.0, fused=True).step()
    assert param[0] == param[-1] == param[2**31] == -0.5
    assert param.sum(dtype=torch.float64) == -0.5 * param.numel()
