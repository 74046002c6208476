"""Muon by the batch takes the steps of torch's, matrix by matrix."""

import pytest
import torch
from torch import nn

from minilm.muon import BatchedMuon, orthogonalise

SHAPES = [(16, 16), (16, 16), (64, 16), (16, 64), (8, 16), (16, 64)]


def weights(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def train(optimizer, params, steps):
    for step in range(steps):
        torch.manual_seed(step)
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()


def test_the_steps_are_those_of_torch():
    ours, theirs = weights(), weights()
    train(BatchedMuon(ours, lr=0.02, momentum=0.9, weight_decay=0.1), ours, 4)
    reference = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    train(reference, theirs, 4)
    for a, b in zip(ours, theirs, strict=True):
        # both orthogonalise in bf16, which rounds by 2⁻⁸, perhaps in another order
        torch.testing.assert_close(a, b, rtol=0, atol=0.02 * 4 * 2**-7)


def test_what_it_remembers_goes_on():
    whole, broken = weights(), weights()
    train(BatchedMuon(whole, 0.02, 0.9, 0.0), whole, 3)
    first = BatchedMuon(broken, 0.02, 0.9, 0.0)
    train(first, broken, 2)
    second = BatchedMuon(broken, 0.02, 0.9, 0.0)
    second.load_state_dict(first.state_dict())
    torch.manual_seed(2)
    for p in broken:
        p.grad = torch.randn_like(p)
    second.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, broken, strict=True))


def test_a_matrix_without_a_gradient_stays():
    params = weights()
    before = params[0].detach().clone()
    params[1].grad = torch.ones_like(params[1])
    BatchedMuon(params, 0.02, 0.9, 0.1).step()
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_values_come_near_one_and_directions_stay(dtype):
    torch.manual_seed(0)
    x = torch.randn(3, 8, 20, dtype=dtype)
    out = orthogonalise(x)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
    values = torch.linalg.svdvals(out.double())
    assert values.min() > 0.5
    assert values.max() < 1.3
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    across = u.mT @ out.double() @ v.mT  # in the basis of x's own singular vectors: diagonal
    off = across - torch.diag_embed(across.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < (1e-10 if dtype == torch.float64 else 0.05)
