"""Muon: momentum, orthogonalised (Jordan et al. 2024). The steps of torch.optim.Muon, many matrices at a time."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minilm.parallel import is_sharded, part, whole

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that drives singular values towards 1 fastest


class BatchedMuon(Optimizer):
    """For matrices. One step goes along the nearest orthogonal matrix to each one's Nesterov momentum.

    Its rate is scaled so that an update has the root mean square of AdamW's (Liu et al. 2025). Matrices of one
    shape, or its transpose, are orthogonalised together: small ones cost what one does. One that lies in parts in
    several processes is put together for its step, one at a time.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            grads = [p.grad for p in params]
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            for alike in by_shape(params):
                steps = [grads[i].lerp(buffers[i], group["momentum"]) for i in alike]
                wide = torch.stack([flat(whole(step)) for step in steps])
                scale = group["lr"] * 0.2 * max(wide.shape[-2:]) ** 0.5
                for i, update in zip(alike, orthogonalise(wide), strict=True):
                    params[i].sub_(part(upright(update, params[i]), like=params[i]), alpha=scale)


def flat(x: Tensor) -> Tensor:
    """The matrix or its transpose, whichever is no higher than wide."""
    return x.mT if x.shape[0] > x.shape[1] else x


def upright(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `flat`."""
    return x.mT if like.shape[0] > like.shape[1] else x


def by_shape(params: list[nn.Parameter]) -> list[list[int]]:
    """Numbers of the matrices, those of one shape or its transpose together; one in parts is alone."""
    groups: dict[tuple, list[int]] = {}
    for i, p in enumerate(params):
        groups.setdefault((*sorted(p.shape), p.dtype, i if is_sharded(p) else None), []).append(i)
    return list(groups.values())


def orthogonalise(x: Tensor) -> Tensor:
    """(N, a, b), a ≤ b -> the same singular vectors with singular values near 1, by a Newton–Schulz iteration.

    In bf16, which is enough for it; a float64 matrix stays what it is.
    """
    a, b, c = COEFFICIENTS
    x = x if x.dtype == torch.float64 else x.bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b · A + c · A²
        x = torch.baddbmm(x, gram, x, beta=a)
    return x
