"""What a token is to the model before it reads any other: one vector, or one for each history that ends with it.

Shapes: B batch, T tokens, C model width, V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TokenEmbedding(nn.Embedding):
    """A vector a token. past: how many tokens before each it also looks at."""

    past = 0

    def __init__(self, vocab_size: int, n_embd: int) -> None:
        super().__init__(vocab_size, n_embd)

    def forward(self, tokens: Tensor, pos: Tensor | None = None) -> Tensor:
        """(B, past + T) int64 -> (B, T, C). pos: (B, T) places in documents, where each is to know its own alone."""
        return super().forward(tokens)


class NGramEmbedding(TokenEmbedding):
    """The token's vector, and one for each of the last `orders` tokens taken together.

    What n-gram models count is learned here by gradient descent, so that attention is left with what lies farther
    back. orders: lengths of the histories, the token itself included. rows: of each order's table; where more
    histories are possible they share rows by a hash (Svenstrup et al. 2017; Roy et al. 2022, N-Grammer). All start
    at zero. dropout: of each history's vector as a whole, while training, so that the shorter ones learn to do
    without it: long histories are learned by heart otherwise.
    The values are checked by `GPTConfig`, whose keys they are.
    """

    def __init__(
        self, vocab_size: int, n_embd: int, *, orders: Sequence[int], rows: int = 16384, dropout: float = 0.0
    ) -> None:
        super().__init__(vocab_size, n_embd)
        self.orders = orders
        self.past = max(orders) - 1
        self.dropout = dropout
        self.tables = nn.ParameterList(
            torch.zeros(min(histories(vocab_size, order), rows), n_embd) for order in orders
        )

    def forward(self, tokens: Tensor, pos: Tensor | None = None) -> Tensor:
        """(B, past + T) int64 -> (B, T, C). A token of −1 is none: the text begins after it. pos: as above."""
        x = super().forward(tokens[:, self.past :].clamp(min=0))
        for order, table in zip(self.orders, self.tables, strict=True):
            vectors = F.embedding(self._rows(tokens, order, len(table), pos), table)
            if self.training and self.dropout:
                vectors = vectors * F.dropout(torch.ones_like(vectors[..., :1]), self.dropout)
            x = x + vectors
        return x

    def _rows(self, tokens: Tensor, order: int, rows: int, pos: Tensor | None = None) -> Tensor:
        """The row of each history, (B, past + T) -> (B, T)."""
        history = (tokens + 1).unfold(-1, order, 1)[:, self.past + 1 - order :]  # (B, T, order)
        if pos is not None:  # what lies farther back than the document's beginning is none
            back = torch.arange(order - 1, -1, -1, device=tokens.device)
            history = history.masked_fill(back > pos.unsqueeze(-1), 0)
        direct = histories(self.num_embeddings, order) <= rows
        # a hash may wrap around at 2⁶³; an odd base then keeps every token in it
        base = (self.num_embeddings + 1) | (0 if direct else 1)
        number = torch.zeros_like(history[..., 0])
        for i in range(order):
            number = number * base + history[..., i]
        return number if direct else scramble(number) % rows


def histories(vocab_size: int, order: int) -> int:
    """How many there are of `order` tokens, those of a text's beginning included."""
    return (vocab_size + 1) ** order


def scramble(x: Tensor) -> Tensor:
    """int64 -> int64 in which every bit depends on all of x (Steele et al. 2014, the finalizer of SplitMix)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * (factor - (1 << 64))  # the same bits, as a signed number
    return x ^ (x >> 31)
