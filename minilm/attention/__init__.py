"""Attention on its own: needs torch alone.

from minilm.attention import MultiHeadAttention
layer = MultiHeadAttention(64, n_head=4)
y = layer(x)   # (B, T, 64) -> (B, T, 64), causal
"""

from minilm.attention.cache import Fixed, KVCache
from minilm.attention.frame import Frame
from minilm.attention.kernels import attend
from minilm.attention.layer import MultiHeadAttention
from minilm.attention.linear import LinearAttention
from minilm.attention.masks import Causal, Full, Mask, Predicate, Prefix, SlidingWindow
from minilm.attention.positions import Alibi, Learned, NoPosition, Position, Rotary, Sinusoidal

__all__ = [
    "Alibi",
    "Causal",
    "Fixed",
    "Frame",
    "Full",
    "KVCache",
    "Learned",
    "LinearAttention",
    "Mask",
    "MultiHeadAttention",
    "NoPosition",
    "Position",
    "Predicate",
    "Prefix",
    "Rotary",
    "Sinusoidal",
    "SlidingWindow",
    "attend",
]
