from __future__ import annotations

import pytest
import torch.distributed as dist

from flashspan.parallel.collectives import timeout_of
from flashspan.parallel.data import _clone_group
from flashspan.parallel.mesh import AXES, DERIVED, build_mesh, resolve_degrees, submesh


def test_data_takes_the_remaining_ranks() -> None:
    assert resolve_degrees(24, context=3, tensor=2) == {"data": 4, "shard": 1, "context": 3, "tensor": 2}
    assert resolve_degrees(1) == {"data": 1, "shard": 1, "context": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("world_size", "degrees", "says"),
    [
        (
            6,
            {"context": 4},
            "context=4 x tensor=1 = 4; with the others as they are, context=1 or 2 or 3 or 6 would fit",
        ),
        (8, {"data": 2, "tensor": 2}, "data=4, or shard=2, or context=2, or tensor=4 would fit"),
        (7, {"context": 2, "tensor": 2}, "a divisor of 7: 1, 7"),
        (4, {"tensor": 0}, "at least 1: got tensor=0"),
        (4, {"tensor": 2.0}, "a degree must be an integer, at least 1: got tensor=2.0"),
        (4, {"tensor": True}, "a degree must be an integer, at least 1: got tensor=True"),
        (4, {"data": "2"}, "a degree must be an integer, at least 1: got data='2'"),
    ],
)
def test_the_error_for_wrong_degrees_lists_some_that_fit(world_size: int, degrees: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match="must") as error:
        resolve_degrees(world_size, **degrees)
    assert says in str(error.value)


def _groups(degrees: dict[str, int]) -> dict[str, list[int]]:
    mesh = build_mesh(**degrees)
    names = ("data", "shard", "context", "tensor", "batch", "fully", "gradient")
    return {name: dist.get_process_group_ranks(submesh(mesh, name).get_group()) for name in names}


def test_groups_are_the_ranks_that_differ_along_their_axes_only(on_ranks) -> None:
    groups = on_ranks(4, _groups, {"context": 2, "tensor": 2})
    assert [g["tensor"] for g in groups] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [g["context"] for g in groups] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [g["gradient"] for g in groups] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [g["batch"] for g in groups] == [[0], [1], [2], [3]]
    groups = on_ranks(4, _groups, {"shard": 2, "context": 2})
    assert [g["fully"] for g in groups] == [[0, 1, 2, 3]] * 4
    assert [g["batch"] for g in groups] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert on_ranks(1, _groups, {}) == [{name: [0] for name in groups[0]}]


def _patience(degrees: dict[str, int]) -> set[object]:
    mesh = build_mesh(**degrees)
    groups = [submesh(mesh, name).get_group() for name in (*AXES, *DERIVED)]
    return {timeout_of(group) for group in [*groups, _clone_group(groups[-1])]}


def _world_patience() -> object:
    assert dist.group.WORLD is not None
    return timeout_of(dist.group.WORLD)


def test_every_group_has_the_timeout_of_the_world(on_ranks) -> None:
    """Ranks that share an axis with a stalled rank detect it too, before torch's half an hour."""
    world = on_ranks(4, _world_patience)
    assert on_ranks(4, _patience, {"data": 2, "tensor": 2}) == [{found} for found in world]
