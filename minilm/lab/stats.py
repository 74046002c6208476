"""The statistics of a study, by scipy and statsmodels. Values are final losses, one a seed.

Runs of one seed see the same data in the same order, and start from the same weights where shapes allow. So variants
are compared seed by seed: what a lucky seed gives to both falls out of the difference (a paired t-test).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean over n seeds and its 95 % confidence interval (Student's t), NaN with one seed."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Difference:
    """Variant minus base, over the n seeds that both have.

    mean: with its 95 % interval. effect: the mean over the standard deviation of the differences (Cohen's d_z).
    p: of a paired t-test. corrected: p after Holm's correction over all comparisons of the study.
    """

    mean: Mean
    each: tuple[float, ...]
    effect: float
    p: float
    corrected: float

    @property
    def verdict(self) -> str:
        """lower, higher, 'not shown' (no difference), or 'one seed', which shows nothing."""
        if self.mean.n < 2:
            return "one seed"
        if not self.corrected < 1 - CONFIDENCE:
            return "not shown"
        return "lower" if self.mean.value < 0 else "higher"


def mean(values: Sequence[float]) -> Mean:
    """The mean of one or more values."""
    from scipy.stats import ttest_1samp

    value = float(np.mean(values))
    if len(values) < 2:
        return Mean(value, math.nan, math.nan, len(values))
    if _alike(values):  # scipy's interval is NaN
        return Mean(value, value, value, len(values))
    low, high = ttest_1samp(values, 0).confidence_interval(CONFIDENCE)
    return Mean(value, float(low), float(high), len(values))


def differences(
    base: Mapping[int, float], variants: Mapping[str, Mapping[int, float]]
) -> dict[str, Difference]:
    """Each variant against the base, paired by seed; a variant that shares no seed with it is left out."""
    from scipy.stats import ttest_1samp
    from statsmodels.stats.multitest import multipletests

    found: dict[str, tuple[tuple[float, ...], float]] = {}
    for name, values in variants.items():
        each = tuple(values[seed] - base[seed] for seed in sorted(values.keys() & base.keys()))
        if not each:
            continue
        if len(each) < 2:
            p = math.nan
        elif _alike(each):  # runs that are the same, or differ by a constant
            p = 0.0 if each[0] else 1.0
        else:
            p = float(ttest_1samp(each, 0).pvalue)
        found[name] = (each, p)
    tested = [name for name, (_, p) in found.items() if not math.isnan(p)]
    corrected = dict.fromkeys(found, math.nan)
    if tested:
        corrected |= zip(
            tested, map(float, multipletests([found[n][1] for n in tested], method="holm")[1]), strict=True
        )
    return {
        name: Difference(mean(each), each, _effect(each), p, corrected[name])
        for name, (each, p) in found.items()
    }


def _alike(values: Sequence[float]) -> bool:
    """Without a spread but for rounding."""
    return bool(np.ptp(values) <= 1e-12 * np.max(np.abs(values)))


def _effect(each: Sequence[float]) -> float:
    if len(each) < 2:
        return math.nan
    center, spread = float(np.mean(each)), float(np.std(each, ddof=1))
    if _alike(each):
        return math.copysign(math.inf, center) if center else 0.0
    return center / spread
