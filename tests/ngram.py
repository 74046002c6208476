"""A fair baseline without attention: a character n-gram model with interpolated modified Kneser-Ney smoothing.

It sees the last order-1 characters and nothing more (Chen and Goodman 1999, with the discounts of each order
worked out from its own counts of counts). As a command it prints what each order reaches on the embedded
corpus, and how far above the entropy floor that is:

    python tests/ngram.py
"""

from __future__ import annotations

import argparse

import numpy as np

from minilm.tales import generate


class NGram:
    """The model of every order up to `max_order`, counted from `tokens`, integers below `vocab_size`."""

    def __init__(self, tokens: np.ndarray, vocab_size: int, max_order: int):
        self.vocab_size = vocab_size
        # a k-gram is a number, its row in level k; its key names its first k-1 tokens and its last one
        self.keys = [np.zeros(1, np.int64)]
        self.counts = [np.array([len(tokens)])]
        self.varieties = []  # of a k-gram: how many different tokens come before it
        grams = np.zeros(len(tokens) + 1, np.int64)
        for k in range(1, max_order + 1):
            keys = grams[: len(tokens) - k + 1] * vocab_size + tokens[k - 1 :]
            found = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
            self.varieties.append(np.bincount(grams[found[1] + 1], minlength=len(self.keys[-1])))
            self.keys.append(found[0])
            self.counts.append(found[3])
            grams = found[2]

    def probabilities(self, tokens: np.ndarray, order: int) -> np.ndarray:
        """(len(tokens),): the probability of each token after the order-1 tokens before it."""
        p = np.full(len(tokens), 1 / self.vocab_size)
        gram = np.zeros(len(tokens), np.int64)  # at each token: the row of the k-gram that ends there, or -1
        for k in range(1, order + 1):
            # the highest order counts; a lower one asks in how many contexts a token is new
            counts = self.counts[k] if k == order else self.varieties[k]
            context_of = self.keys[k] // self.vocab_size
            n_context = len(self.keys[k - 1])
            total = np.bincount(context_of, counts, n_context)
            discount = _discounts(counts)[np.minimum(counts, 3)]
            given_up = np.bincount(context_of, discount, n_context)

            context = gram if k == 1 else np.concatenate([[-1], gram[:-1]])
            key = context * self.vocab_size + tokens
            gram = np.minimum(np.searchsorted(self.keys[k], key), len(self.keys[k]) - 1)
            gram[(context < 0) | (self.keys[k][gram] != key)] = -1

            kept = np.where(gram < 0, 0, counts[gram] - discount[gram])
            seen = (context >= 0) & (total[context] > 0)
            p = np.where(seen, (kept + given_up[context] * p) / np.where(seen, total[context], 1), p)
        return p

    def nats(self, tokens: np.ndarray, order: int, history: np.ndarray) -> float:
        """Mean nats a token of `tokens` that follow `history`."""
        past = history[len(history) - order + 1 :]
        p = self.probabilities(np.concatenate([past, tokens]), order)
        return float(-np.log(p[len(past) :]).mean())


def _discounts(counts: np.ndarray) -> np.ndarray:
    """What a count of 0, 1, 2, and 3 or more gives up."""
    n = [int((counts == i).sum()) for i in range(5)]
    y = n[1] / max(n[1] + 2 * n[2], 1)
    d = [i - (i + 1) * y * n[i + 1] / max(n[i], 1) for i in (1, 2, 3)]
    # small texts give odd counts of counts; every context must give up something, and no count more than it has
    return np.array([0, *(np.clip(each, 0.05, i) for i, each in zip((1, 2, 3), d, strict=True))])


def best_order(train: np.ndarray, vocab_size: int, max_order: int) -> int:
    """The order that does best on the last tenth of the training text when it counts the rest."""
    n_fit = len(train) * 9 // 10
    model = NGram(train[:n_fit], vocab_size, max_order)
    losses = [model.nats(train[n_fit:], order, train[:n_fit]) for order in range(1, max_order + 1)]
    return 1 + int(np.argmin(losses))


def encode(text: str) -> tuple[np.ndarray, int]:
    """Each character as its place in the sorted alphabet of the text, and the size of that alphabet."""
    alphabet, tokens = np.unique(np.array(list(text)), return_inverse=True)
    return tokens, len(alphabet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n-bytes", type=int, default=1_000_000)
    parser.add_argument("--max-order", type=int, default=12)
    args = parser.parse_args()
    tales = generate(n_bytes=args.n_bytes)
    tokens, vocab_size = encode(tales.text)
    n_train = len(tokens) * 9 // 10
    train, val = tokens[:n_train], tokens[n_train:]
    floor = tales.nats[n_train:].mean()
    model = NGram(train, vocab_size, args.max_order)
    best = best_order(train, vocab_size, args.max_order)
    print(
        f"{len(tokens)} characters, {vocab_size} different; entropy floor of the last tenth {floor:.4f} nats"
    )
    print("order  nats/char  above the floor")
    for order in range(1, args.max_order + 1):
        nats = model.nats(val, order, train)
        print(
            f"{order:5}  {nats:9.4f}  {nats - floor:15.4f}{'  <- chosen on training text' * (order == best)}"
        )


if __name__ == "__main__":
    main()
