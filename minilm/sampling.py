"""Logits to the next token.

Shapes: B rows, V tokens of the vocabulary, L tokens already in the text.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minilm.attention.positions import at_least_float32
from minilm.errors import ConfigError


@dataclass(frozen=True)
class Sampler:
    """How a token is drawn. Applied in this order, each to what the one before has left:

    repetition_penalty  divides the logits of seen tokens where positive, multiplies them where negative
                        (Keskar et al. 2019, section 4.1, whose division would reward negative ones); 1 = off
    temperature         divides the logits; 0 = greedy: the likeliest token, the lowest id among equals
    top_k               the k likeliest tokens, never more: among equals the lower ids; 0 or None = off
    top_p               the smallest set of likeliest tokens whose mass reaches p, and at least one token: 0.5
                        keeps a token of mass 0.5 alone (Holtzman et al. 2020); 1 or None = off
    min_p               tokens with at least min_p times the mass of the likeliest (Nguyen et al. 2024);
                        0 or None = off

    What is left is renormalised. No row depends on another. Raises ConfigError for a value that is not legal.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        def check(key: str, legal: bool, right: str) -> None:
            if not legal:
                raise ConfigError(f"{key}={getattr(self, key)!r} must be {right}")

        k, penalty = self.top_k, self.repetition_penalty
        check("temperature", _within(self.temperature, 0), "a number >= 0 (0 = greedy)")
        check("top_k", k is None or (type(k) is int and k >= 0), "a whole number >= 0 (0 or null = off)")
        check("top_p", self.top_p is None or _within(self.top_p, 0, 1), "from 0 to 1 (1 or null = off)")
        check("min_p", self.min_p is None or _within(self.min_p, 0, 1), "from 0 to 1 (0 or null = off)")
        check("repetition_penalty", _within(penalty, 0) and penalty != 0, "a number > 0 (1 = off)")

    def __call__(
        self, logits: Tensor, seen: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """A token a row: (B, V) -> (B,) int64. Greedy draws no random number.

        seen and errors as in `probabilities`; generator: on the device of the logits.
        """
        if self.temperature == 0:
            logits = self._penalised(logits, seen)
            _check_finite(logits.amax(-1))
            return likeliest(logits)
        probabilities = self.probabilities(logits, seen)
        # A race of exponential clocks, as in torch.multinomial; but that has returned ids outside the
        # vocabulary on some devices, which an argmax cannot.
        clocks = torch.empty_like(probabilities).exponential_(generator=generator)
        return likeliest(probabilities / clocks.clamp_min_(torch.finfo(clocks.dtype).tiny))

    def probabilities(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """The distribution drawn from: (B, V) -> (B, V), in float32, or float64 if the logits are.

        seen: (B, L) int64, the tokens that count as repeated, -1 where a row has fewer.
        Raises ConfigError for a row that is no distribution: NaN, +inf, or nothing but -inf.
        """
        logits = self._penalised(logits, seen)
        largest = logits.amax(-1)
        _check_finite(largest)
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(1, likeliest(logits).unsqueeze(1), 1.0)
        # the maximum first, and the temperature within what float32 holds, so that nothing becomes NaN
        logits = (logits - largest.unsqueeze(1)) / min(max(self.temperature, 1e-30), 1e30)
        V = logits.shape[1]
        top_k = min(self.top_k or V, V)
        top_p = 1 if self.top_p is None else self.top_p
        min_p = self.min_p or 0
        if top_k == V and top_p == 1 and min_p == 0:
            return logits.softmax(-1)

        ranked, ids = _largest(logits, top_k)
        p = ranked.softmax(-1)  # (B, k)
        keep = p >= min_p * p[:, :1]
        if top_p < 1:
            mass_before = p.cumsum(-1).roll(1, -1)
            # reached, up to the rounding of float32: 0.5 + 0.3 must count as 0.8
            keep &= mass_before < top_p * (1 - 1e-6)
        keep[:, 0] = True
        p = p * keep
        return torch.zeros_like(logits).scatter_(1, ids, p / p.sum(-1, keepdim=True))

    def _penalised(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        logits = logits.to(at_least_float32(logits.dtype))
        if seen is not None and self.repetition_penalty != 1:
            B, V = logits.shape
            columns = torch.where(seen < 0, V, seen)  # -1 -> a spare column
            repeated = torch.zeros(B, V + 1, device=logits.device).scatter_(1, columns, 1)[:, :V] == 1
            penalty = self.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(repeated, penalised, logits)
        return logits


def likeliest(logits: Tensor) -> Tensor:
    """The id of the largest of each row, the lowest among equals: (B, V) -> (B,)."""
    if logits.device.type == "cpu":  # NumPy's is several times as fast as torch's
        return torch.from_numpy(logits.detach().numpy().argmax(-1))
    return logits.argmax(-1)


def _check_finite(largest: Tensor) -> None:
    """largest: (B,) of each row; NaN where there is one"""
    for row, value in enumerate(largest.tolist()):
        if not math.isfinite(value):
            raise ConfigError(
                f"cannot draw a token: the largest logit of row {row} is {value}; "
                "the model has diverged, or every token is ruled out"
            )


def _largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their ids, (B, V) -> (B, k) twice: in descending order, equals by id."""
    if k == logits.shape[1]:
        return logits.sort(dim=-1, descending=True, stable=True)
    # topk is far faster than sorting a large vocabulary, but which of equals it takes may depend on the batch
    last = logits.topk(k).values[:, -1:]
    above, equal = logits > last, logits == last
    keep = above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))  # exactly k a row
    ids = keep.nonzero()[:, 1].view(-1, k)
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _within(value: Any, low: float, high: float = math.inf) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and low <= value <= high and value < math.inf  # never true of NaN
