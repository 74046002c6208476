"""A decoder-only transformer: token embeddings, blocks of attention and feed-forward, a head.

Shapes: B batch, T tokens, C model width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minilm.attention.cache import KVCache, Store
from minilm.attention.frame import Frame, in_documents
from minilm.attention.layer import Attention, MultiHeadAttention, check_dropout, check_heads
from minilm.attention.masks import Mask
from minilm.attention.positions import Position, Rotary
from minilm.embedding import NGramEmbedding, TokenEmbedding
from minilm.errors import ConfigError
from minilm.layers import MLPS, NORMS, Dropout, named, usual_width

MAX_ORDER = 64  # of n-grams: any text before a longer one is as good as a hash of its own

#: ten times what any model has, and more: what lies beyond is a slip, and could not even be outlined
MOST = {
    "n_layer": 10_000,
    "n_embd": 1 << 20,
    "n_inner": 1 << 23,
    "block_size": 1 << 30,
    "vocab_size": 1 << 24,
    "ngram_rows": 1 << 30,
}


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model; configs/model/*.yaml written as a class.

    Classic (GPT-2): norm=layernorm, mlp=gelu, tie_embeddings, with position=learned. Modern: norm=rmsnorm,
    mlp=relu2 or swiglu, with position=rope and attention.qk_norm.
    n_kv_head: None is n_head. norm_eps: added to the variance; None is 1e-5 for layernorm, and for rmsnorm the
    number type's own epsilon. n_inner: channels inside the feed-forward layer; None is 4 · n_embd, for swiglu 8/3 of
    it. bias: on every linear layer and LayerNorm. dropout: on embeddings and on what each half-block adds.
    ngrams, ngram_rows, ngram_dropout: orders, rows and dropout of an `NGramEmbedding`; none is a plain one.
    """

    vocab_size: int
    block_size: int = 256
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int | None = None
    n_embd: int = 128
    norm: str = "rmsnorm"
    norm_eps: float | None = None
    mlp: str = "relu2"
    n_inner: int | None = None
    bias: bool = False
    dropout: float = 0.0
    tie_embeddings: bool = False
    ngrams: tuple[int, ...] = ()
    ngram_rows: int = 16384
    ngram_dropout: float = 0.0

    def __post_init__(self) -> None:
        for key in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, key) < 1:
                raise ConfigError(f"model.{key}={getattr(self, key)}: a positive whole number")
        for key, most in MOST.items():
            if (getattr(self, key) or 0) > most:
                raise ConfigError(f"model.{key}={getattr(self, key)}: at most {most}")
        if self.n_kv_head is not None and self.n_kv_head < 1:
            raise ConfigError(
                f"model.n_kv_head={self.n_kv_head}: a positive whole number, or null for n_head"
            )
        if self.n_inner is not None and self.n_inner < 1:
            raise ConfigError(
                f"model.n_inner={self.n_inner}: a positive whole number, or null for the usual width"
            )
        if self.norm_eps is not None and not 0 < self.norm_eps < 1:
            raise ConfigError(
                f"model.norm_eps={self.norm_eps}: a small positive number, or null for the usual"
            )
        check_heads(self.n_embd, self.n_head, self.n_kv_head or self.n_head)
        check_dropout("model.dropout", self.dropout)
        if any(order < 2 for order in self.ngrams) or len(set(self.ngrams)) < len(self.ngrams):
            raise ConfigError(f"model.ngrams={list(self.ngrams)}: different whole numbers, 2 or more")
        if max(self.ngrams, default=0) > min(self.block_size, MAX_ORDER):
            raise ConfigError(
                f"model.ngrams={list(self.ngrams)}: at most as long as the context, "
                f"model.block_size={self.block_size}, and at most {MAX_ORDER}"
            )
        if self.ngram_rows < 1:
            raise ConfigError(f"model.ngram_rows={self.ngram_rows}: a positive whole number")
        check_dropout("model.ngram_dropout", self.ngram_dropout)
        named("model.norm", self.norm, NORMS)
        named("model.mlp", self.mlp, MLPS)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def mlp_hidden(self) -> int:
        """Channels inside a feed-forward layer."""
        return self.n_inner or usual_width(self.mlp, self.n_embd)

    def new_embedding(self) -> TokenEmbedding:
        size = self.vocab_size, self.n_embd
        if not self.ngrams:
            return TokenEmbedding(*size)
        return NGramEmbedding(*size, orders=self.ngrams, rows=self.ngram_rows, dropout=self.ngram_dropout)

    def new_norm(self) -> nn.Module:
        return NORMS[self.norm](self.n_embd, self.bias, self.norm_eps)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (pre-norm, Xiong et al. 2020)."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.norm_1 = config.new_norm()
        self.attention = attention
        self.norm_2 = config.new_norm()
        self.mlp = MLPS[config.mlp](config.n_embd, config.mlp_hidden, config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, frame: Frame, cache=None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x), frame=frame, cache=cache))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """Tokens in, logits out.

    config: the shape. position: the model's one position scheme. attention: makes one layer's attention. end_token:
    stands between documents, of which none then sees another; None if they may. It begins the document after it, at
    position 0: as a target it ends a document, as an input it tells of none.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        position: Position | None = None,
        attention: Callable[[], Attention] | None = None,
        end_token: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        attention = attention or (
            lambda: MultiHeadAttention(
                config.n_embd, n_head=config.n_head, n_kv_head=config.n_kv_head, bias=config.bias
            )
        )
        self.embedding = config.new_embedding()
        self.position = position or Rotary(head_dim=config.head_dim)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, attention()) for _ in range(config.n_layer))
        self.end_token = end_token
        if end_token is not None:
            self._check_documents()
        self.norm = config.new_norm()
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie()
        self.apply(self._init)
        # what is added to the residual stream 2·n_layer times starts that much smaller (Radford et al. 2019)
        for name, weight in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(weight, std=0.02 / (2 * config.n_layer) ** 0.5)

    def tie(self) -> None:
        """Embedding and head share one matrix, if they are to."""
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    @property
    def _layers(self) -> list[Attention]:
        return [cast(Block, block).attention for block in self.blocks]

    @property
    def mask(self) -> Mask:
        """The mask that all layers share."""
        return self._layers[0].mask

    @property
    def reach(self) -> int | None:
        """How many positions back the layers' caches hold, None for all."""
        return self._layers[0].reach

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        *,
        pos: Tensor | None = None,
        keep: int | None = None,
    ) -> Tensor:
        """(B, T) int64 -> logits (B, T, V).

        cache: what was read before; these tokens follow it and join it. pos: (B, T) positions, −1 for an empty
        slot, where rows differ in length (padded on the left). keep: logits of the last `keep` tokens only.
        """
        if cache is not None:
            frame = cache.advance(tokens, self.position, pos)
        elif self.end_token is not None:
            place, doc = in_documents(tokens, self.end_token, pos)
            frame = Frame(place, position=self.position, q_doc=doc)
        elif pos is not None:
            frame = Frame(pos, position=self.position)
        else:
            frame = Frame.of(tokens, self.position)
        stores = None if cache is None else cache.stores
        return self.read(self.with_past(tokens, cache, pos), frame, stores, keep=keep)

    def read(
        self,
        tokens: Tensor,
        frame: Frame,
        stores: Sequence[Store | None] | None = None,
        *,
        keep: int | None = None,
    ) -> Tensor:
        """The forward pass itself, of tokens (B, past + T) of which the last T stand as `frame` says."""
        within = frame.q_pos if frame.q_doc is not None else None
        x = self.dropout(self.position.embed(self.embedding(tokens, within), frame.q_pos))
        for block, store in zip(self.blocks, stores or [None] * len(self.blocks), strict=True):
            x = block(x, frame, store)
        return self.head(self.norm(x if keep is None else x[:, -keep:]))

    def with_past(self, tokens: Tensor, cache: KVCache | None = None, pos: Tensor | None = None) -> Tensor:
        """(B, T) -> (B, past + T): with the tokens before them that the embedding looks at, −1 where there are none."""
        past = self.embedding.past
        if past == 0:
            return tokens
        if pos is not None:
            tokens = tokens.masked_fill(pos < 0, -1)
        return F.pad(tokens, (past, 0), value=-1) if cache is None else cache.recall(tokens, past)

    def _check_documents(self) -> None:
        if self.mask.lookahead:
            raise ConfigError(
                "data.document_mask=true: this mask reads ahead, which does not end with a document; choose "
                "mask=causal or mask=sliding"
            )
        if not all(isinstance(layer, MultiHeadAttention) for layer in self._layers):
            raise ConfigError(
                "data.document_mask=true: attention=linear carries one state through all documents; choose "
                "attention=mha"
            )

    def hide_leaks(self, targets: Tensor) -> Tensor:
        """Targets (B, T) with −1 where the mask lets a position read its own target.

        All of them are kept where it shows them all: that loss is no language-modelling loss.
        """
        pos = torch.arange(self.config.block_size, device=targets.device)
        leaked = self.mask.allows(pos, pos + 1)
        return targets if leaked.all() else targets.masked_fill(leaked[: targets.shape[1]], -1)

    def new_cache(self, batch: int = 1, capacity: int | None = None) -> KVCache:
        """An empty cache for `batch` rows of up to `capacity` tokens (block_size unless said otherwise).

        Where the model's layers forget (a window and relative positions, or a constant state), it never fills.
        """
        size = None if self.rolls else min(capacity or self.config.block_size, self.config.block_size)
        stores = [layer.new_store(batch, size) for layer in self._layers]
        return KVCache(
            stores,
            capacity=size,
            reach=self.reach,
            lookahead=self.mask.lookahead,
            end_token=self.end_token,
        )

    @property
    def rolls(self) -> bool:
        """Whether generation may run past block_size: positions are relative and the layers forget."""
        return self.position.relative and self.reach is not None and self.reach <= self.config.block_size
