"""A packed weight gives the numbers of the weight as it is now, for as long as it lives."""

import gc

import pytest
import torch
import torch.nn.functional as F

from minilm import decoding, packed
from minilm.packed import can_pack, packed_linear

CLOSE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (8e-3, 1e-2)}  # rtol, atol


def made(dtype, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture(params=CLOSE, ids=str)
def dtype(request):
    if not can_pack(torch.empty(1, 1, dtype=request.param)):
        pytest.skip(f"this processor's library multiplies no {request.param}")
    return request.param


def assert_same_product(x, weight, bias=None):
    rtol, atol = CLOSE[weight.dtype]
    told = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(packed_linear(x, weight, bias).double(), told, rtol=rtol, atol=atol)


@pytest.mark.parametrize("lead", [(1, 1), (5, 1), (2, 3), (33,)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_product(lead, bias, dtype):
    assert_same_product(made(dtype, *lead, 48), made(dtype, 31, 48), made(dtype, 31) if bias else None)


def test_rows_that_do_not_lie_side_by_side(dtype):
    assert_same_product(made(dtype, 4, 3, 48)[:, -1:], made(dtype, 31, 48))


def test_a_weight_changed_in_place_is_packed_anew(dtype):
    x, weight = made(dtype, 3, 48), made(dtype, 31, 48)
    assert_same_product(x, weight)
    for change in (
        lambda: weight.mul_(-2),
        lambda: weight[4:9].zero_(),
        lambda: weight.copy_(made(dtype, 31, 48)),
    ):
        change()
        assert_same_product(x, weight)
    weight.data = made(dtype, 31, 48) + 1
    assert_same_product(x, weight)


def test_what_was_packed_goes_with_its_weight(dtype):
    before, weight = len(packed._kept), made(dtype, 31, 48)
    packed_linear(made(dtype, 3, 48), weight)
    assert len(packed._kept) == before + 1
    del weight
    gc.collect()
    assert len(packed._kept) == before


def test_doubles_are_not_packed():
    assert not can_pack(torch.empty(1, 1, dtype=torch.float64))


def test_only_weights_that_stay_are_packed(monkeypatch, dtype):
    """A weight that a step computes would be packed at each one."""
    monkeypatch.setattr(decoding, "LARGE", 1)
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options=None: graph)
    seen = []
    monkeypatch.setattr(
        decoding, "packed_linear", lambda x, w, b=None: (seen.append(w), F.linear(x, w, b))[1]
    )
    stays, x = made(dtype, 31, 48), made(dtype, 3, 48)
    torch._dynamo.reset()
    torch.compile(lambda x, w: F.linear(x, w) + F.linear(x, w * 2), backend=decoding.by_sums)(x, stays)
    assert len(seen) == 1
    assert torch.equal(seen[0], stays)
