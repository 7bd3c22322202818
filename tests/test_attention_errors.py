"""Bad input gets one clear error."""

import math

import numpy as np
import pytest
import torch

from flashspan import attention, explain, masks

q4 = torch.zeros(1, 4, 8, 16)
BAD = {
    "wrong rank": (lambda: attention(q4[0], q4[0], q4[0]), "must be .batch, heads, tokens, head size.*unsqueeze"),
    "dtype mix": (lambda: attention(q4, q4.half(), q4), "share a dtype.*float32, torch.float16"),
    "not floating": (lambda: attention(q4.int(), q4.int(), q4.int()), "works on float16"),
    "device mix": (lambda: attention(q4, q4.to("meta"), q4), "on one device.*cpu, meta, cpu"),
    "k and v differ": (lambda: attention(q4, q4, q4[:, :, :3]), "k and v must have one shape"),
    "batch differs": (lambda: attention(q4, q4.expand(2, 4, 8, 16), q4.expand(2, 4, 8, 16)), "same batch"),
    "head size differs": (lambda: attention(q4, q4[..., :8], q4[..., :8]), "same head size"),
    "heads do not divide": (lambda: attention(q4, q4[:, :3], q4[:, :3]), "4 query heads and 3 key heads"),
    "head size 0": (lambda: attention(*[q4[..., :0]] * 3), "head size must be 1 to 256.*heads of size 0 have nothing"),
    "head size 300": (lambda: attention(*[torch.zeros(1, 1, 2, 300)] * 3), "head size must be 1 to 256.*split larger"),
    "scale that is no number": (lambda: attention(q4, q4, q4, scale=math.nan), "must be a finite number: got nan"),
    "scale beyond float32": (
        lambda: attention(q4.float(), q4.float(), q4.float(), scale=1e39),
        "finite number: got 1e",
    ),
    "scale without end": (lambda: attention(q4, q4, q4, scale=-math.inf), "finite number: got -inf; use None"),
    "scale of a word": (lambda: attention(q4, q4, q4, scale="x"), "finite number: got 'x'"),  # type: ignore[call-overload]
    "scale that wants a gradient": (
        lambda: attention(q4, q4, q4, scale=torch.ones((), requires_grad=True)),  # type: ignore[call-overload]
        "finite number: got tensor.*multiply q",
    ),
    "scale beyond NumPy's floats": (
        lambda: attention(q4, q4, q4, scale=np.float32("inf")),  # type: ignore[call-overload]
        "finite number",
    ),
    "scale beyond all floats": (lambda: attention(q4, q4, q4, scale=10**400), "finite number"),
    "mask of the wrong shape": (lambda: attention(q4, q4, q4, mask=masks.documents([5])), "5 queries and 5 keys"),
    "mask tensor of the wrong shape": (
        lambda: attention(q4, q4, q4, mask=torch.ones(3, 3, dtype=torch.bool)),
        "3 queries and 3 keys",
    ),
    "additive mask": (lambda: attention(q4, q4, q4, mask=torch.zeros(8, 8)), "must be bool"),
    "mask tensor that does not broadcast": (
        lambda: attention(q4, q4, q4, mask=torch.ones(3, 5, 8, 8, dtype=torch.bool)),
        "broadcast to q's batch and heads",
    ),
    "mask tensor of sequences or of heads": (
        lambda: attention(*[torch.ones(3, 3, 8, 4)] * 3, mask=torch.ones(3, 8, 8, dtype=torch.bool)),
        r"ambiguous for q with B = H = 3: got \(3, 8, 8\); use mask\[:, None\]",
    ),
    "mask tensor on another device": (
        lambda: attention(q4, q4, q4, mask=torch.ones(8, 8, dtype=torch.bool, device="meta")),
        "on q's device",
    ),
    "not a mask": (lambda: attention(q4, q4, q4, mask="causal"), "made by flashspan.masks"),  # type: ignore[arg-type]
    "negative window": (lambda: attention(q4, q4, q4, window=-1), "window is an int >= 1"),
    "window of a float": (lambda: attention(q4, q4, q4, window=2.5), "got 2.5"),  # type: ignore[call-overload]
    "window of a bool": (lambda: attention(q4, q4, q4, window=True), "got True"),
    "seed of a text": (lambda: attention(q4, q4, q4, seed="x"), "whole number: got 'x'"),  # type: ignore[call-overload]
    "window of three": (lambda: attention(q4, q4, q4, window=(1, 2, 3)), "pair"),  # type: ignore[call-overload]
    "seed of a float": (
        lambda: attention(q4, q4, q4, dropout=0.1, seed=1.5),  # type: ignore[call-overload]
        "seed is a whole number",
    ),
    "dropout of nothing": (lambda: attention(q4, q4, q4, dropout=None), "probability"),  # type: ignore[call-overload]
    "nested": (lambda: attention(torch.nested.nested_tensor([q4[0]]), q4, q4), "dense tensors: got nested"),
    "not a tensor": (lambda: attention(q4.numpy(), q4, q4), "dense tensors: got ndarray"),  # type: ignore[call-overload]
    "sparse": (lambda: attention(q4.to_sparse(), q4, q4), "to_dense"),
    "documents of half tokens": (lambda: masks.documents([1.5, 2.7]), "whole numbers"),  # type: ignore[list-item]
    "more keys than there are": (lambda: masks.ragged([-1, 50], 40, 40), "0 to 40 keys"),
    "a slice that runs backwards": (lambda: masks.causal().slice(range(5, 0, -1), range(5, 0, -1)), "ascending"),
    "a slice by a slice": (lambda: masks.causal().slice(slice(3), range(5)), "several of them"),  # type: ignore[arg-type]
    "an implementation without this dtype": (
        lambda: attention(*[q4.double()] * 3, backend="portable"),
        "portable' does not support this call: it (has no torch.float64 kernels|needs a GPU)",
    ),
    "a list of heads": (
        lambda: masks.Blocks.from_dense(torch.eye(3, dtype=torch.bool).expand(4, 3, 3).clone()).heads([1]),  # type: ignore[arg-type]
        r"a range with step 1.*got \[1\]",
    ),
    "causal as text": (lambda: attention(q4, q4, q4, causal="False"), "True or False: got 'False'"),  # type: ignore[call-overload]
    "dropout of 1": (lambda: attention(q4, q4, q4, dropout=1.0), r"in \[0, 1\): got 1.0"),
    "negative dropout": (lambda: attention(q4, q4, q4, dropout=-0.1), r"in \[0, 1\)"),
    "seed and generator": (
        lambda: attention(q4, q4, q4, dropout=0.1, seed=1, generator=torch.Generator()),
        "a seed or a generator",
    ),
    "generator of a number": (
        lambda: attention(q4, q4, q4, dropout=0.1, generator=3),  # type: ignore[call-overload]
        "a torch.Generator: got 3; use seed=",
    ),
    "backend of nothing": (lambda: attention(q4, q4, q4, backend=None), "one of auto.*'None'"),  # type: ignore[call-overload]
    "backend to explain": (lambda: explain(q4, q4, q4, backend=5), "one of auto.*'5'"),  # type: ignore[arg-type]
    "unknown backend": (lambda: attention(q4, q4, q4, backend="cuda"), "these support this call: cpu"),
    "backend that does not support the call": (
        lambda: attention(q4, q4, q4, backend="cpu", dropout=0.5),
        "does not support this call.*use one of.*tiled",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_error(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
