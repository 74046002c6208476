"""Cross-attention in a hundred lines: an encoder and a decoder learn to write a word backwards.

    python examples/reverse.py            # seconds, on one core
    python examples/reverse.py --blind    # the same decoder, which may not look at the word

The encoder reads the whole word, in both directions. The decoder writes a letter at a time: it reads what it has
written, and then, by cross-attention, the encoder's states, which have another length and another width. Their keys
and values are projected once a word and kept in a `Fixed`, beside the usual cache of what was written.

Shapes: B words, m letters in, n letters out, C model width, V letters and marks.
"""

import random
import string
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minilm.attention import Causal, Fixed, Frame, Full, KVCache, Learned, Mask, MultiHeadAttention

LETTERS = string.ascii_lowercase
START, END, V = 26, 27, 28
SHORTEST, LONGEST = 3, 10


class Block(nn.Module):
    """Self-attention, cross-attention where there is something to read, feed-forward (Vaswani et al. 2017, fig. 1)."""

    def __init__(self, width: int, mask: Mask, context_dim: int | None = None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.own = MultiHeadAttention(width, n_head=4, mask=mask, qk_norm=True)
        self.cross = None
        if context_dim:
            self.cross = MultiHeadAttention(
                width, n_head=4, mask=Full(), context_dim=context_dim, qk_norm=True
            )
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, frame: Frame, context=None, across=None, stores=(None, None)) -> Tensor:
        x = x + self.own(self.norms[0](x), frame=frame, cache=stores[0])
        if self.cross:
            x = x + self.cross(self.norms[1](x), context=context, frame=across, cache=stores[1])
        return x + self.mlp(self.norms[2](x))


class Reverser(nn.Module):
    """Words in, reversed words out. blind: without cross-attention."""

    def __init__(self, width_in: int = 48, width_out: int = 64, *, blind: bool = False) -> None:
        super().__init__()
        self.letters, self.written = nn.Embedding(V, width_in), nn.Embedding(V, width_out)
        self.place_in = Learned(n_embd=width_in, block_size=LONGEST)
        self.place_out = Learned(n_embd=width_out, block_size=LONGEST + 1)
        self.encoder = Block(width_in, Full())
        self.decoder = Block(width_out, Causal(), None if blind else width_in)
        self.norm, self.head = nn.RMSNorm(width_out), nn.Linear(width_out, V)

    def encode(self, words: list[str]) -> tuple[Tensor, Tensor]:
        """States (B, m, C) of the letters, and their positions (B, m), −1 where a word is shorter than the longest."""
        m = max(map(len, words))
        pos = torch.tensor([[i if i < len(word) else -1 for i in range(m)] for word in words])
        x = self.letters(torch.tensor([ids(word, m) for word in words]))
        return self.encoder(self.place_in.embed(x, pos), Frame(pos)), pos

    def decode(
        self, tokens: Tensor, states: Tensor, k_pos: Tensor, frame: Frame, stores=(None, None)
    ) -> Tensor:
        """Logits (B, n, V) of the letters after each of `tokens` (B, n)."""
        x = self.place_out.embed(self.written(tokens), frame.q_pos)
        x = self.decoder(x, frame, states, Frame(frame.q_pos, k_pos), stores)
        return self.head(self.norm(x))

    @torch.no_grad()
    def reverse(self, words: list[str]) -> list[str]:
        """What the model writes for each word, the likeliest letter at each step."""
        states, k_pos = self.encode(words)
        own, memory = self.decoder.own.new_store(len(words), LONGEST + 1), Fixed()
        cache, written = (
            KVCache([own], capacity=LONGEST + 1, reach=None),
            [torch.full((len(words), 1), START)],
        )
        for _ in range(LONGEST + 1):
            logits = self.decode(written[-1], states, k_pos, cache.advance(written[-1]), (own, memory))
            written.append(logits.argmax(dim=-1))
        rows = torch.cat(written[1:], dim=1).tolist()
        return ["".join(LETTERS[i] for i in row[: (row + [END]).index(END)] if i < START) for row in rows]


def ids(word: str, length: int) -> list[int]:
    """Letters as numbers, filled up with END."""
    return ([LETTERS.index(letter) for letter in word] + [END] * length)[:length]


def draw(rng: random.Random, count: int, *, held_out: bool = False) -> list[str]:
    """Random words. One in ten of all words is held out, and never drawn for training."""
    words: list[str] = []
    while len(words) < count:
        word = "".join(rng.choices(LETTERS, k=rng.randint(SHORTEST, LONGEST)))
        if (sum(map(LETTERS.index, word)) % 10 == 0) == held_out:
            words.append(word)
    return words


def train(model: Reverser, *, steps: int = 400, batch: int = 64, lr: float = 8e-3, report=print) -> None:
    rng, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 20, 1 - step / steps))
    for step in range(steps):
        words = draw(rng, batch)
        n = max(map(len, words)) + 1  # END is written too
        answers = torch.tensor([ids(word[::-1], n) for word in words])
        tokens = F.pad(answers[:, :-1], (1, 0), value=START)
        logits = model.decode(tokens, *model.encode(words), Frame.of(tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            report(f"step {step + 1}: loss {loss.item():.4f}")


def exact(model: Reverser, count: int = 500) -> float:
    """The share of held-out words that are reversed without a mistake."""
    words = draw(random.Random(1), count, held_out=True)
    return sum(word[::-1] == out for word, out in zip(words, model.reverse(words), strict=True)) / count


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Reverser(blind="--blind" in sys.argv)
    train(model)
    print(f"{exact(model):.1%} of 500 words that it has never seen come out without a mistake")
    for word in ("minilm", "attention", "stressed"):
        print(f"{word} -> {model.reverse([word])[0]}")
