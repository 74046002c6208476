"""The step of an update: of all optimizers or of none."""

import math
from itertools import product

import pytest
import torch

from minilm.muon import BatchedMuon
from minilm.update import step


def make(fp16):
    """Two matrices, each with an optimizer of its own that has stepped once, and a scaler, off without fp16."""
    torch.manual_seed(0)
    first, second = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    optimizers = [
        BatchedMuon([first], lr=0.1, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW([second], lr=0.1, fused=True),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=fp16)
    go((first, second), optimizers, scaler)
    return (first, second), optimizers, scaler


def go(parameters, optimizers, scaler, *, limit=1.0, loss=1.0, spoil=(0, 1.0)):
    """A step along gradients of ones; of one parameter, by its number, an element has the other worth."""
    for number, p in enumerate(parameters):
        p.grad = scaler.scale(torch.ones_like(p))
        if number == spoil[0]:
            p.grad[1, 2] *= spoil[1]
    return step(optimizers, parameters, scaler, limit, loss=loss)


def remembered(parameters, optimizers):
    states = [optimizer.state[p] for p, optimizer in zip(parameters, optimizers, strict=True)]
    return [*(p.detach().clone() for p in parameters), *(v.clone() for s in states for v in s.values())]


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize(
    ("loss", "spoil"), [*product([1.0], product([0, 1], [math.nan, math.inf])), (math.nan, (0, 1.0))]
)
def test_what_is_not_finite_in_one_place_moves_nothing_and_is_forgotten(fp16, limit, loss, spoil):
    parameters, optimizers, scaler = make(fp16)
    before = remembered(parameters, optimizers)
    norm = go(parameters, optimizers, scaler, limit=limit, loss=loss, spoil=spoil)
    assert math.isfinite(norm) == math.isnan(loss)
    assert all(map(torch.equal, remembered(parameters, optimizers), before))
    assert all(p.grad is None for p in parameters)
    assert scaler.get_scale() == (
        1.0 if not fp16 else 8.0 if math.isnan(loss) else 4.0
    )  # half, after an overflow


@pytest.mark.parametrize("fp16", [False, True])
def test_after_an_overflow_all_go_on(fp16):
    parameters, optimizers, scaler = make(fp16)
    go(parameters, optimizers, scaler, spoil=(1, math.inf))
    before = remembered(parameters, optimizers)
    assert go(parameters, optimizers, scaler) == pytest.approx(math.sqrt(32))
    assert not any(map(torch.equal, remembered(parameters, optimizers), before))
