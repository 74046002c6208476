"""Norms and feed-forward layers against their formulas, written out in numpy."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from minilm.errors import ConfigError
from minilm.layers import MLPS, NORMS, named

C = 24


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def silu(x):
    return x / (1 + np.exp(-x))


def linear(x, layer):
    y = x @ layer.weight.detach().numpy().T
    return y if layer.bias is None else y + layer.bias.detach().numpy()


FORMULAS = {
    "gelu": lambda m, x: linear(gelu(linear(x, m.up)), m.out),
    "relu2": lambda m, x: linear(np.maximum(linear(x, m.up), 0) ** 2, m.out),
    "swiglu": lambda m, x: linear(silu(linear(x, m.gate)) * linear(x, m.up), m.out),
}


@pytest.mark.parametrize("n_inner", [None, 7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_feed_forward_layer_is_its_formula(name, bias, n_inner):
    torch.manual_seed(0)
    mlp = MLPS[name](C, bias, n_inner).double()
    assert mlp.up.out_features == n_inner or n_inner is None
    x = torch.randn(2, 5, C, dtype=torch.float64)
    np.testing.assert_allclose(mlp(x).detach().numpy(), FORMULAS[name](mlp, x.numpy()), atol=1e-12)


def test_every_other_one_adds_nothing():
    assert MLPS.keys() - FORMULAS.keys() == {"none"}
    none = MLPS["none"](C, False)
    assert not list(none.parameters())
    assert not none(torch.randn(2, 5, C)).any()


@pytest.mark.parametrize("n_embd", [64, 128, 384, 768])
def test_all_feed_forward_layers_cost_about_the_same(n_embd):
    sizes = [sum(p.numel() for p in MLPS[name](n_embd, False).parameters()) for name in FORMULAS]
    assert max(sizes) / min(sizes) < 1.05


def test_norms_take_out_scale_and_layernorm_the_mean():
    x = torch.randn(3, C) * torch.tensor([[0.1], [1.0], [50.0]]) + 5
    layer, rms = NORMS["layernorm"](C, False)(x), NORMS["rmsnorm"](C, False)(x)
    torch.testing.assert_close(rms.square().mean(-1), torch.ones(3))
    torch.testing.assert_close(rms, x / x.square().mean(-1, keepdim=True).sqrt())
    torch.testing.assert_close(layer.mean(-1), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(layer.var(-1, correction=0), torch.ones(3), atol=2e-2, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*FORMULAS, *NORMS])
def test_there_are_biases_only_where_they_are_asked_for(name, bias):
    layer = (MLPS | NORMS)[name](C, bias)
    assert isinstance(layer, nn.Module)
    has = any(key.endswith("bias") for key, _ in layer.named_parameters())
    assert has == (bias and name != "rmsnorm")


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"model.mlp=relu: expected one of gelu, relu2, swiglu"):
        named("model.mlp", "relu", MLPS)
