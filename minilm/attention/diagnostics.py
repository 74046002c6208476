"""Attention observed from outside: where each head reads, and whether its softmax can still learn.

    maps = attention_maps(model, tokens)   # (layer, batch, head, query, key)
    health(model, tokens)                  # {"attention/0/score_std": 1.02, …}

These are diagnostics, not explanations. A weight says how much of a token's value a head mixed in at one place, not
why the model said what it said: quite different weights can give the same output (Jain & Wallace 2019), and what
would make of them an explanation is disputed (Wiegreffe & Pinter 2019).

Nothing is paid while nobody looks, and looking changes nothing: each layer's own kernel still computes its output.
Shapes: B batch, H query heads, G key heads, n queries, m keys, D head width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minilm.attention.cache import KVCache
from minilm.attention.frame import Frame
from minilm.attention.kernels import Reference, repeat_heads
from minilm.attention.layer import Attention, MultiHeadAttention
from minilm.attention.masks import Mask
from minilm.attention.positions import at_least_float32
from minilm.errors import ConfigError

SATURATED = 0.99  # a row is saturated where one key takes more than this


@dataclass(frozen=True)
class Reading:
    """What a layer's softmax was given in one forward pass: q (B, H, n, D), k (B, G, m, D), and who may read whom."""

    layer: int
    q: Tensor
    k: Tensor
    frame: Frame
    mask: Mask
    scale: float

    @property
    def weights(self) -> Tensor:
        """(B, H, n, m), of the reference; keys in the order in which the layer holds them."""
        with torch.autocast(self.q.device.type, enabled=False):
            return Reference().weights(self.q, self.k, self.k, self.frame, mask=self.mask, scale=self.scale)[
                0
            ]

    @property
    def scores(self) -> Tensor:
        """Q Kᵀ · scale, (B, H, n, m): what the scale is there for, before a position bias and the mask."""
        with torch.autocast(self.q.device.type, enabled=False):
            return (self.q * self.scale) @ repeat_heads(self.k, self.q.shape[1]).transpose(-2, -1)

    @property
    def allowed(self) -> Tensor:
        """Who may read whom, bool (1 or B, 1, n, m)."""
        allowed = self.frame.allowed(self.mask)
        return allowed if allowed.dim() == 4 else allowed[None, None]


class Observed:
    """A kernel that notes what it is given, and computes as `kernel` does."""

    def __init__(self, kernel, layer: int, readings: list[Reading]) -> None:
        self.kernel, self.layer, self.readings = kernel, layer, readings

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, *, mask: Mask, scale: float, dropout: float = 0.0
    ) -> Tensor:
        dtype = at_least_float32(q.dtype)  # rows of bf16 weights would not sum to 1
        wide_q, wide_k = q.detach().to(dtype), k.detach().to(dtype)
        self.readings.append(Reading(self.layer, wide_q, wide_k, frame, mask, scale))
        return self.kernel(q, k, v, frame, mask=mask, scale=scale, dropout=dropout)


@contextmanager
def observe(model: nn.Module) -> Iterator[list[Reading]]:
    """Fills the list that it gives with a reading of every layer that has weights, at each forward pass within.

    Passes are made in evaluation mode and without gradients; the model is left as it was.
    """
    readings: list[Reading] = []
    layers = {
        i: layer for i, layer in enumerate(attention_layers(model)) if isinstance(layer, MultiHeadAttention)
    }
    kernels = {i: layer.kernel for i, layer in layers.items()}
    was_training = model.training
    try:
        model.eval()
        for i, layer in layers.items():
            layer.kernel = Observed(kernels[i], i, readings)
        with torch.no_grad():
            yield readings
    finally:
        model.train(was_training)
        for i, layer in layers.items():
            layer.kernel = kernels[i]


def attention_layers(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def attention_maps(
    model: nn.Module, tokens: Tensor, cache: KVCache | None = None, *, pos: Tensor | None = None
) -> Tensor:
    """The weights of one forward pass of `model(tokens, cache, pos=pos)`: (layer, B, H, n, m), float32 or wider.

    Every query's row sums to 1 and is exactly 0 where the mask hides a key; the row of an empty slot is 0. The m
    keys stand in order of position, what the cache held first; the cache is advanced as by any forward pass.
    Raises ConfigError for a model whose layers have no weights to show.
    """
    for i, layer in enumerate(attention_layers(model)):
        if not isinstance(layer, MultiHeadAttention):
            raise ConfigError(
                f"layer {i} is {type(layer).__name__}, which never forms a matrix of weights: "
                "attention maps need a model trained with attention=mha"
            )
    with observe(model) as readings:
        model(tokens.to(next(model.parameters()).device), cache, pos=pos)
    maps = torch.stack([reading.weights for reading in readings])
    order = readings[0].frame.order  # a rolling cache is a ring
    return maps.take_along_dim(order.view(1, -1, 1, 1, order.shape[-1]), dim=-1)


def health(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Four figures a layer over all its heads, of one forward pass over tokens (B, T): two windows are enough.

    attention/<layer>/score_std: standard deviation of the scaled scores (`Reading.scores`), over the pairs that
    the mask allows. It is near 1 where the scale does its work (Vaswani et al. 2017, sec. 3.2.1).
    The others are of the rows that have more than one key to read, and NaN where there is no such row:
    …/entropy: of a row's weights, in nats, the mean over rows; from 0 to the logarithm of the number of keys.
    …/saturated: the share of rows in which one key takes more than 0.99.
    …/gradient: p(1 − p), the softmax's derivative by a key's own score, the mean over allowed pairs.

    A layer that never forms weights has no figures. Draws no random number, and leaves the model as it was.
    """
    if not any(isinstance(layer, MultiHeadAttention) for layer in attention_layers(model)):
        return {}
    with observe(model) as readings:
        model(tokens.to(next(model.parameters()).device))
        return {
            f"attention/{reading.layer}/{name}": float(value)
            for reading in readings
            for name, value in vital_signs(reading).items()
        }


def vital_signs(reading: Reading) -> dict[str, Tensor]:
    """The figures of one layer, as `health` defines them."""
    weights = reading.weights
    allowed = reading.allowed.expand(weights.shape[0], 1, *weights.shape[-2:])
    choosing = allowed.sum(dim=-1) > 1  # (B, 1, n): rows with a choice
    rows = choosing.expand(weights.shape[:-1])
    pairs = (allowed & choosing.unsqueeze(-1)).expand_as(weights)
    return {
        "score_std": reading.scores[allowed.expand_as(weights)].std(correction=0),
        "entropy": torch.special.entr(weights).sum(dim=-1)[rows].mean(),
        "saturated": (weights.amax(dim=-1) > SATURATED)[rows].float().mean(),
        "gradient": (weights * (1 - weights))[pairs].mean(),
    }
