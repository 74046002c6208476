"""Multi-head attention, for oneself and for another sequence.

Shapes: B batch, n tokens in, m tokens read, C model width, H query heads, G key heads, D head width.
"""

import torch
from torch import Tensor, nn

from minilm.attention.cache import Fixed, KeyValues, Store
from minilm.attention.frame import Frame
from minilm.attention.kernels import Scale, resolve_backend, resolve_scale
from minilm.attention.masks import Causal, Mask
from minilm.attention.positions import Rotation, rotate
from minilm.errors import ConfigError


class Attention(nn.Module):
    """What every attention layer shares: the projections, the heads and the norms on queries and keys."""

    mask: Mask

    def __init__(
        self,
        n_embd: int,
        *,
        n_head: int,
        n_kv_head: int | None = None,
        context_dim: int | None = None,
        qk_norm: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = n_head, n_head if n_kv_head is None else n_kv_head
        check_heads(n_embd, n_head, self.n_kv_head)
        self.head_dim = n_embd // n_head
        kv_width = self.n_kv_head * self.head_dim
        self.query = nn.Linear(n_embd, n_embd, bias=bias)
        self.key = nn.Linear(context_dim or n_embd, kv_width, bias=bias)
        self.value = nn.Linear(context_dim or n_embd, kv_width, bias=bias)
        self.out = nn.Linear(n_embd, n_embd, bias=bias)
        # without weights: queries and keys of unit length per channel (Henry et al. 2020)
        self.q_norm = nn.RMSNorm(self.head_dim, elementwise_affine=False) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, elementwise_affine=False) if qk_norm else nn.Identity()

    def split(self, x: Tensor) -> Tensor:
        """(B, T, heads · D) -> (B, heads, T, D)"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def queries(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """(B, n, C) -> (B, H, n, D)"""
        q = self.split(self.query(x))
        return rotate(self.q_norm(q), rotation).to(q.dtype)  # under autocast a norm is float32

    def keys_values(
        self, source: Tensor, rotation: Rotation | None, cache: Store | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, m, D) of `source`, and of what the cache holds from before."""
        if isinstance(cache, Fixed) and cache.pair is not None:
            return cache.pair
        v = self.split(self.value(source))
        k = rotate(self.k_norm(self.split(self.key(source))), rotation).to(v.dtype)
        if isinstance(cache, Fixed):
            cache.pair = k, v
        if isinstance(cache, KeyValues):
            k, v = (t.to(v.dtype) for t in cache.append(k, v))
        return k, v

    def merge(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, T, C), through the output projection"""
        return self.out(x.transpose(1, 2).flatten(-2))

    @property
    def reach(self) -> int | None:
        """How many positions back a cache of this layer holds, None for all."""
        return self.mask.reach

    def blank(self) -> Tensor:
        """Nothing, in the layer's type and on its device. Its weights may lie in parts in several processes."""
        return torch.empty(0, dtype=self.key.weight.dtype, device=self.key.weight.device)

    def new_store(self, batch: int, capacity: int | None) -> Store:
        """An empty cache of this layer for `capacity` tokens; None is endless, for layers that forget."""
        raise NotImplementedError


class MultiHeadAttention(Attention):
    """Scaled dot-product attention in n_head subspaces (Vaswani et al. 2017, sec. 3.2.2).

    n_kv_head: key and value heads, shared by groups of query heads (Ainslie et al. 2023); None is n_head, 1 is
    multi-query (Shazeer 2019). scale: 'sqrt', 'none', 'inverse' or a positive number. mask: who reads whom; for
    cross-attention mostly Full(). context_dim: width of the sequence that is read, where it is another one.
    backend: 'fused', 'reference' or 'flex'. dropout: on the weights, while training.

    Raises ConfigError where the heads do not divide the width, and for an unknown scale or backend.
    """

    def __init__(
        self,
        n_embd: int,
        *,
        n_head: int,
        n_kv_head: int | None = None,
        context_dim: int | None = None,
        scale: Scale = "sqrt",
        mask: Mask = Causal(),  # noqa: B008 (frozen, without state)
        qk_norm: bool = False,
        dropout: float = 0.0,
        bias: bool = False,
        backend: str = "fused",
    ) -> None:
        super().__init__(
            n_embd, n_head=n_head, n_kv_head=n_kv_head, context_dim=context_dim, qk_norm=qk_norm, bias=bias
        )
        self.scale = resolve_scale(scale, self.head_dim)
        self.mask = mask
        self.dropout = check_dropout("attention.dropout", dropout)
        self.kernel = resolve_backend(backend, dropout)

    def forward(
        self,
        x: Tensor,
        *,
        frame: Frame | None = None,
        context: Tensor | None = None,
        cache: KeyValues | Fixed | None = None,
    ) -> Tensor:
        """(B, n, C) -> (B, n, C). With `context` (B, m, context_dim), its tokens are read instead of x's own.

        frame: where queries and keys stand; without it, two whole sequences without positions. cache: with a
        KeyValues, the frame is what `KVCache.advance` gave; a Fixed keeps the context's keys and values, which are
        then projected once.
        """
        frame = frame or Frame.of(x, context=context)
        rotation = frame.rotation(self.head_dim, x.dtype) if context is None else None
        q = self.queries(x, rotation)  # (B, H, n, D)
        k, v = self.keys_values(x if context is None else context, rotation, cache)  # (B, G, m, D)
        if k.shape[-2] != frame.k_pos.shape[-1]:
            raise ConfigError(
                f"{k.shape[-2]} keys, but a frame of {frame.k_pos.shape[-1]}: behind a cache pass "
                "frame=cache.advance(x), and with a context Frame.of(x, context=context)"
            )
        dropout = self.dropout if self.training else 0.0
        return self.merge(self.kernel(q, k, v, frame, mask=self.mask, scale=self.scale, dropout=dropout))

    def new_store(self, batch: int, capacity: int | None) -> KeyValues:
        """An empty cache of this layer for `capacity` tokens; None is endless, for masks with a reach."""
        return KeyValues.empty(
            batch,
            self.n_kv_head,
            self.head_dim,
            capacity=capacity,
            window=self.mask.reach,
            like=self.blank(),
        )


def check_heads(n_embd: int, n_head: int, n_kv_head: int) -> None:
    if min(n_head, n_kv_head) < 1:
        raise ConfigError(f"model.n_head={n_head}, model.n_kv_head={n_kv_head}: positive whole numbers")
    if n_embd % n_head:
        near = min((h for h in range(1, n_embd + 1) if n_embd % h == 0), key=lambda h: abs(h - n_head))
        raise ConfigError(f"model.n_head={n_head} must divide model.n_embd={n_embd}; try model.n_head={near}")
    if n_head % n_kv_head:
        near = min((h for h in range(1, n_head + 1) if n_head % h == 0), key=lambda h: abs(h - n_kv_head))
        raise ConfigError(f"model.n_kv_head={n_kv_head} must divide model.n_head={n_head}; try {near}")


def check_dropout(key: str, p: float) -> float:
    if not 0 <= p < 1:
        raise ConfigError(f"{key}={p}: a probability from 0 to below 1")
    return p
