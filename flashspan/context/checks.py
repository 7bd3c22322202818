"""Rules of attention across ranks that attention on one device does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from flashspan.context.agreement import decode, digest, encode
from flashspan.context.layout import Layout, Placement
from flashspan.context.settings import Settings


def check_same_tokens(q: Tensor, k: Tensor) -> None:
    """ValueError unless there are as many queries as keys."""
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"across ranks, queries and keys are the same tokens: got {q.shape[2]} and {k.shape[2]}; "
            f"for cross attention use flashspan.attention on one device"
        )


def check_shards(layout: Layout, placement: Placement, sizes: tuple[int, ...]) -> None:
    """ValueError if a rank's number of tokens differs from the one that the layout gives it."""
    if sizes != placement.sizes:
        raise ValueError(
            f"layout {layout!r} splits {sum(placement.sizes)} tokens into shards of {placement.sizes}: "
            f"got shards of {sizes} tokens; split them with attend.shard or attend.positions"
        )


def agree_on_placement(make: Callable[[], Placement], gather: Callable[[Sequence[int]], list[list[int]]]) -> Placement:
    """The placement of a layout function. All ranks raise the same ValueError if it fails on one of them, or if it
    places the tokens differently on different ranks."""
    problem, placement, failure = "", None, None
    try:
        placement = make()
    except Exception as error:  # a user's function may raise anything; the other ranks must not wait for this one
        failure = error
        problem = str(error) if isinstance(error, ValueError) else f"the layout function failed: {error!r}"
    rows = gather([digest(repr(placement and placement.ranges)), *encode(problem)])
    for rank, row in enumerate(rows):
        if text := decode(row[1:]):
            raise ValueError(f"rank {rank}: {text}") from failure
    if len({row[0] for row in rows}) > 1:
        raise ValueError(
            "all ranks must agree on the layout: the layout function returned different placements on different ranks; "
            "its result must depend on the numbers of tokens and ranks only"
        )
    assert placement is not None
    return placement


def check_one_rank(settings: Settings, placement: Callable[[int], Placement], q: object, k: object) -> None:
    """ValueError if the only rank's queries and keys are not the same tokens, or not all of `num_tokens`, or if its
    layout function is wrong. Other errors are those of `flashspan.attention`."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor)):
        return
    shape, key_shape = q.shape, k.shape  # each takes as long as a call of a function
    if not len(shape) == len(key_shape) == 4:
        return
    num_tokens = shape[2]
    if num_tokens != key_shape[2]:
        check_same_tokens(q, k)
    if settings.num_tokens is not None or callable(settings.layout):
        declared = num_tokens if settings.num_tokens is None else settings.num_tokens
        check_shards(settings.layout, placement(declared), (num_tokens,))


def check_grid(mesh: Tensor) -> None:
    """ValueError unless all rows of the mesh have one order of ranks, and all columns too: a group's ranks ascend."""
    rows, columns = mesh.argsort(1), mesh.argsort(0)
    if not bool((rows == rows[:1]).all() and (columns == columns[:, :1]).all()):
        raise ValueError(
            f"hybrid needs a mesh whose rows all sort their ranks in the same way, and whose columns do too: got "
            f"{mesh.tolist()}; number the ranks as init_device_mesh does"
        )
