"""Parallelism other than attention's: meshes, data and tensor parallelism, sharded optimizers and models, clipping.

It uses torch.distributed. It imports neither attention nor a model.
"""

from .clip import clip_factor, clip_grad_norm, grad_norm
from .data import DataParallel
from .mesh import build_mesh, submesh
from .optimizer import ShardedOptimizer
from .sharded import apply_fully_sharded
from .tensor import ColumnParallelLinear, RowParallelLinear, apply_replicated, apply_tensor_parallel
from .vocabulary import VocabularyParallelEmbedding, vocabulary_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "DataParallel",
    "RowParallelLinear",
    "ShardedOptimizer",
    "VocabularyParallelEmbedding",
    "apply_fully_sharded",
    "apply_replicated",
    "apply_tensor_parallel",
    "build_mesh",
    "clip_factor",
    "clip_grad_norm",
    "grad_norm",
    "submesh",
    "vocabulary_parallel_cross_entropy",
]
