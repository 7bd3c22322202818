"""The two ways in which the Hopper kernels round, as a fixture."""

import pytest

from tests.kernels.hopper_cases import WAYS, let_hopper_serve_short_calls


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use one of the two ways to round (heads up to 128) for all shapes."""
    from flashspan.kernels.hopper.tiles import FLOAT16_FROM, THREE_FROM

    for head_dim in FLOAT16_FROM:
        monkeypatch.setitem(FLOAT16_FROM, head_dim, WAYS[request.param])
    for least in THREE_FROM:  # and use three warpgroups if there are such kernels
        monkeypatch.setitem(THREE_FROM, least, 0)
    return str(request.param)


@pytest.fixture(autouse=True)
def _hopper_kernels_serve_short_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of the Hopper kernels use short calls, for which other kernels would be chosen (test_few_tiles.py)."""
    if request.path.name in ("test_hopper.py", "test_hopper_carry.py", "test_hopper_rounding.py"):
        let_hopper_serve_short_calls(monkeypatch)
