"""Intervals and comparisons against numbers worked by hand, and how often they see what is not there."""

import math

import numpy as np
import pytest

from minilm.lab import stats


def test_a_mean_has_students_interval():
    found = stats.mean([1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(
        3
    )  # the 97.5 % point of t with 2 degrees of freedom; the standard deviation is 1
    assert (found.value, found.n) == (2.0, 3)
    assert [found.low, found.high] == pytest.approx([2 - half, 2 + half], abs=1e-5)


def test_one_value_has_no_interval():
    found = stats.mean([1.5])
    assert found.value == 1.5
    assert math.isnan(found.low)


def test_equal_values_leave_no_room():
    assert stats.mean([1.5, 1.5]) == stats.Mean(1.5, 1.5, 1.5, 2)


def test_differences_are_taken_seed_by_seed():
    base = {1: 10.0, 2: 20.0, 3: 30.0}
    found = stats.differences(base, {"b": {3: 33.0, 1: 11.0, 2: 22.0}})["b"]
    assert found.each == pytest.approx((1, 2, 3))
    assert found.mean.value == pytest.approx(2)
    assert found.effect == pytest.approx(2)
    assert found.p == pytest.approx(0.0742, abs=1e-4)  # t = 2√3 with 2 degrees of freedom


def test_seeds_that_only_one_side_has_do_not_count():
    found = stats.differences({1: 1.0, 2: 2.0}, {"b": {2: 2.5, 3: 9.0}, "c": {4: 1.0}})
    assert found["b"].each == (0.5,)
    assert "c" not in found


def test_p_values_are_corrected_by_holm():
    rng = np.random.default_rng(0)
    base = {seed: float(rng.normal()) for seed in range(6)}
    variants = {name: {s: v + 0.4 + float(rng.normal(0, 0.3)) for s, v in base.items()} for name in "abc"}
    found = stats.differences(base, variants)
    ordered = sorted(found.values(), key=lambda d: d.p)
    holm, so_far = [], 0.0
    for i, difference in enumerate(ordered):  # Holm 1979: the smallest of m times m, the next times m − 1, …
        so_far = max(so_far, min(1.0, (3 - i) * difference.p))
        holm.append(so_far)
    assert [d.corrected for d in ordered] == pytest.approx(holm)
    assert len({d.p for d in ordered}) == 3


def test_one_seed_shows_nothing():
    found = stats.differences({1: 1.0}, {"b": {1: 99.0}})["b"]
    assert found.verdict == "one seed"
    assert math.isnan(found.p)
    assert math.isnan(found.effect)


def test_runs_that_are_alike_show_no_difference():
    base = {1: 1.1, 2: 2.2, 3: 3.3}
    found = stats.differences(base, {"b": dict(base)})["b"]
    assert (found.verdict, found.p, found.effect) == ("not shown", 1.0, 0.0)


def test_a_constant_difference_is_shown():
    found = stats.differences({1: 1.0, 2: 2.0}, {"b": {1: 1.5, 2: 2.5}})["b"]
    assert (found.verdict, found.effect) == ("higher", math.inf)


def shown(rng, *, shift, n_variants, repeats, seeds=3):
    """In which share of studies any difference is shown, of runs that scatter by 0.01 around a seed's own luck."""
    hits = 0
    for _ in range(repeats):
        luck = rng.normal(1.0, 0.05, seeds)
        runs = luck + rng.normal(0, 0.01, (1 + n_variants, seeds))
        runs[1:] += shift
        base, *others = (dict(enumerate(map(float, row))) for row in runs)
        found = stats.differences(base, {str(i): values for i, values in enumerate(others)})
        hits += any(d.verdict in ("lower", "higher") for d in found.values())
    return hits / repeats


@pytest.mark.slow
@pytest.mark.parametrize("n_variants", [1, 4])
def test_what_is_not_there_is_seen_in_one_study_of_twenty(n_variants):
    share = shown(np.random.default_rng(1), shift=0.0, n_variants=n_variants, repeats=400)
    assert share < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    if n_variants == 1:
        assert share > 0.05 - 3 * math.sqrt(0.05 * 0.95 / 400)  # nor is it deaf


def test_a_large_effect_is_seen():
    assert shown(np.random.default_rng(2), shift=0.3, n_variants=2, repeats=20) > 0.9
