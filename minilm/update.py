"""One update: the gradient of a batch, and the step of all optimizers along it. It knows nothing of a trainer."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from minilm.attention.positions import at_least_float32
from minilm.parallel import ALONE, World, whole
from minilm.runtime import autocast


def gradients(
    forward: Callable[[Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    windows: int,
    precision: str,
    scaler: torch.amp.GradScaler,
    world: World = ALONE,
    hold: Callable[[], AbstractContextManager] = nullcontext,
) -> float:
    """The mean loss in nats per token; its gradient, times the scaler's factor, is added to the parameters'.

    inputs, targets: (B, T), of which `windows` rows at a time are in memory; a target of −1 does not count. They are
    this process's part of the batch; the mean is over all parts. hold: a context for all pieces but the last,
    whose gradients may wait for it.
    """
    counted = world.sum(int((targets >= 0).sum()))
    mean = counted / world.size  # processes average their gradients, which are to be summed
    total = torch.zeros((), device=inputs.device)
    pieces = list(zip(inputs.split(windows), targets.split(windows), strict=True))
    for i, (x, y) in enumerate(pieces, start=1):
        with hold() if i < len(pieces) else nullcontext():
            with autocast(inputs.device, precision):
                logits = forward(x)
            logits = logits.to(at_least_float32(logits.dtype)).flatten(0, 1)
            loss = F.cross_entropy(logits, y.flatten(), ignore_index=-1, reduction="sum")
            scaler.scale(loss / mean).backward()
        total += loss.detach()
    return world.sum(float(total)) / counted


def step(
    optimizers: list[Optimizer],
    parameters: Iterable[nn.Parameter],
    scaler: torch.amp.GradScaler,
    limit: float | None,
    *,
    loss: float = 0.0,
) -> float:
    """Clip the gradient to a norm of `limit` (None: as it is), step and forget it; returns the norm it had.

    A gradient or a `loss` that is not finite moves nothing, whichever optimizer it belongs to: one that stepped alone
    would make another model, and on clipped gradients of zero momentum alone. The scaler lowers its factor.
    """
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = float(whole(nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)))
    good = np.isfinite(loss) and np.isfinite(norm)
    for optimizer in optimizers:
        if good:
            scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    return norm
