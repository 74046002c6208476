"""The arithmetic of attention, three ways, one signature, the same numbers.

kernel(q, k, v, frame, *, mask, scale, dropout) -> out

q (B, H, n, D), k (B, G, m, D), v (B, G, m, E) -> out (B, H, n, E), where G divides H: query head h reads
key head h // (H / G). A query that may read no key gives zeros, forward and backward, never NaN.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from minilm.attention.frame import Frame
from minilm.attention.masks import Causal, Full, Mask, Predicate, SlidingWindow
from minilm.attention.positions import Position, at_least_float32
from minilm.errors import ConfigError

Scale = str | float
HALF = (torch.float16, torch.bfloat16)
ROWS = 128  # queries at a time in `by_rows`: a block of scores then stays in the processor's cache
SHORT = 512  # keys up to which `by_rows` is the quicker way to train


class Reference:
    """softmax(Q Kᵀ · scale + bias) V, written as it is read (Vaswani et al. 2017, eq. 1); in float32 at least."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, *, mask: Mask, scale: float, dropout: float = 0.0
    ) -> Tensor:
        weights, values = self.weights(q, k, v, frame, mask=mask, scale=scale)
        return (F.dropout(weights, dropout) @ values).to(q.dtype)

    def weights(
        self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, *, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The matrix of weights (B, H, n, m), and the values they weigh, a copy for each query head."""
        allowed, readable, read = frame.once((mask, "visible"), lambda: visible(frame, mask))
        q, k, v = (t.to(at_least_float32(t.dtype)) for t in (q, k, v))
        q, k, v = clear(q, readable), clear(k, read), clear(v, read)
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        scores = (q * scale) @ k.transpose(-2, -1)  # (B, H, n, D) @ (B, H, D, m) -> (B, H, n, m)
        bias = frame.bias(q.shape[1], scores.dtype)
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~(allowed | ~readable), -math.inf)
        return scores.softmax(dim=-1).masked_fill(~readable, 0), v


class Fused:
    """PyTorch's scaled_dot_product_attention: FlashAttention where the hardware has it, without the n × m weights.

    One exception, where SDPA is the slow way: to train in half precision on a CPU it keeps the weights of up to 512
    keys (`by_rows`). A causal or absent mask costs no memory, and a sliding window much shorter than the text n · w.
    Any other mask is a dense (n, m) table of booleans, made once for all layers; a position bias is a dense (H, n, m)
    table.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, *, mask: Mask, scale: float, dropout: float = 0.0
    ) -> Tensor:
        n, n_head = q.shape[-2], q.shape[1]
        # exact types: a subclass may allow something else
        if frame.aligned and type(mask) is SlidingWindow:
            if n >= 4 * mask.window:
                return self._local(q, k, v, frame, mask, scale=scale, dropout=dropout)
            mask = Causal() if mask.window >= n else mask
        options: dict[str, Any] = {"scale": scale, "dropout_p": dropout}
        if frame.uniform and not frame.position.biased:
            # SDPA's is_causal aligns top-left: right only where queries and keys are the same tokens
            if frame.aligned and type(mask) is Causal:
                return sdpa(q, k, v, is_causal=True, **options)
            if type(mask) is Full or (frame.newest and type(mask) is Causal):
                return sdpa(q, k, v, **options)
        dense, readable, read = frame.once(
            (mask, "dense", n_head, q.dtype), lambda: self._dense(frame, mask, n_head, q.dtype)
        )
        q, k, v = clear(q, readable), clear(k, read), clear(v, read)
        return clear(sdpa(q, k, v, attn_mask=dense, **options), readable)

    def _local(
        self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, mask: SlidingWindow, **options: float
    ) -> Tensor:
        """A window in blocks of w queries: each reads its own block of keys and the one before, O(n · w) in all."""
        w, n = mask.window, q.shape[-2]
        first, later = frame.once((mask, "local"), lambda: self._two_blocks(frame, w))
        begin = self(q[..., :w, :], k[..., :w, :], v[..., :w, :], first, mask=mask, **options)
        # to a whole number of blocks; the padding stands after every real query, which so never reads it
        q, k, v = (F.pad(t, (0, 0, 0, -n % w)) for t in (q, k, v))
        q = q[..., w:, :].unflatten(-2, (-1, w))  # (B, H, N, w, D)
        k, v = (t.unfold(-2, 2 * w, w).mT for t in (k, v))  # (B, G, N, 2w, D), overlapping
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # (B · N, heads, …, D)
        rest = self(q, k, v, later, mask=mask, **options).unflatten(0, (len(begin), -1))  # (B, N, H, w, D)
        return torch.cat((begin, rest.transpose(1, 2).flatten(2, 3)), dim=-2)[..., :n, :]

    @staticmethod
    def _two_blocks(frame: Frame, w: int) -> tuple[Frame, Frame]:
        """The frames of the first block, which has none before it, and of every later one."""
        pos = torch.arange(2 * w, device=frame.q_pos.device)
        return Frame(pos[:w], position=frame.position, aligned=True), Frame(pos[w:], pos, frame.position)

    @staticmethod
    def _dense(frame: Frame, mask: Mask, n_head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        allowed, readable, read = visible(frame, mask)
        shown = allowed | ~readable
        bias = frame.bias(n_head, dtype)
        dense = shown if bias is None else bias.masked_fill(~shown, -math.inf)
        while dense.dim() < 4:
            dense = dense.unsqueeze(0)
        return dense, readable, read


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """scaled_dot_product_attention, by a kernel that does not make the n × m weights where there is a quick one."""
    if q.shape[-2] == 1 and k.stride(-1) != 1:
        return by_channels(q, k, v, attn_mask=attn_mask, scale=scale, dropout_p=dropout_p)
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))  # as SDPA's quick kernels want them
    if _slow_backward(q, k, v):
        return by_rows(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, dropout_p=dropout_p)
    # On CUDA only FlashAttention reads shared key heads, and that in half precision without a mask: for anything
    # else SDPA falls back to the whole matrix without a word, unless each query head has its own.
    if q.is_cuda and (attn_mask is not None or q.dtype not in HALF):
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def by_channels(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, scale: float, dropout_p: float
) -> Tensor:
    """Attention of one query as two products, for a cache that lies by channels (`cache.room`): both read long runs of
    memory, half as much again in a second as SDPA does. The weights are one row a head."""
    (B, H, n, _), (_, G, m, E) = q.shape, v.shape
    bias = added(attn_mask, q).expand(B, H, n, m).reshape(B * G, -1, m)
    scores = torch.baddbmm(bias, q.reshape(B * G, H // G, -1), k.flatten(0, 1).mT, alpha=scale)
    weights = F.dropout(scores.softmax(dim=-1), dropout_p)
    # as bmm, the compiler would write this product its own way
    return torch.baddbmm(q.new_zeros(1, 1, 1), weights, v.flatten(0, 1), beta=0).view(B, H, n, E)


def _slow_backward(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether SDPA's backward pass is slower than `by_rows`: in half precision on a CPU it takes 2 to 5 times as long
    up to 256 tokens, still somewhat longer at 512, and less at 1024. In float32 it is quick."""
    training = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    return training and q.device.type == "cpu" and q.dtype in HALF and k.shape[-2] <= SHORT


def by_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """Attention as matrix products over 128 queries at a time, which skip the keys after the last of them if causal.

    Its backward pass keeps the weights: n · m for each head, five eighths of them if causal and 512 long.
    """
    (B, H, n, _), m = q.shape, k.shape[-2]
    if is_causal:
        attn_mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril()
    bias = added(attn_mask, q).expand(B, H, n, m).flatten(0, 1)
    q, k, v = (repeat_heads(t, H).flatten(0, 1) for t in (q, k, v))
    outputs = []
    for start, rows in zip(range(0, n, ROWS), q.split(ROWS, dim=1), strict=True):
        read = start + rows.shape[1] if is_causal else m
        scores = torch.baddbmm(bias[:, start : start + ROWS, :read], rows, k[:, :read].mT, alpha=scale)
        outputs.append(F.dropout(scores.softmax(dim=-1), dropout_p) @ v[:, :read])
    return torch.cat(outputs, dim=1).unflatten(0, (B, H))


def without_gradients(device: torch.device) -> ConfigError:
    """That FlexAttention cannot train there."""
    return ConfigError(
        f"attention.backend=flex has no gradients on device={device.type}: train with "
        "attention.backend=fused, or on device=cuda"
    )


class Flex:
    """FlexAttention (Dong et al. 2024): a kernel generated from the mask's predicate and the bias's formula, which
    skips blocks of keys that nobody may read and stores no table.

    Compiled on CUDA. Elsewhere it runs uncompiled, slowly, with the same numbers and no gradients. A single query,
    which has nothing to skip, goes the fused way. Keys in empty slots may be anything; keys that the mask hides from
    every query must be finite.
    """

    def __init__(self) -> None:
        self.fused = Fused()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, *, mask: Mask, scale: float, dropout: float = 0.0
    ) -> Tensor:
        assert dropout == 0  # refused by resolve_backend
        if q.shape[-2] == 1:
            return self.fused(q, k, v, frame, mask=mask, scale=scale)
        if not q.is_cuda:
            if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
                raise without_gradients(q.device)
            q, k, v = q.detach(), k.detach(), v.detach()
        compiling = q.is_cuda and q.dtype != torch.float64 and not torch.compiler.is_compiling()
        blocks, score_mod = frame.once((mask, "flex"), lambda: self._blocks(frame, mask, compiling))
        if not frame.uniform:
            filled = (frame.k_pos >= 0).view(-1, 1, frame.k_pos.shape[-1], 1)
            k, v = clear(k, filled), clear(v, filled)
        kernel: Any = compiled(flex_attention) if compiling else flex_attention
        gqa = q.shape[1] != k.shape[1]
        return kernel(q, k, v, score_mod=score_mod, block_mask=blocks, scale=scale, enable_gqa=gqa)

    @staticmethod
    def _blocks(frame: Frame, mask: Mask, compiling: bool) -> tuple[BlockMask, Callable | None]:
        """Which blocks are read, wholly or in part; and the bias as a function of one score."""
        q_pos, k_pos, allows, bias = frame.q_pos, frame.k_pos, mask.allows, frame.position.bias
        q_doc, k_doc = frame.q_doc, frame.k_doc

        def at(pos: Tensor, b: Tensor, i: Tensor) -> Tensor:
            return pos[i] if pos.dim() == 1 else pos[b, i]

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            q, k = at(q_pos, b, i), at(k_pos, b, j)
            if uniform:
                return allows(q, k)
            allowed = allows(q, k) & (q >= 0) & (k >= 0)
            return allowed if q_doc is None or k_doc is None else allowed & (q_doc[b, i] == k_doc[b, j])

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + bias(h, at(q_pos, b, i), at(k_pos, b, j), score.dtype)

        uniform, create = frame.uniform, compiled(create_block_mask) if compiling else create_block_mask
        batch = None if uniform else max(len(pos) for pos in (q_pos, k_pos) if pos.dim() == 2)
        blocks = create(mask_mod, batch, None, q_pos.shape[-1], k_pos.shape[-1], device=q_pos.device)
        return blocks, score_mod if frame.position.biased else None


@functools.cache
def compiled(function: Callable) -> Callable:
    return torch.compile(function)


BACKENDS: dict[str, Callable[[], Any]] = {"reference": Reference, "fused": Fused, "flex": Flex}


def added(mask: Tensor | None, like: Tensor) -> Tensor:
    """What a mask adds to the scores: it may be one of booleans, a bias, or none."""
    if mask is None:
        return like.new_zeros(1, 1)
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, -math.inf)
    return mask


def visible(frame: Frame, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Who may read whom (…, n, m), which queries read anything (…, n, 1), which keys are read (…, m, 1).

    Kernels let a query that may read nothing read everything, and then zero what it got: a softmax over
    nothing is NaN, and so is its gradient.
    """
    allowed = frame.allowed(mask)
    readable = allowed.any(dim=-1, keepdim=True)
    return allowed, readable, allowed.any(dim=-2).unsqueeze(-1)


def clear(x: Tensor, used: Tensor) -> Tensor:
    """Zeros where `used` is false, so that rubbish there (0 · NaN is NaN) reaches no output and no gradient."""
    return x.masked_fill(~used, 0)


def repeat_heads(x: Tensor, n_head: int) -> Tensor:
    """(B, G, m, D) -> (B, H, m, D): each key head serves H / G neighbouring query heads (Ainslie et al. 2023)."""
    return x if x.shape[1] == n_head else x.repeat_interleave(n_head // x.shape[1], dim=1)


def resolve_scale(scale: Scale, head_dim: int) -> float:
    """'sqrt' (1/√d_k, keeps the score's variance at 1), 'none' (1), 'inverse' (1/d_k) or a positive number."""
    named = {"sqrt": head_dim**-0.5, "none": 1.0, "inverse": 1.0 / head_dim}
    if isinstance(scale, str):
        if scale not in named:
            raise ConfigError(f"attention.scale={scale}: expected sqrt, none, inverse or a positive number")
        return named[scale]
    if not (0 < scale < math.inf):
        raise ConfigError(f"attention.scale={scale}: expected sqrt, none, inverse or a positive number")
    return float(scale)


def resolve_backend(backend: str, dropout: float = 0.0) -> Any:
    if backend not in BACKENDS:
        raise ConfigError(f"attention.backend={backend}: expected one of {', '.join(BACKENDS)}")
    if backend == "flex" and dropout:
        raise ConfigError(
            f"attention.dropout={dropout}: attention.backend=flex has no dropout; choose fused, or 0"
        )
    return BACKENDS[backend]()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Callable[[Any, Any], Any] = Full(),  # noqa: B008 (frozen, without state)
    scale: Scale = "sqrt",
    position: Position | None = None,
    dropout: float = 0.0,
    backend: str = "fused",
) -> Tensor:
    """Scaled dot-product attention as a plain function.

    q (B, H, n, D), k (B, G, m, D), v (B, G, m, E) -> (B, H, n, E); B, or B and H, may be missing from all three.
    `mask` is a Mask or a function of (q_pos, k_pos). Positions are aligned to the end: query i of n stands at
    m − n + i among m keys. Of a position scheme only its bias acts here; embeddings and rotations come before.
    """
    n, m = q.shape[-2], k.shape[-2]
    pos = torch.arange(min(m - n, 0), m, device=q.device)
    frame = Frame(pos[-n:], pos[-m:], position, aligned=n == m)
    rule = mask if isinstance(mask, Mask) else Predicate(mask)
    kernel = resolve_backend(backend, dropout)
    q4, k4, v4 = (t[(None,) * (4 - t.dim())] for t in (q, k, v))
    out = kernel(q4, k4, v4, frame, mask=rule, scale=resolve_scale(scale, q.shape[-1]), dropout=dropout)
    return out.view(*q.shape[:-1], v.shape[-1])
