"""Linear attention: the same layer with a kernel in place of the softmax, and a memory that never grows.

Shapes: B batch, n tokens in, m tokens read, C model width, H query heads, G key heads, D head width; R = H / G
query heads read one key head; N chunks of c tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minilm.attention.cache import Fixed, State
from minilm.attention.frame import Frame
from minilm.attention.kernels import clear
from minilm.attention.layer import Attention
from minilm.attention.masks import Causal, Full, Mask
from minilm.attention.positions import Position, Rotation, at_least_float32, rotate
from minilm.errors import ConfigError


class LinearAttention(Attention):
    """outᵢ = Σⱼ φ(qᵢ)·φ(kⱼ) vⱼ / Σⱼ φ(qᵢ)·φ(kⱼ), with φ = elu + 1 (Katharopoulos et al. 2020).

    A sum over keys can be carried along, so a token costs D² whatever stands before it, and the past is a `State`
    of constant size. Training, prefill and decoding are one form: a piece of text and the state it comes in with.
    Quadratic work stays within chunks of `chunk` tokens, and memory grows as n.

    mask: Causal() or Full(). position: the model's scheme, to refuse one that this layer cannot honour; rotary turns
    the features of the numerator alone, so that the denominator stays positive (Su et al. 2021, sec. 3.3).
    Tokens stand in the order of their positions. Raises ConfigError for other masks, and for position=alibi.
    """

    def __init__(
        self,
        n_embd: int,
        *,
        n_head: int,
        n_kv_head: int | None = None,
        context_dim: int | None = None,
        mask: Mask = Causal(),  # noqa: B008 (frozen, without state)
        position: Position | None = None,
        qk_norm: bool = False,
        bias: bool = False,
        chunk: int = 64,
    ) -> None:
        super().__init__(
            n_embd, n_head=n_head, n_kv_head=n_kv_head, context_dim=context_dim, qk_norm=qk_norm, bias=bias
        )
        if type(mask) not in (Causal, Full):
            raise ConfigError(
                f"mask={mask}: attention=linear sums over all of the past, or over everything; choose "
                "mask=causal or mask=none, or attention=mha"
            )
        if chunk < 1:
            raise ConfigError(f"attention.chunk={chunk}: a positive number of tokens")
        check_position(position)
        self.mask, self.chunk = mask, chunk

    def forward(
        self,
        x: Tensor,
        *,
        frame: Frame | None = None,
        context: Tensor | None = None,
        cache: State | Fixed | None = None,
    ) -> Tensor:
        """(B, n, C) -> (B, n, C), as `MultiHeadAttention.forward`; behind a cache its store is a State."""
        if context is not None and isinstance(self.mask, Causal):
            raise ConfigError("context: attention=linear reads another sequence whole; choose mask=Full()")
        frame = frame or Frame.of(x, context=context)
        check_position(frame.position)
        dtype = at_least_float32(x.dtype)
        rotation = frame.rotation(self.head_dim, dtype) if context is None else None
        q = self.queries(x, None)  # (B, H, n, D)
        k, v = self.keys_values(x if context is None else context, None, cache)  # (B, G, m, D)
        q_pos, k_pos = frame.q_pos, frame.q_pos if context is None else frame.k_pos
        q, k = clear_empty(feature_map(q.to(dtype)), q_pos), clear_empty(feature_map(k.to(dtype)), k_pos)
        v = clear_empty(v.to(dtype), k_pos)
        if isinstance(self.mask, Full):
            out = read_all(q, k, v, rotation)
        else:
            state = cache if isinstance(cache, State) else self.new_store(len(x), None)
            out = read_past(q, k, v, rotation, state, self.chunk)
        return self.merge(out.to(x.dtype))

    @property
    def reach(self) -> int | None:
        """1: its cache holds no token at all, and so never fills."""
        return None if isinstance(self.mask, Full) else 1

    def new_store(self, batch: int, capacity: int | None) -> State:
        """A state that has read nothing; the same for any capacity."""
        return State(batch, self.n_kv_head, self.head_dim, like=self.blank())


def read_all(q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
    """Features q (B, H, n, D) and k (B, G, m, D), values v (B, G, m, D) -> (B, H, n, D); all read all."""
    products, keys = rotate(k, rotation).mT @ v, k.sum(dim=-2)  # (B, G, D, D), (B, G, D)
    above = group(rotate(q, rotation), k) @ products.unsqueeze(2)
    return divide(above, group(q, k) @ keys[:, :, None, :, None])


def read_past(q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, state: State, chunk: int) -> Tensor:
    """As `read_all`, where n tokens read one another causally, and what `state` has read; it then knows them too."""
    n = q.shape[-2]
    keys = state.keys.unsqueeze(-2) + k.cumsum(dim=-2)  # (B, G, n, D), Σ φ(kⱼ) up to each token
    below = (group(q, k) * keys.unsqueeze(2)).sum(dim=-1, keepdim=True)  # (B, G, R, n, 1)

    def chunked(x: Tensor) -> Tensor:
        """(…, n, D) -> (…, N, c, D), filled up with zeros"""
        c = min(chunk, n)
        return F.pad(x, (0, 0, 0, -n % c)).unflatten(-2, (-1, c))

    q, k, v = chunked(group(rotate(q, rotation), k)), chunked(rotate(k, rotation)), chunked(v)
    each = torch.cat((state.products.unsqueeze(2), k.mT @ v), dim=2)
    before = each.cumsum(dim=2)  # (B, G, N + 1, D, D), Σ φ(kⱼ) vⱼᵀ up to each chunk
    k, v, past = k.unsqueeze(2), v.unsqueeze(2), before[:, :, None, :-1]
    above = q @ past + (q @ k.mT).tril() @ v  # (B, G, R, N, c, D)
    state.products, state.keys = before[:, :, -1].clone(), keys[:, :, -1].clone()
    return divide(above.flatten(3, 4)[..., :n, :], below)


def feature_map(x: Tensor) -> Tensor:
    """elu(x) + 1, in a form that does not round small features to 0."""
    return x.clamp(max=0).exp() + x.relu()


def group(q: Tensor, k: Tensor) -> Tensor:
    """(B, H, n, D) -> (B, G, R, n, D), beside the key head that each query head reads"""
    return q.unflatten(1, (k.shape[1], -1))


def divide(above: Tensor, below: Tensor) -> Tensor:
    """(B, G, R, n, D) and (…, 1) -> (B, H, n, D); a query that reads nothing has 0 / 0, which is 0 here."""
    return (above / below.masked_fill(below == 0, 1)).flatten(1, 2)


def clear_empty(x: Tensor, pos: Tensor) -> Tensor:
    """(B, heads, T, D) -> the same, zeros in slots without a position"""
    return x if pos.dim() == 1 else clear(x, (pos >= 0)[:, None, :, None])


def check_position(position: Position | None) -> None:
    if position is not None and position.biased:
        name = type(position).__name__.lower()
        raise ConfigError(
            f"position={name}: it adds to the scores, which attention=linear never forms; choose "
            "position=rope, learned, sinusoidal or none, or attention=mha"
        )
