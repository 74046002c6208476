"""The loss of a whole text, in order: the same tokens for every model, whatever the batch size."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minilm.attention.positions import at_least_float32
from minilm.data import Tokens
from minilm.model import GPT
from minilm.parallel import ALONE, World
from minilm.runtime import inference


def evaluate(
    model: GPT,
    tokens: Tokens,
    *,
    block_size: int,
    batch_size: int,
    stride: int | None = None,
    autocast: AbstractContextManager | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
    world: World = ALONE,
) -> float:
    """Mean nats per token of `tokens` (N,), each but the first predicted once.

    The text is cut into windows of block_size, so a token sees what stands before it in its own window; see `windows`
    for `stride`. Sums are made in float64 and weighted by token, so the batch size does not matter. Draws no random
    number. progress: called with the windows done and those there are.
    """
    device = next(model.parameters()).device
    total, count, done = 0.0, 0, 0
    all_windows = whole_windows(len(tokens), block_size, stride or block_size) + 1
    with inference(model), autocast or nullcontext():
        batches = windows(tokens, block_size, batch_size, stride)
        while turn := list(islice(batches, world.size)):
            # all read at the same time: a process for which no batch is left reads the last once more, and counts none
            inputs, targets = turn[min(world.rank, len(turn) - 1)]
            logits = model(inputs.to(device))
            logits = logits.to(at_least_float32(logits.dtype))
            targets = model.hide_leaks(targets).to(device).flatten()
            losses = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-1, reduction="none")
            if world.rank < len(turn):
                total += losses.double().sum().item()
                count += int((targets >= 0).sum())
            done += sum(len(inputs) for inputs, _ in turn)
            progress(done, all_windows)
    return world.sum(total) / world.sum(count)


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats per token; a float64 ends at e^709."""
    return float(np.exp(min(loss, 700)))


def windows(
    tokens: Tokens, block_size: int, batch_size: int, stride: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets (B, T) of consecutive windows; the last one may be shorter.

    Each begins `stride` tokens (None: block_size) after the one before. Where they overlap, the targets that stood in
    the one before are -1, and what stood there is context: every token is a target once.
    """
    stride = stride or block_size
    whole = whole_windows(len(tokens), block_size, stride)
    again = block_size - stride  # targets of a window that stood in the one before
    for first in range(0, whole, batch_size):
        starts = np.arange(first, min(first + batch_size, whole)) * stride
        rows = torch.from_numpy(tokens[starts[:, None] + np.arange(block_size + 1)].astype(np.int64))
        targets = rows[:, 1:]
        if again:
            targets = targets.clone()
            targets[1 if first == 0 else 0 :, :again] = -1
        yield rows[:, :-1], targets
    covered = (whole - 1) * stride + block_size if whole else 0
    if covered < len(tokens) - 1:
        rest = torch.from_numpy(tokens[whole * stride :].astype(np.int64))
        targets = rest[1:].clone()
        targets[: covered - whole * stride] = -1
        yield rest[None, :-1], targets[None]


def whole_windows(n: int, block_size: int, stride: int) -> int:
    """How many windows with all their targets n tokens hold."""
    return (n - 1 - block_size) // stride + 1 if n > block_size else 0
