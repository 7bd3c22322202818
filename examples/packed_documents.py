"""Several documents in one sequence, without padding: each token attends inside its own document only.

python examples/packed_documents.py
"""

import torch

from flashspan import attention, masks

torch.manual_seed(0)
lengths = [300, 0, 41, 659]  # one sequence of 1,000 tokens; a length may be 0
q, k, v = torch.randn(3, 1, 4, 1000, 64)

packed = attention(q, k, v, mask=masks.documents(lengths) & masks.causal())

# The same, one call for each document.
parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
alone = torch.cat([attention(*part, causal=True) for part in parts], dim=2)

error = ((packed - alone).norm() / alone.norm()).item()
assert error < 1e-6, error
print(f"{len(lengths)} documents in one call: relative difference {error:.1e} from one call each")
