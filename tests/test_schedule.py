"""Learning rates over a run: numbers worked by hand, a published formula, and what must hold of any schedule."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minilm.errors import ConfigError
from minilm.schedule import Constant, Cosine, Trapezoid


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (Constant(), [1] * 10),
        (Constant(warmup=4), [0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1, 1]),
        (Trapezoid(decay=0.5), [1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        (Trapezoid(warmup=2, decay=0.5, final=0.2), [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4]),
        (Trapezoid(decay=1.0), [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        (Cosine(final=0), [0.5 + 0.5 * math.cos(math.pi * i / 10) for i in range(10)]),
        (Cosine(warmup=8, final=0.5), [i / 9 for i in range(1, 9)] + [1, 0.75]),
    ],
    ids=str,
)
def test_rates_worked_by_hand(schedule, rates):
    assert [schedule(step, 10) for step in range(10)] == pytest.approx(rates)


def nanogpt(it, learning_rate, warmup_iters, lr_decay_iters, min_lr):
    """The schedule of nanoGPT's train.py, rewritten from its description."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


def test_the_cosine_is_nanogpts():
    schedule = Cosine(warmup=100, final=0.1)
    ours = [1e-3 * schedule(step, 2000) for step in range(2000)]
    assert ours == pytest.approx([nanogpt(it, 1e-3, 100, 2000, 1e-4) for it in range(2000)])


steps = st.integers(1, 3000)
shares = st.floats(0, 1)


@given(steps, shares, shares, st.floats(0.01, 1))
def test_a_rate_rises_in_the_warm_up_and_never_after(max_steps, warm, final, decay):
    warmup = int(warm * max_steps)
    for schedule in (Constant(warmup), Cosine(warmup, final), Trapezoid(warmup, decay, final)):
        schedule.check(max_steps)
        rates = [schedule(step, max_steps) for step in range(max_steps)]
        assert all(0 <= rate <= 1 for rate in rates)
        assert rates[:warmup] == sorted(rates[:warmup])
        assert all(b <= a + 1e-12 for a, b in zip(rates[warmup:], rates[warmup + 1 :], strict=False))
        assert warmup == max_steps or rates[warmup] == 1


@pytest.mark.parametrize("kind", [Constant, Cosine, Trapezoid])
def test_a_warm_up_longer_than_the_run_is_refused(kind):
    kind(warmup=10).check(10)
    with pytest.raises(ConfigError, match=r"schedule\.warmup=11 is longer than the run, train\.max_steps=10"):
        kind(warmup=11).check(10)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Constant, {"warmup": -1}),
        (Cosine, {"final": -0.1}),
        (Cosine, {"final": 1.1}),
        (Cosine, {"final": math.nan}),
        (Trapezoid, {"final": math.nan}),
        (Trapezoid, {"decay": 0}),
        (Trapezoid, {"decay": 1.1}),
        (Trapezoid, {"decay": math.nan}),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_by_key(kind, options):
    with pytest.raises(ConfigError, match=rf"schedule\.{next(iter(options))}="):
        kind(**options)
