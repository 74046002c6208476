"""What a model remembers of the tokens it has read: keys and values, never queries.

A `KVCache` holds one store a layer and the positions of what they keep:

    cache = model.new_cache(batch=1)
    logits = model(prompt, cache)       # prefill, in one piece or several
    logits = model(token, cache)        # then one token at a time: work grows as n · d, not n²

A layer chooses its store: `Growing` (all of the past), `Rolling` (the last w tokens, for a window of w),
`Fixed` (cross-attention's memory, projected once) or linear attention's constant `State`.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from minilm.attention.frame import Frame, in_documents
from minilm.attention.positions import Position, at_least_float32
from minilm.errors import ConfigError

LONG = 512  # entries from which on it pays to keep them by channels


class Store(Protocol):
    @property
    def nbytes(self) -> int: ...


class Growing:
    """A preallocated series along dimension −2 that returns all it was given so far."""

    def __init__(self, like: Tensor, capacity: int) -> None:
        self.data = room(like, capacity)
        self.length = 0

    def append(self, x: Tensor) -> Tensor:
        """(…, n, D) -> (…, length + n, D)"""
        begin, end = self.length, self.length + x.shape[-2]
        self.data[..., begin:end, :] = x
        self.length = end
        return self.data[..., :end, :] if begin else x

    @property
    def by_channels(self) -> bool:
        """Whether its data lies so (`room`)."""
        return self.data.stride(-1) != 1

    def skip(self, n: int) -> None:
        """Counts n entries that were written past it, by a `Slot`."""
        self.length += n


class Rolling:
    """A ring of the last `window` entries along dimension −2: memory stops growing there."""

    def __init__(self, like: Tensor, window: int) -> None:
        self.data = room(like, window)
        self.length = 0

    def append(self, x: Tensor) -> Tensor:
        """(…, n, D) -> what the n new tokens may need, (…, ≤ window + n − 1, D), in no stated order."""
        x = x.to(self.data.dtype)
        n, window = x.shape[-2], self.data.shape[-2]
        held = min(self.length, window)
        # one new token overwrites the one that has just left its window; the first of several still needs it
        seen = None if n == 1 else torch.cat((self.data[..., :held, :], x), dim=-2)
        kept = x[..., -window:, :]
        slots = torch.arange(self.length + n - kept.shape[-2], self.length + n, device=x.device) % window
        self.data.index_copy_(-2, slots, kept)
        self.length += n
        return self.data[..., : min(self.length, window), :] if seen is None else seen


class Slot:
    """One slot to fill of a series that holds `end` with it. Where it is, is a tensor: no step's own, so that one
    compiled step serves them all.

    at (1,). data as it lies in memory, or a compiler would write a copy: (…, capacity, D), or (…, D, capacity) where
    `by_channels`.
    """

    def __init__(self, data: Tensor, at: Tensor, end: int, *, by_channels: bool = False) -> None:
        self.data, self.at, self.end, self.by_channels = data, at, end, by_channels

    def append(self, x: Tensor) -> Tensor:
        """(…, 1, D) -> (…, end, D)"""
        x = x.to(self.data.dtype)
        if self.by_channels:
            return self.data.index_copy_(-1, self.at, x.mT)[..., : self.end].mT
        return self.data.index_copy_(-2, self.at, x)[..., : self.end, :]


class KeyValues:
    """A layer's keys and values, a series (B, G, slots, D) each."""

    def __init__(self, keys: Growing | Rolling | Slot, values: Growing | Rolling | Slot) -> None:
        self.keys, self.values = keys, values

    @classmethod
    def empty(
        cls,
        batch: int,
        n_kv_head: int,
        head_dim: int,
        *,
        capacity: int | None,
        window: int | None,
        like: Tensor,
    ) -> "KeyValues":
        """Growing to `capacity`, or rolling over the last `window`."""
        shape = like.new_empty(batch, n_kv_head, 0, head_dim)
        return cls(series(shape, capacity, window), series(shape, capacity, window))

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys.append(k), self.values.append(v)

    @property
    def nbytes(self) -> int:
        return self.keys.data.nbytes + self.values.data.nbytes


class State:
    """Linear attention's memory: sums over all keys so far, Σ φ(k) vᵀ and Σ φ(k), of constant size.

    products (B, G, D, D), keys (B, G, D): in float32 or wider, for they sum over the whole past.
    """

    def __init__(self, batch: int, n_kv_head: int, head_dim: int, *, like: Tensor) -> None:
        dtype = at_least_float32(like.dtype)
        self.products = like.new_zeros(batch, n_kv_head, head_dim, head_dim, dtype=dtype)
        self.keys = like.new_zeros(batch, n_kv_head, head_dim, dtype=dtype)

    @property
    def nbytes(self) -> int:
        return self.products.nbytes + self.keys.nbytes


class Fixed:
    """Cross-attention's keys and values: projected from the memory once, reused at every step."""

    def __init__(self) -> None:
        self.pair: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.pair or ())


def room(like: Tensor, n: int) -> Tensor:
    """Zeros (…, n, D), in the order in which one query reads them fastest. For many in float32 on a CPU that is by
    channels: the first of all entries, then the second of all (`kernels.by_channels`)."""
    shape, D = like.shape[:-2], like.shape[-1]
    if n >= LONG and like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64):
        return like.new_zeros(*shape, D, n).mT
    return like.new_zeros(*shape, n, D)


def series(like: Tensor, capacity: int | None, window: int | None) -> Growing | Rolling:
    """The smaller of the two that serves; a capacity of None is endless, and needs a window."""
    if window is not None and (capacity is None or window < capacity):
        return Rolling(like, window)
    assert capacity is not None
    return Growing(like, capacity)


class KVCache:
    """One store a layer, and the positions of the tokens in them.

    stores: a store for each layer. capacity: tokens it holds; None where the stores forget, and so never fill.
    reach, lookahead: how far the layers read back and ahead (`Attention.reach`, `Mask.lookahead`). end_token: begins
    a document of its own (`frame.in_documents`), None for none. Without a model:

        cache = KVCache([layer.new_store(batch, 64)], capacity=64, reach=layer.reach)
        y = layer(x, frame=cache.advance(x), cache=cache.stores[0])
    """

    def __init__(
        self,
        stores: Sequence[Store],
        *,
        capacity: int | None,
        reach: int | None,
        lookahead: float = 0,
        end_token: int | None = None,
    ) -> None:
        self.stores = stores
        self.capacity = capacity
        self.reach = reach
        self.lookahead = lookahead
        self.end_token = end_token
        self.length = 0  # slots filled so far, empty ones included
        self._next: Tensor | int = 0  # the position of each row's next token
        # where each row's last token stands, and in which document
        self._last: tuple[Tensor, Tensor] | None = None
        # positions of the kept slots, and documents if there are any
        self._kept: Growing | Rolling | None = None
        self._latest: Tensor | None = None  # the tokens that `recall` will be asked for

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values; of all layers."""
        return sum(store.nbytes for store in self.stores)

    def advance(self, tokens: Tensor, position: Position | None = None, pos: Tensor | None = None) -> Frame:
        """The frame in which the next `tokens` (B, n, …) read the past and one another.

        pos: (B, n) positions where rows differ in length, −1 for an empty slot before a row's first token. Documents
        are known by the tokens, so then they are ids, and of `pos` only the empty slots count.
        """
        n = tokens.shape[1]
        if self.capacity is not None and self.length + n > self.capacity:
            raise ConfigError(f"the cache holds {self.capacity} tokens: {self.length} + {n} do not fit")
        first = self.length == 0
        if first:
            self._check_lookahead(n if pos is None else int(pos.max(dim=1).values.min()) + 1)
        doc = None
        if self.end_token is not None:
            pos, doc = in_documents(tokens, self.end_token, pos, self._last)
            self._last = pos[:, -1], doc[:, -1]
        alike = pos is None and isinstance(self._next, int)
        k_doc = None
        if alike and not self._forgets:  # slot i holds position i
            k_pos = torch.arange(self.length + n, device=tokens.device)
            q_pos = k_pos[self.length :]
        else:
            q_pos, k_pos, k_doc = self._place(torch.arange(n, device=tokens.device), pos, doc)
        self.length += n
        if alike:
            self._next = self.length
        aligned = first and alike
        keys = None if aligned else k_pos
        return Frame(q_pos, keys, position, q_doc=doc, k_doc=k_doc, aligned=aligned, newest=n == 1)

    def _place(
        self, steps: Tensor, pos: Tensor | None, doc: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Positions of the new tokens, and positions and documents of all that is kept, where rows differ or forget."""
        if pos is None:
            pos = steps + (self._next if isinstance(self._next, int) else self._next.unsqueeze(1))
        elif self.length and isinstance(self._next, int):
            raise ConfigError("pos: rows that differ in length say so from a cache's first piece on")
        places = torch.stack((pos,) if doc is None else (pos, doc), dim=-1)
        if self._kept is None:
            self._kept = series(places[..., :0, :], self.capacity, self.reach)
        if pos.dim() == 2:
            before = self._next if isinstance(self._next, Tensor) else pos.new_zeros(len(pos))
            self._next = torch.maximum(before, pos.max(dim=1).values + 1)
        k_pos, *k_doc = self._kept.append(places).unbind(-1)
        return pos, k_pos, k_doc[0] if k_doc else None

    @property
    def _forgets(self) -> bool:
        """Whether the stores roll."""
        return self.reach is not None and (self.capacity is None or self.reach < self.capacity)

    def recall(self, tokens: Tensor, past: int) -> Tensor:
        """(B, n) -> (B, past + n): the new tokens behind the last `past` that were read, −1 where there were none."""
        if self._latest is None:
            self._latest = tokens.new_full((len(tokens), past), -1)
        known = torch.cat((self._latest, tokens), dim=1)
        self._latest = known[:, -past:]
        return known

    def _check_lookahead(self, first: int) -> None:
        if first >= self.lookahead:
            return
        if self.lookahead == math.inf:
            raise ConfigError(
                "this mask reads the future, which a cache cannot hold: choose mask=causal, or cache=false"
            )
        raise ConfigError(
            f"mask=prefix lets the first {self.lookahead} tokens read one another, so a cache needs them all "
            f"in its first piece, which holds {first}: give a prompt of at least {self.lookahead} tokens, "
            "or cache=false"
        )
