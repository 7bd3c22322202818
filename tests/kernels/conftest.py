"""The two roundings of the Hopper kernels, as a fixture."""

import pytest

from tests.kernels.hopper_cases import WAYS


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the two ways to round that heads up to 128 have, this one, whatever the shape."""
    from flashspan.kernels.hopper.tiles import FINER, THREE_FROM

    for head_dim in FINER:
        monkeypatch.setitem(FINER, head_dim, WAYS[request.param])
    for least in THREE_FROM:  # and by three warpgroups where there are such kernels
        monkeypatch.setitem(THREE_FROM, least, 0)
    return str(request.param)
