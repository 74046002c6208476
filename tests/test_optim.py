"""Every parameter in one group, decay where it belongs, and steps worked by hand."""

import copy
import math

import numpy as np
import pytest
import torch

from minilm.attention import Learned, Rotary
from minilm.errors import ConfigError
from minilm.model import GPT, GPTConfig
from minilm.optim import AdamW, Muon, load_states

KINDS = pytest.mark.parametrize("optim", [AdamW(), AdamW(decay_embeddings=True), Muon()], ids=str)


def model(*, tied=False, classic=False):
    torch.manual_seed(0)
    style = {"norm": "layernorm", "mlp": "gelu", "bias": True} if classic else {"mlp": "swiglu"}
    config = GPTConfig(
        vocab_size=30, block_size=8, n_layer=2, n_head=2, n_embd=16, tie_embeddings=tied, **style
    )
    return GPT(config, position=Learned(n_embd=16, block_size=8) if classic else Rotary(head_dim=8))


def groups(optimizers):
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def names(model, parameters):
    known = {id(p): name for name, p in model.named_parameters()}
    return {known[id(p)] for p in parameters}


@KINDS
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("classic", [False, True])
def test_every_trainable_parameter_is_in_one_group(optim, tied, classic):
    net = model(tied=tied, classic=classic)
    net.blocks[0].attention.query.weight.requires_grad_(False)
    held = [id(p) for group in groups(optim.build(net)) for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in net.parameters() if p.requires_grad)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("embeddings", [False, True])
def test_adamw_decays_matrices_and_embeddings_only_where_asked(tied, embeddings):
    net = model(tied=tied, classic=True)
    optimizers = AdamW(weight_decay=0.1, decay_embeddings=embeddings).build(net)
    decayed = names(net, [p for g in groups(optimizers) if g["weight_decay"] for p in g["params"]])
    tables = {"embedding.weight", "position.table.weight"}
    matrices = {name for name, p in net.named_parameters() if p.dim() == 2} - tables
    assert decayed == (matrices | tables if embeddings else matrices)
    assert ("head.weight" in decayed) == (not tied)


@pytest.mark.parametrize("tied", [False, True])
def test_muon_turns_and_decays_the_matrices_inside_the_blocks_alone(tied):
    net = model(tied=tied, classic=True)
    muon, adamw = Muon(weight_decay=0.1).build(net)
    inside = {name for name, p in net.named_parameters() if name.startswith("blocks") and p.dim() == 2}
    assert names(net, [p for g in muon.param_groups for p in g["params"]]) == inside
    assert {g["weight_decay"] for g in muon.param_groups} == {0.1}
    assert {g["weight_decay"] for g in adamw.param_groups} == {0.0}


@KINDS
def test_a_parameter_of_three_dimensions_is_adamws_and_decays(optim):
    net = model()
    stack = net.blocks[0].stack = torch.nn.Parameter(torch.ones(3, 4, 5))
    net.scalar = torch.nn.Parameter(torch.tensor(1.0))
    optimizers = optim.build(net)
    held = [id(p) for group in groups(optimizers) for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in net.parameters())
    stepped(net, optimizers)  # Muon multiplies matrices
    assert not torch.equal(stack, torch.ones(3, 4, 5))
    [group] = [g for g in groups(optimizers[-1:]) if any(p is stack for p in g["params"])]
    assert group["weight_decay"] == optim.weight_decay > 0
    [group] = [g for g in groups(optimizers) if any(p is net.scalar for p in g["params"])]
    assert group["weight_decay"] == 0


def test_the_rates_are_those_that_were_asked_for():
    muon, adamw = Muon(lr=0.02, adam_lr=0.004, betas=(0.8, 0.9), eps=1e-7, momentum=0.7).build(model())
    assert [g["lr"] for g in muon.param_groups + adamw.param_groups] == [0.02, 0.004]
    assert muon.param_groups[0]["momentum"] == 0.7
    assert adamw.param_groups[0]["betas"] == (0.8, 0.9)
    assert adamw.param_groups[0]["eps"] == 1e-7


def test_adamw_steps_as_worked_by_hand():
    net = model().double()
    (optimizer,) = AdamW(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1).build(net)
    watched = {"head.weight": 0.1, "embedding.weight": 0.0, "norm.weight": 0.0}
    weights = {name: p for name, p in net.named_parameters() if name in watched}
    expected = {name: p.detach().numpy().copy() for name, p in weights.items()}
    m = {name: np.zeros_like(w) for name, w in expected.items()}
    v = {name: np.zeros_like(w) for name, w in expected.items()}
    for t in (1, 2, 3):
        for p in net.parameters():
            p.grad = torch.randn(p.shape, dtype=p.dtype)
        for name, decay in watched.items():  # Loshchilov & Hutter 2019, algorithm 2
            g = weights[name].grad.numpy()
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.9 * v[name] + 0.1 * g**2
            step = (m[name] / (1 - 0.8**t)) / (np.sqrt(v[name] / (1 - 0.9**t)) + 1e-6)
            expected[name] = expected[name] - 0.01 * decay * expected[name] - 0.01 * step
        optimizer.step()
    for name, w in weights.items():
        np.testing.assert_allclose(w.detach().numpy(), expected[name], atol=1e-12)


def test_muon_steps_along_an_orthogonal_matrix_as_far_as_adamw_would():
    net = model()
    muon, _ = Muon(lr=0.01, weight_decay=0.0).build(net)
    weights = muon.param_groups[0]["params"]
    before = [p.detach().clone() for p in weights]
    for p in weights:
        p.grad = torch.randn_like(p)
    muon.step()
    for p, old in zip(weights, before, strict=True):
        update = (p.detach() - old) / 0.01
        s = torch.linalg.svdvals(update)
        # five Newton-Schulz steps bring all singular values near to one another, not quite together
        assert s.min() / s.max() > 0.4
        assert update.square().mean().sqrt().item() == pytest.approx(0.2, abs=0.06)
        assert (update * p.grad).sum() < 0  # downhill


# ---- going on with an earlier run ----


def stepped(net, optimizers):
    torch.manual_seed(1)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    for optimizer in optimizers:
        optimizer.step()
    return copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])


@KINDS
def test_a_loaded_state_goes_on_as_if_unbroken(optim):
    net, other = model(), model()
    optimizers = optim.build(net)
    states = stepped(net, optimizers)
    other.load_state_dict(net.state_dict())
    resumed = optim.build(other)
    load_states(resumed, states)
    stepped(net, optimizers), stepped(other, resumed)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_rates_and_decay_are_those_of_the_new_command_line():
    states = stepped(net := model(), Muon().build(net))
    changed = Muon(lr=1.0, momentum=0.5, weight_decay=0.3, adam_lr=2.0, betas=(0.1, 0.2)).build(net)
    load_states(changed, states)
    muon, adamw = (optimizer.param_groups[0] for optimizer in changed)
    assert (muon["lr"], muon["momentum"], muon["weight_decay"]) == (1.0, 0.5, 0.3)
    assert (adamw["lr"], adamw["betas"]) == (2.0, (0.1, 0.2))


@pytest.mark.parametrize(
    ("then", "now"),
    [(Muon(), AdamW()), (AdamW(), Muon()), (AdamW(), AdamW(decay_embeddings=True))],
    ids=lambda optim: type(optim).__name__,
)
def test_the_state_of_another_optimizer_is_refused(then, now):
    net = model()
    states = stepped(net, then.build(net))
    with pytest.raises(ConfigError, match="a resumed run may change its rates, but not which optimizer"):
        load_states(now.build(net), states)


# ---- refusals ----


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"lr": math.nan},
        {"lr": math.inf},
        {"weight_decay": -0.1},
        {"eps": -1e-8},
        {"eps": math.nan},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.9)},
        {"betas": (math.nan, 0.9)},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_a_rate_that_makes_no_sense_is_refused_by_key(kind, options):
    with pytest.raises(ConfigError, match=rf"optim\.{next(iter(options))}"):
        kind(**options)


@pytest.mark.parametrize("options", [{"momentum": 1.0}, {"momentum": -0.1}, {"adam_lr": -1.0}], ids=str)
def test_muon_has_rates_of_its_own_to_refuse(options):
    with pytest.raises(ConfigError, match=rf"optim\.{next(iter(options))}"):
        Muon(**options)
