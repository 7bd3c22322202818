"""A new strategy: a function that lists which rank computes and sends what in each step.

It is verified for 64 ranks without starting a process, and then run on 4 simulated ranks in this process.

python examples/custom_schedule.py
"""

import torch

from flashspan import attention, masks
from flashspan.context.execute import Call, Plan, simulate
from flashspan.context.generators import ring
from flashspan.context.layout import place
from flashspan.context.passes import ForwardPass
from flashspan.context.schedule import Schedule, Tile, Transfer, reverse
from flashspan.context.transport import LocalTransports
from flashspan.context.verify import verify
from flashspan.context.visibility import Visibility
from flashspan.kernels import tiled


def rotation(visibility: Visibility) -> Schedule:
    """In step s each rank receives the keys of the rank s places before it, directly from that rank.

    In a ring, each rank forwards keys to its neighbour; here every message is sent once, to a more distant rank.
    """
    num, tiles, transfers = visibility.num_ranks, [], []
    for q in range(num):
        for step in range(num):
            k = (q - step) % num
            box = visibility.box(q, k)  # the visible part of this tile
            if not box.pairs:
                continue
            tiles.append(Tile(step, q, q, k, box.q_rows, box.k_rows, box.pairs))
            if k != q:  # sent during the previous step; its gradient is sent directly to the owner
                transfers.append(Transfer(step - 1, step, k, q, "kv", k, box.k_rows, back=k))
    return Schedule("rotation", num, tuple(tiles), tuple(transfers))


causal = masks.causal()
large = Visibility(place("zigzag", 64_000, 64), causal)
verify(rotation(large), large)  # every visible pair once, nothing sent needlessly, no deadlock
verify(reverse(rotation(large)), large)  # the same for backward
print(f"verified for 64 ranks: {len(rotation(large).transfers)} messages, a ring has {len(ring(large).transfers)}")

torch.manual_seed(0)
whole = torch.randn(3, 1, 4, 501, 32)
visibility = Visibility(place("zigzag", 501, 4), causal)
plan, transports = Plan(visibility.placement, causal, rotation(visibility)), LocalTransports(4).transports
calls = [Call(*(visibility.placement.shard(x, 2, rank) for x in whole), 32**-0.5) for rank in range(4)]
carries = simulate([ForwardPass(plan, transports[rank], tiled, calls[rank]) for rank in range(4)])
out = visibility.placement.unshard([carry.out for carry in carries], 2)

expected = attention(*whole, causal=True)
error = ((out - expected).norm() / expected.norm()).item()
assert error < 1e-6, error
print(f"run on 4 ranks: relative difference {error:.1e} from one device")
