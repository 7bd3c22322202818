"""Fused operations of a transformer layer, other than attention, for any model.

On a Hopper GPU they run fused kernels. Elsewhere, and for shapes or dtypes that the kernels do not support, they run
their references in plain PyTorch. All are differentiable operators that torch.compile supports.

    q, k, v = ops.qkv_rope(x, wq, wk, wv, cos, sin)
    x = ops.linear_add(x, mixed, wo)
    x = ops.swiglu(norm(x), gate, up, down, residual=x)
"""

from flashspan.ops.linear_add import linear_add
from flashspan.ops.qkv_rope import qkv_rope
from flashspan.ops.swiglu import swiglu

__all__ = ["linear_add", "qkv_rope", "swiglu"]
