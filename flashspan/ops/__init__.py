"""The fused operations of a transformer layer besides attention, usable in any model.

On a Hopper GPU each is one kernel; elsewhere, and where shapes or dtypes do not fit, it is what its reference says, in
plain PyTorch. All are differentiable operators that torch.compile takes.

    q, k, v = ops.qkv_rope(x, wq, wk, wv, cos, sin)
    x = ops.linear_add(x, mixed, wo)
    x = ops.swiglu(norm(x), gate, up, down, residual=x)
"""

from flashspan.ops.linear_add import linear_add
from flashspan.ops.qkv_rope import qkv_rope
from flashspan.ops.swiglu import swiglu

__all__ = ["linear_add", "qkv_rope", "swiglu"]
