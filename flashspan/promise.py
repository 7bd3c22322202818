"""The accuracy that attention promises, in numbers. `flashspan check` and the tests compare every implementation with
it.

    answer = solve(q, k, v, dout, mask=mask, scale=scale)
    ratios = answer.ratios(dq=dq, dk=dk, dv=dv)  # error / allowed error: at most 1

docs/numerics.md derives the promise. In short: in float32, the norm of an error is at most FORWARD or GRADIENT times
the larger of two norms: that of the result, and that which the result would have if its terms had random signs. The
softmax amplifies the rounding of large scores. So if the scores' bound exceeds SCORE, the allowed error grows in
proportion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import Mask, dense

FORWARD, GRADIENT = 1e-6, 1e-5
"""The allowed relative error of out and lse, and of dq, dk and dv, in float32."""
SCORE = 16.0
"""Up to this bound on the scores, |scale| max|q_i| max|k_j|, the softmax hardly amplifies their rounding."""
CHUNK = 2**20  # scores computed at a time


@dataclass(frozen=True)
class Answer:
    """Attention in float64, and the sizes that errors are compared with."""

    results: dict[str, Tensor]  # out, lse, dq, dk, dv
    terms: dict[str, float]  # the norm that each result would have if its terms had random signs
    score: float  # a bound on the scores
    rounded: bool  # see `solve`

    def size(self, name: str) -> float:
        """The size with which the error of one result is compared: its norm, or that of its terms if they cancel."""
        exact = self.results[name]
        return max(float(exact[exact.isfinite()].norm()), self.terms[name])

    def allowed(self, name: str, dtype: torch.dtype) -> float:
        """The largest norm allowed for the error of one result, computed from inputs of this dtype."""
        exact = self.results[name]
        size = self.size(name)
        bound = (GRADIENT if name in ("dq", "dk", "dv") else FORWARD) * max(1.0, self.score / SCORE)
        if dtype == torch.float64:
            return bound * size * 2.0**-28  # float64 has 29 more bits; one is for the error of the answer
        if dtype == torch.float32 or name == "lse":
            return bound * size
        kind = torch.finfo(dtype)
        norm = float(exact[exact.isfinite()].norm()) + kind.smallest_normal * math.sqrt(exact.numel())
        return bound * size + kind.eps / 2 * norm + (kind.eps * size if self.rounded else 0.0)

    def ratios(self, dtype: torch.dtype = torch.float32, **got: Tensor) -> dict[str, float]:
        """The norm of each error divided by the allowed one: at most 1. Infinite if a result is wrongly not finite."""
        found = {}
        for name, mine in got.items():
            exact = self.results[name]
            mine = mine.detach().to(exact.device, torch.float64)
            finite = exact.isfinite()
            if mine.shape != exact.shape or not torch.equal(mine[~finite], exact[~finite]):
                found[name] = math.inf
                continue
            error = float((mine - exact)[finite].norm())
            allowed = self.allowed(name, dtype)
            found[name] = 0.0 if error == 0 else error / allowed if allowed and math.isfinite(error) else math.inf
        return found


def solve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    mask: Mask | Tensor,
    scale: float,
    dropout: Dropout | None = None,
    dlse: Tensor | None = None,
    rounded: bool = False,
) -> Answer:
    """The answer, computed in float64 as in a textbook, a chunk of query rows at a time.

    q, dout [B, H, T, D]; k, v [B, K, S, D]; dlse [B, H, T], without effect in rows that see no key. The mask may be a
    bool tensor [B or 1, H or 1, T, S]. rounded: the kernels round the operands of each matmul to 16 bits, as GPU
    kernels do for 16-bit inputs. CPU kernels round only the result.
    """
    least = 2.0**-14 if rounded else 2.0**-106
    (B, H, T, _), (K, S) = q.shape, k.shape[1:3]
    q, k, v, dout = (x.detach().double() for x in (q, k, v, dout))
    reach = [float(torch.linalg.vector_norm(x, dim=-1).max()) if x.numel() else 0.0 for x in (q, k)]
    k, v = (x.repeat_interleave(H // max(K, 1), 1) for x in (k, v))
    out, lse, dq, dk, dv = (torch.zeros_like(x) for x in (q, q[..., 0], q, k, v))
    squares = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)
    num_rows = max(1, CHUNK // max(1, B * H * S))
    for rows in (range(i, min(i + num_rows, T)) for i in range(0, T, num_rows)):
        cut = slice(rows.start, rows.stop)
        q_i, dout_i = q[:, :, cut], dout[:, :, cut]
        if isinstance(mask, Tensor):
            visible = mask[:, :, cut].to(q.device)
        else:
            visible = dense(mask.slice(rows, range(S)), len(rows), S).to(q.device)
            visible = visible[:, None] if visible.dim() == 3 else visible  # one mask per sequence
        score = (q_i @ k.mT * scale).masked_fill(~visible, -torch.inf)
        lse_i = score.logsumexp(-1)
        blind = lse_i == -torch.inf
        p = torch.exp(score - lse_i.masked_fill(blind, 0.0)[..., None])
        survival: Tensor | float = 1.0
        if dropout is not None:
            survival = dropout.keep(B, H, rows, range(S)).double() * dropout.gain
        dlse_i = torch.zeros_like(lse_i) if dlse is None else dlse[:, :, cut].double().masked_fill(blind, 0.0)
        weights = p * survival
        out_i = weights @ v
        delta = (dout_i * out_i).sum(-1) - dlse_i
        ds = p * (dout_i @ v.mT * survival - delta[..., None]) * scale
        out[:, :, cut], lse[:, :, cut], dq[:, :, cut] = out_i, lse_i, ds @ k
        dk += ds.mT @ q_i
        dv += weights.mT @ dout_i
        # The same sums of squared terms. Weights below the range of the dtype to which they are rounded lose bits.
        p = p.clamp(min=least).masked_fill(~visible, 0.0)
        weights = p * survival
        delta = (dout_i**2 * out_i**2).sum(-1) + dlse_i**2
        ds = p**2 * (dout_i**2 @ (v**2).mT * survival**2 + delta[..., None]) * scale**2
        squares["out"] += float((weights**2 @ v**2).sum())
        squares["dq"] += float((ds @ k**2).sum())
        squares["dk"] += float((ds.mT @ q_i**2).sum())
        squares["dv"] += float(((weights**2).mT @ dout_i**2).sum())
    finite = lse[lse.isfinite()]
    squares["lse"] = float((finite**2).sum()) + finite.numel()  # an lse below 1 counts as 1
    dk, dv = (x.unflatten(1, (K, H // max(K, 1))).sum(2) if K else x for x in (dk, dv))
    results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    terms = {name: math.sqrt(x) for name, x in squares.items()}
    return Answer(results, terms, abs(scale) * math.prod(reach), rounded)
