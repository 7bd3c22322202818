"""Attention across devices: layouts of tokens, schedules of tiles and transfers, and the transports that send them."""

from flashspan.context.layout import LAYOUTS, Placement, balanced, place
from flashspan.context.recompute import keep_attention
from flashspan.context.strategy import STRATEGIES, ContextAttention, context_parallel

__all__ = [
    "LAYOUTS",
    "STRATEGIES",
    "ContextAttention",
    "Placement",
    "balanced",
    "context_parallel",
    "keep_attention",
    "place",
]
