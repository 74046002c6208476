"""Where one forward pass stands: the positions of its queries and keys, and what follows from them.

A frame is made once a forward pass and shared by every layer, so that masks and rotations are computed once.
Positions are true positions: they stay right when a cache holds the past, rolls, or has rows of different
lengths.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minilm.attention.masks import Mask
from minilm.attention.positions import NoPosition, Position, Rotation, at_least_float32

_NOWHERE = NoPosition()


class Frame:
    """Positions of n queries and m keys.

    q_pos, k_pos: int64, (n,) and (m,) where every row of the batch stands alike, else (B, n) and (B, m) in
    which −1 marks an empty slot. Without k_pos the keys are the queries' own tokens.
    q_doc, k_doc: (B, n) and (B, m) numbers of documents, where a token reads no document but its own; else None.
    What is known of them spares the fused kernel a table of who reads whom. aligned: queries and keys are the same
    tokens, at consecutive positions. newest: every key stands at or before every query (decoding one token).
    """

    def __init__(
        self,
        q_pos: Tensor,
        k_pos: Tensor | None = None,
        position: Position | None = None,
        *,
        q_doc: Tensor | None = None,
        k_doc: Tensor | None = None,
        aligned: bool = False,
        newest: bool = False,
    ) -> None:
        self.q_pos, self.q_doc = q_pos, q_doc
        self.k_pos, self.k_doc = (q_pos, q_doc) if k_pos is None else (k_pos, k_doc)
        self.position = _NOWHERE if position is None else position
        self.aligned = aligned
        self.newest = newest
        self._made: dict[Any, Any] = {}

    @classmethod
    def of(cls, x: Tensor, position: Position | None = None, *, context: Tensor | None = None) -> "Frame":
        """The frame of a whole sequence x (B, n, …) that reads itself, or a context (B, m, …)."""
        q_pos = torch.arange(x.shape[1], device=x.device)
        if context is None:
            return cls(q_pos, position=position, aligned=True)
        return cls(q_pos, torch.arange(context.shape[1], device=x.device), position)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """`make()`, called for the first layer that asks and shared with the others."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def rotation(self, head_dim: int, dtype: torch.dtype) -> Rotation | None:
        """Angles of the queries, which are also those of the keys they bring."""
        return self.once(
            ("rotation", head_dim, dtype), lambda: self.position.rotation(self.q_pos, head_dim, dtype)
        )

    @property
    def uniform(self) -> bool:
        """Whether every row of the batch stands alike, without empty slots, in one document."""
        return self.q_pos.dim() == self.k_pos.dim() == 1

    @property
    def order(self) -> Tensor:
        """The slots of the keys in the order in which they were read, (m,) or (B, m)."""
        if self.k_doc is None:
            return self.k_pos.argsort(dim=-1, stable=True)
        return (self.k_doc * (self.k_pos.max() + 2) + self.k_pos).argsort(dim=-1, stable=True)

    def allowed(self, mask: Mask) -> Tensor:
        """Who may read whom, bool (n, m) or (B, 1, n, m). Empty slots and other documents are read by nobody."""
        q, k = self._pairs()
        allowed = mask.allows(q, k)
        if not self.uniform:
            allowed = allowed & (k >= 0) & (q >= 0)
            if self.q_doc is not None and self.k_doc is not None:
                allowed = allowed & (self.q_doc.unsqueeze(-1) == self.k_doc.unsqueeze(-2))
            allowed = allowed.unsqueeze(1)
        return allowed.expand(*allowed.shape[:-2], q.shape[-2], k.shape[-1])

    def bias(self, n_head: int, dtype: torch.dtype) -> Tensor | None:
        """What the position scheme adds to the scores, (H, n, m) or (B, H, n, m)."""
        if not self.position.biased:
            return None
        q, k = self._pairs()
        head = torch.arange(n_head, device=q.device).view(-1, 1, 1)
        return self.position.bias(head, q.unsqueeze(-3), k.unsqueeze(-3), at_least_float32(dtype)).to(dtype)

    def _pairs(self) -> tuple[Tensor, Tensor]:
        return self.q_pos.unsqueeze(-1), self.k_pos.unsqueeze(-2)  # (…, n, 1), (…, 1, m)


def in_documents(
    tokens: Tensor, end: int, pos: Tensor | None = None, last: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Where tokens (B, n) stand if the token `end`, which ends a document, begins the next: its position there is 0.

    Returns positions, −1 for an empty slot, and numbers of documents, (B, n) each. pos: (B, n), −1 for a slot that is
    empty, before a row's first token. last: (B,) what this gave for the token before each row's first one here.
    """
    slot = torch.arange(tokens.shape[1], device=tokens.device)
    filled = torch.ones_like(tokens, dtype=torch.bool) if pos is None else pos >= 0
    none = tokens.new_full((len(tokens),), -1)
    last_pos, last_doc = last or (none, none + 1)
    begins = (tokens == end) & filled
    # the slot at which the document begins that each slot is in; that of a running one lies before slot 0
    running = (~filled).sum(dim=1) - (last_pos + 1)
    start = torch.where(begins, slot, running.unsqueeze(1)).cummax(dim=1).values
    return (slot - start).masked_fill(~filled, -1), last_doc.unsqueeze(1) + begins.cumsum(dim=1)
