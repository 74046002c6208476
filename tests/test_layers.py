"""Norms and feed-forward layers against their formulas, written out in numpy."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from minilm.errors import ConfigError
from minilm.layers import MLPS, NORMS, Dropout, named, usual_width

C = 24


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def linear(x, layer):
    y = x @ layer.weight.detach().numpy().T
    return y if layer.bias is None else y + layer.bias.detach().numpy()


FORMULAS = {
    "gelu": lambda m, x: linear(gelu(linear(x, m.up)), m.out),
    "gelu_tanh": lambda m, x: linear(gelu_tanh(linear(x, m.up)), m.out),
    "relu2": lambda m, x: linear(np.maximum(linear(x, m.up), 0) ** 2, m.out),
    "swiglu": lambda m, x: linear(silu(linear(x, m.gate)) * linear(x, m.up), m.out),
}


@pytest.mark.parametrize("n_inner", [None, 7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_feed_forward_layer_is_its_formula(name, bias, n_inner):
    torch.manual_seed(0)
    width = n_inner or usual_width(name, C)
    mlp = MLPS[name](C, width, bias).double()
    assert mlp.up.out_features == width
    x = torch.randn(2, 5, C, dtype=torch.float64)
    np.testing.assert_allclose(mlp(x).detach().numpy(), FORMULAS[name](mlp, x.numpy()), atol=1e-12)


def test_every_other_one_adds_nothing():
    assert MLPS.keys() - FORMULAS.keys() == {"none"}
    none = MLPS["none"](C, 40, False)
    assert not list(none.parameters())
    assert not none(torch.randn(2, 5, C)).any()


@pytest.mark.parametrize("n_embd", [64, 128, 384, 768])
def test_all_feed_forward_layers_cost_about_the_same(n_embd):
    sizes = [
        sum(p.numel() for p in MLPS[name](n_embd, usual_width(name, n_embd), False).parameters())
        for name in FORMULAS
    ]
    assert max(sizes) / min(sizes) < 1.05


def test_norms_take_out_scale_and_layernorm_the_mean():
    x = torch.randn(3, C) * torch.tensor([[0.1], [1.0], [50.0]]) + 5
    layer, rms = NORMS["layernorm"](C, False, None)(x), NORMS["rmsnorm"](C, False, None)(x)
    torch.testing.assert_close(rms.square().mean(-1), torch.ones(3))
    torch.testing.assert_close(rms, x / x.square().mean(-1, keepdim=True).sqrt())
    torch.testing.assert_close(layer.mean(-1), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(layer.var(-1, correction=0), torch.ones(3), atol=2e-2, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*FORMULAS, *NORMS])
def test_there_are_biases_only_where_they_are_asked_for(name, bias):
    layer = MLPS[name](C, 40, bias) if name in MLPS else NORMS[name](C, bias, None)
    assert isinstance(layer, nn.Module)
    has = any(key.endswith("bias") for key, _ in layer.named_parameters())
    assert has == (bias and name not in ("rmsnorm", "none"))


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"model.mlp=relu: expected one of gelu, gelu_tanh, relu2, swiglu"):
        named("model.mlp", "relu", MLPS)


def test_dropout_drops_its_share_and_keeps_the_mean():
    torch.manual_seed(0)
    layer, ones = Dropout(0.2), torch.ones(1000, 1000)
    kept = layer(ones)
    assert kept.unique().tolist() == [0.0, pytest.approx(1.25, rel=1e-4)]
    share = (kept == 0).double().mean().item()
    assert abs(share - 0.2) < 5 * (0.2 * 0.8 / ones.numel()) ** 0.5  # five standard deviations
    assert kept.mean().item() == pytest.approx(1, abs=2e-3)
    columns = (kept == 0).double().mean(0)  # each place of a word of random bits drops as often
    assert max(abs(columns[i::4].mean().item() - 0.2) for i in range(4)) < 4e-3


@pytest.mark.parametrize("p", [0.0, 1e-9, 2**-17, 2**-16, 1 - 2**-16, 1 - 2**-17, 0.99999237, 1 - 1e-9, 1.0])
def test_dropout_of_next_to_nothing_or_to_all_is_its_share_too(p):
    torch.manual_seed(0)
    y = Dropout(p)(torch.ones(1 << 16))
    dropped = (y == 0).double().mean().item()
    assert abs(dropped - p) < 1e-4  # seven of 65,536
    assert y.isfinite().all()
    assert not dropped or dropped == 1 or 0.5 < y.max().item() * (1 - p) < 2  # p is rounded to 2⁻¹⁶


def test_dropout_drops_the_gradient_with_the_element_and_nothing_in_evaluation():
    layer, x = Dropout(0.5), torch.randn(7, 33, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, x * x.grad)
    assert torch.equal(layer.eval()(x), x)
    torch.manual_seed(0)
    assert torch.equal(layer.train()(x), y)  # drawn from the global generator
