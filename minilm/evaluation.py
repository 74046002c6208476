"""The loss of a whole text, in order: the same tokens for every model, whatever the batch size."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minilm.model import GPT
from minilm.runtime import inference


def evaluate(
    model: GPT,
    tokens: np.ndarray,
    *,
    block_size: int,
    batch_size: int,
    autocast: AbstractContextManager | None = None,
) -> float:
    """Mean nats per token of `tokens` (N,), each but the first predicted once.

    The text is cut into windows of block_size, so a token sees what stands before it in its own window. Sums are
    made in float64 and weighted by token, so the batch size does not matter. Draws no random number.
    """
    device = next(model.parameters()).device
    total, count = 0.0, 0
    with inference(model), autocast or nullcontext():
        for inputs, targets in windows(tokens, block_size, batch_size):
            logits = at_least_float32(model(inputs.to(device)))
            targets = model.hide_leaks(targets).to(device).flatten()
            losses = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-1, reduction="none")
            total += losses.double().sum().item()
            count += int((targets >= 0).sum())
    return total / count


def at_least_float32(x: Tensor) -> Tensor:
    """Losses and their sums are made in float32, or float64 where the model is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def windows(tokens: np.ndarray, block_size: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets (B, T) of consecutive windows; the last one may be shorter."""
    whole = (len(tokens) - 1) // block_size * block_size
    step = block_size * batch_size
    for start in range(0, whole, step):
        piece = torch.from_numpy(tokens[start : min(start + step, whole) + 1].astype(np.int64))
        yield piece[:-1].view(-1, block_size), piece[1:].view(-1, block_size)
    if whole < len(tokens) - 1:
        rest = torch.from_numpy(tokens[whole:].astype(np.int64))
        yield rest[None, :-1], rest[None, 1:]
