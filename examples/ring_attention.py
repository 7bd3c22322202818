"""Attention over four processes, each with a quarter of the tokens. Each process uses a GPU of its own, or the CPU.

torchrun --nproc-per-node 4 examples/ring_attention.py
"""

import os

import torch
import torch.distributed as dist

from flashspan import attention, context_parallel

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
torch.manual_seed(0)  # every rank makes the same whole sequence, for the comparison
whole = torch.randn(3, 1, 8, 1000, 64, device=device)

attend = context_parallel(dist.group.WORLD, layout="zigzag", strategy="ring")
q, k, v = (attend.shard(x, dim=2).requires_grad_() for x in whole)  # this rank's quarter of the tokens
out = attend(q, k, v, causal=True)
out.backward(torch.randn_like(out))

expected = attend.shard(attention(*whole, causal=True), dim=2)  # one device computes all of it
error = ((out - expected).norm() / expected.norm()).item()
assert error < 1e-5
print(f"rank {attend.rank}: {q.shape[2]} of 1000 tokens, relative difference {error:.1e}")
dist.destroy_process_group()
