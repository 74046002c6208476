"""Laws of drawing a token, against hand-worked numbers, brute force and transformers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from minilm.errors import ConfigError
from minilm.sampling import Sampler

FILTERS = [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 7, "top_p": 0.9, "min_p": 0.02}]


def logits_like(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3


def kept(probabilities):
    """Ids with any probability, a list a row."""
    return [row.nonzero().flatten().tolist() for row in probabilities]


# Refusals


@pytest.mark.parametrize("key", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [-1, -1e-9, math.nan, math.inf, -math.inf, "1", True])
def test_a_value_that_is_no_legal_number_is_refused_by_its_key(key, value):
    with pytest.raises(ConfigError, match=f"^{key}=.* must be "):
        Sampler(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", True),
        ("top_p", 1.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("temperature", None),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_its_key(key, value):
    with pytest.raises(ConfigError, match=f"^{key}={value!r} must be ") as error:
        Sampler(**{key: value})
    assert "\n" not in str(error.value)


# Temperature


@pytest.mark.parametrize("filters", FILTERS)
def test_greedy_is_argmax_and_draws_no_random_number(filters):
    logits, generator = logits_like(5, 11), torch.Generator().manual_seed(3)
    before = generator.get_state()
    sampler = Sampler(temperature=0, **filters)
    for _ in range(3):
        assert sampler(logits, generator=generator).equal(logits.argmax(-1))
    assert generator.get_state().equal(before)
    assert sampler.probabilities(logits).equal(torch.nn.functional.one_hot(logits.argmax(-1), 11).float())


def test_greedy_takes_the_lowest_id_among_equals():
    assert Sampler(temperature=0)(torch.tensor([[0.0, 2, 2, 1]])).tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-8, 1e-30, 1e-45, 5e-324])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_tiny_temperature_is_finite_and_greedy_in_effect(temperature, filters, dtype):
    logits = logits_like(5, 11).to(dtype)
    logits[0] = torch.finfo(dtype).max  # equals at the very top share
    logits[1, 0] = torch.finfo(dtype).min
    p = Sampler(temperature=temperature, **filters).probabilities(logits)
    assert p.isfinite().all()
    assert_close(p.sum(-1), torch.ones_like(p[:, 0]))
    assert p[1:].argmax(-1).equal(logits[1:].argmax(-1))
    assert_close(p[1:].amax(-1), torch.ones_like(p[1:, 0]))


@pytest.mark.parametrize("temperature", [1e30, 1e39, 1e308])
def test_a_huge_temperature_is_uniform_over_what_is_allowed(temperature):
    p = Sampler(temperature=temperature).probabilities(torch.tensor([[5.0, -math.inf, 0, -3]]))
    assert_close(p, torch.tensor([[1 / 3, 0, 1 / 3, 1 / 3]]))


# Top-k


@pytest.mark.parametrize("top_k", [None, 0, 11, 111])
def test_top_k_off_or_above_the_vocabulary_changes_nothing(top_k):
    logits = logits_like(5, 11)
    assert_close(Sampler(top_k=top_k).probabilities(logits), logits.softmax(-1))


@pytest.mark.parametrize("k", [1, 2])
def test_top_k_never_draws_more_than_k_tokens_among_equals(k):
    logits = torch.tensor([1.0, 1, 1, 0]).expand(1000, 4)
    drawn = Sampler(top_k=k)(logits, generator=torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == set(range(k))


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.integers(1, 25))
def test_top_k_keeps_the_largest_and_of_equals_the_lowest_ids(logits, k):
    first = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k]
    assert kept(Sampler(top_k=k).probabilities(torch.tensor([logits]))) == [sorted(first)]


# Top-p


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0, [0]),
        (1e-9, [0]),
        (0.4, [0]),
        (0.5, [0]),  # reached exactly: no further token
        (0.51, [0, 1]),
        (0.6, [0, 1]),  # the token that crosses stays
        (0.8, [0, 1]),
        (0.81, [0, 1, 2]),
        (0.95, [0, 1, 2]),
        (0.96, [0, 1, 2, 3]),
        (1, [0, 1, 2, 3]),
        (None, [0, 1, 2, 3]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p, expected, dtype):
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=dtype)
    assert kept(Sampler(top_p=top_p).probabilities(p.log())) == [expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_top_p_in_low_precision_keeps_a_token(dtype):
    p = Sampler(top_p=1e-3).probabilities(torch.zeros(2, 50_000, dtype=dtype))
    assert kept(p) == [list(range(50))] * 2  # of mass 1 / 50 000 each, which only float32 can add up


def test_top_p_counts_the_mass_that_top_k_left():
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    assert kept(Sampler(top_p=0.55).probabilities(p.log())) == [[0, 1]]
    assert kept(Sampler(top_p=0.55, top_k=2).probabilities(p.log())) == [[0]]  # 0.4 of 0.7
    assert kept(Sampler(top_p=0.8, top_k=1).probabilities(p.log())) == [[0]]


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.floats(0, 1))
def test_top_p_equals_its_definition(weights, top_p):
    p = torch.tensor([weights], dtype=torch.float64) / sum(weights)
    rows = kept(Sampler(top_p=top_p).probabilities(p.log()))
    mass = p[0, rows[0]]
    assert mass.sum() >= top_p - 2e-6
    assert len(mass) == 1 or mass.sum() - mass.min() < top_p + 2e-6
    assert p[0].sort(descending=True).values[: len(mass)].equal(mass.sort(descending=True).values)


# Min-p and the repetition penalty


def test_min_p_keeps_what_is_near_the_likeliest():
    p = torch.tensor([[0.5, 0.25, 0.2, 0.05]], dtype=torch.float64)
    expected = torch.tensor([[0.5, 0.25, 0.2, 0]], dtype=torch.float64) / 0.95
    assert_close(Sampler(min_p=0.3).probabilities(p.log()), expected)
    assert kept(Sampler(min_p=1).probabilities(p.log())) == [[0]]


def test_repetition_penalty_makes_seen_tokens_less_likely_whatever_their_sign():
    logits = torch.tensor([[2.0, -2, 1, 0], [2, -2, 1, 0], [2, -2, 1, 0]])
    seen = torch.tensor([[0, 1, 0], [-1, -1, 2], [-1, -1, -1]])
    expected = torch.tensor([[1.0, -4, 1, 0], [2, -2, 0.5, 0], [2, -2, 1, 0]])  # once, however often seen
    assert_close(Sampler(repetition_penalty=2).probabilities(logits, seen), expected.softmax(-1))
    assert Sampler(0, repetition_penalty=3)(logits, seen).tolist() == [2, 0, 0]


def test_repetition_penalty_without_seen_tokens_changes_nothing():
    logits = logits_like(2, 11)
    for seen in (None, torch.full((2, 0), -1)):
        assert_close(Sampler(repetition_penalty=2).probabilities(logits, seen), logits.softmax(-1))


# All together


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.1, 5),
    top_k=st.integers(1, 40),
    top_p=st.floats(0.01, 0.999),
    min_p=st.floats(0, 1),
    penalty=st.floats(0.5, 3),
)
def test_equals_the_warpers_of_transformers(seed, temperature, top_k, top_p, min_p, penalty):
    from transformers.generation import logits_process as hf

    logits = logits_like(3, 31, seed=seed, dtype=torch.float64)
    seen = torch.randint(31, (3, 8), generator=torch.Generator().manual_seed(seed))
    expected = logits.clone()
    for warper in (
        hf.RepetitionPenaltyLogitsProcessor(penalty),
        hf.TemperatureLogitsWarper(temperature),
        hf.TopKLogitsWarper(top_k),
        hf.TopPLogitsWarper(top_p),
        hf.MinPLogitsWarper(min_p),
    ):
        expected = warper(seen, expected)
    sampler = Sampler(temperature, top_k, top_p, min_p, penalty)
    assert_close(sampler.probabilities(logits, seen), expected.softmax(-1))


@pytest.mark.parametrize("filters", [*FILTERS, {"repetition_penalty": 1.7}, {"temperature": 0}])
def test_a_row_does_not_depend_on_the_others(filters):
    sampler, logits = Sampler(**filters), logits_like(6, 65).round()  # rounded: many equals
    seen = torch.randint(-1, 65, (6, 9), generator=torch.Generator().manual_seed(1))
    batched = sampler.probabilities(logits, seen)
    alone = [sampler.probabilities(logits[i : i + 1], seen[i : i + 1]) for i in range(6)]
    assert batched.equal(torch.cat(alone))


@pytest.mark.parametrize("filters", FILTERS)
def test_draws_follow_the_distribution(filters):
    sampler, n = Sampler(temperature=0.9, **filters), 40_000
    logits = logits_like(1, 11)
    p = sampler.probabilities(logits)[0].double()
    drawn = sampler(logits.expand(n, 11), generator=torch.Generator().manual_seed(0))
    counts = drawn.bincount(minlength=11)
    assert drawn.dtype == torch.int64
    assert counts[p == 0].sum() == 0
    assert ((counts - n * p).abs() <= 5 * (n * p * (1 - p)).sqrt() + 1e-6).all()


def test_the_same_seed_draws_the_same_tokens():
    logits = logits_like(9, 65)
    first, second = (Sampler()(logits, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert first.equal(second)


def test_the_result_is_float32_or_float64_and_the_logits_stay_as_they_were():
    for dtype, expected in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        logits = logits_like(2, 11).to(dtype)
        before = logits.clone()
        p = Sampler(0.5, 5, 0.9, 0.1, 1.3).probabilities(logits, torch.tensor([[1], [2]]))
        assert p.dtype == expected
        assert logits.equal(before)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_distribution_are_an_error_that_names_row_and_cause(temperature, bad):
    logits = logits_like(3, 11)
    logits[1, slice(None) if bad == -math.inf else 4] = bad
    with pytest.raises(ValueError, match=f"row 1 is {bad}"):
        Sampler(temperature)(logits)


def test_tokens_ruled_out_by_minus_inf_are_never_drawn():
    logits = torch.full((1000, 11), -math.inf)
    logits[:, 4] = -50.0
    for filters in FILTERS:
        assert set(Sampler(**filters)(logits).tolist()) == {4}
