"""The validation loss: each token once, whatever the batch, and nothing else moves."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm.attention import Causal, Full, MultiHeadAttention, Prefix
from minilm.evaluation import evaluate, windows
from minilm.model import GPT, GPTConfig

V, T = 23, 8


def model(mask=Causal(), dropout=0.0):  # noqa: B008 (frozen)
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=V, block_size=T, n_layer=1, n_head=2, n_embd=16, dropout=dropout)
    net = GPT(config, attention=lambda: MultiHeadAttention(16, n_head=2, mask=mask, dropout=dropout)).double()
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return net


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(0, V, n).astype(np.uint8)


@settings(deadline=None)  # a busy machine
@given(st.integers(2, 200), st.integers(1, 12), st.integers(1, 9))
def test_each_token_but_the_first_is_a_target_once_and_in_order(n, block_size, batch_size):
    text = np.arange(n, dtype=np.uint16)
    inputs, targets = zip(*windows(text, block_size, batch_size), strict=True)
    assert torch.cat([t.flatten() for t in targets]).tolist() == list(range(1, n))
    assert torch.cat([x.flatten() for x in inputs]).tolist() == list(range(n - 1))
    assert all(x.shape[0] <= batch_size and x.shape[1] <= block_size for x in inputs)


@pytest.mark.parametrize("mask", [Causal(), Full(), Prefix(4)], ids=str)
@pytest.mark.parametrize("n", [2, 5, 9, 100, 103])
def test_the_loss_is_the_mean_over_the_text_one_window_at_a_time(mask, n):
    net, text, nats = model(mask), torch.from_numpy(tokens(n).astype(np.int64)), []
    for start in range(0, n - 1, T):
        window = text[start : start + T + 1]
        logits = net(window[None, :-1])[0]
        for i, target in enumerate(window[1:]):
            if not (isinstance(mask, Prefix) and i + 1 < mask.length):  # where the model reads its target
                nats.append((logits[i].logsumexp(-1) - logits[i, target]).item())
    if nats:
        loss = evaluate(net, tokens(n), block_size=T, batch_size=3)
        assert loss == pytest.approx(sum(nats) / len(nats), abs=1e-12)


def test_the_batch_size_does_not_matter():
    net, text = model(dropout=0.5), tokens(203)
    losses = {evaluate(net, text, block_size=T, batch_size=b) for b in (1, 3, 8, 64)}
    assert max(losses) - min(losses) < 1e-12
    net.float()
    losses = {evaluate(net, text, block_size=T, batch_size=b) for b in (1, 3, 8, 64)}
    assert max(losses) - min(losses) < 1e-6


def test_a_model_that_knows_nothing_is_worth_ln_v():
    net = model()
    torch.nn.init.zeros_(net.head.weight)
    assert evaluate(net, tokens(50), block_size=T, batch_size=4) == pytest.approx(math.log(V))


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_twice_is_the_same_and_leaves_no_trace(training):
    net = model(dropout=0.5).train(training)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    losses = {evaluate(net, tokens(60), block_size=T, batch_size=4) for _ in range(2)}
    assert len(losses) == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert net.training is training
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_losses_are_made_in_at_least_float32(dtype):
    net, text = model().to(dtype), tokens(T + 1)
    with torch.no_grad():
        logits = net.eval()(torch.from_numpy(text[None, :-1].astype(np.int64)))
    expected = F.cross_entropy(logits[0].double(), torch.from_numpy(text[1:].astype(np.int64)))
    assert evaluate(net, text, block_size=T, batch_size=1) == pytest.approx(expected.item(), rel=1e-6)


# ---- overlapping windows ----


@settings(deadline=None)
@given(st.integers(2, 120), st.integers(1, 12), st.integers(1, 9), st.data())
def test_with_overlap_each_token_is_still_a_target_once_and_in_order(n, block_size, batch_size, data):
    stride = data.draw(st.integers(1, block_size))
    text = np.arange(n, dtype=np.uint16)
    seen = []
    for inputs, targets in windows(text, block_size, batch_size, stride):
        assert inputs.shape[0] <= batch_size
        assert inputs.shape[1] <= block_size
        counted = targets >= 0
        assert torch.equal(targets[counted], inputs[counted] + 1)
        seen += targets[counted].tolist()
    assert seen == list(range(1, n))


def test_with_overlap_a_token_sees_at_least_what_the_windows_share():
    net, text, stride, nats = model(), tokens(45), 3, []
    for i in range(1, len(text)):
        # the first window that holds the target, counted by hand
        start = max(0, -(-(i - T) // stride) * stride)
        window = torch.from_numpy(text[start:i].astype(np.int64))
        logits = net(window[None])[0, -1]
        nats.append((logits.logsumexp(-1) - logits[int(text[i])]).item())
        assert len(window) >= min(i, T - stride + 1)
    loss = evaluate(net, text, block_size=T, batch_size=4, stride=stride)
    assert loss == pytest.approx(sum(nats) / len(nats), abs=1e-12)
