"""What a study shows: its runs by variant, each against the base, and each prediction beside what was measured."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from minilm.lab import stats
from minilm.lab.results import Result
from minilm.lab.study import UNITS, Study, Variant

OUTCOMES = {
    "not shown": "no difference shown",
    "one seed": "one seed: nothing can be said",
    "lower": "lower",
    "higher": "higher",
}


@dataclass(frozen=True)
class Metric:
    """What variants are compared by: the validation loss, in units that all of them share.

    above_floor: minus the entropy of the text. per_byte: in bits per byte, where tokenizers differ.
    """

    above_floor: bool
    per_byte: bool

    @property
    def unit(self) -> str:
        return "bits per byte" if self.per_byte else "nats per token"

    @property
    def name(self) -> str:
        return (
            f"distance to the entropy floor, {self.unit}"
            if self.above_floor
            else f"validation loss, {self.unit}"
        )

    def of(self, record: dict[str, Any], variant: Variant) -> float:
        """Of a record with a validation loss."""
        loss = record["val/loss"]
        if loss is None:
            return math.nan
        unit = record["val/bits_per_byte"] / loss if self.per_byte and loss else 1.0
        return (loss - (variant.floor or 0.0) * self.above_floor) * unit


@dataclass(frozen=True)
class Finding:
    """A variant and what its runs came to. final: by seed. apart: why it is compared with nothing."""

    variant: Variant
    results: list[Result]
    final: dict[int, float]
    apart: str
    difference: stats.Difference | None = None
    predicted: str = ""

    @property
    def mean(self) -> stats.Mean | None:
        return stats.mean(list(self.final.values())) if self.final else None

    @property
    def verdict(self) -> str:
        if self.apart:
            return self.apart
        return OUTCOMES[self.difference.verdict] if self.difference else ""

    @property
    def outcome(self) -> str:
        """Of the prediction."""
        if not self.predicted or not self.difference or self.difference.verdict == "one seed":
            return ""
        found = self.difference.verdict
        if found == "not shown":
            return "nothing against it" if self.predicted == "same" else "not shown"
        return "as predicted" if found == self.predicted else "against the prediction"

    def health(self) -> dict[str, np.ndarray]:
        """(seeds, layers) of each figure that training looked at last, if it did."""
        figures: dict[str, np.ndarray] = {}
        for name in ("score_std", "entropy", "saturated", "gradient"):
            rows = []
            for result in self.results:
                layers = [
                    result.last(f"attention/{i}/{name}")
                    for i in range(self.variant.config["model"]["n_layer"])
                ]
                if None not in layers:
                    rows.append(layers)
            if rows:
                figures[name] = np.array(rows, dtype=float)
        return figures

    def spread(self, value: Any) -> float | None:
        """The mean over runs of a function of a result."""
        values = [value(result) for result in self.results]
        values = [v for v in values if isinstance(v, int | float)]
        return float(np.mean(values)) if values else None


@dataclass(frozen=True)
class Findings:
    study: Study
    results: list[Result]

    @cached_property
    def metric(self) -> Metric:
        variants = self.study.variants
        tokenizers = [v.config["tokenizer"] for v in variants]
        return Metric(
            above_floor=all(v.floor is not None for v in variants),
            per_byte=any(t != tokenizers[0] for t in tokenizers),
        )

    @cached_property
    def rows(self) -> list[Finding]:
        """One for each variant, the base first."""
        found = []
        for variant in self.study.variants:
            done = [r for r in self.results if r.job.variant is variant and r.state == "done"]
            final = {r.job.seed: self.metric.of(_last(r), variant) for r in done}
            found.append((variant, done, {seed: v for seed, v in final.items() if math.isfinite(v)}))
        apart = {variant.name: self._apart(variant) for variant in self.study.variants}
        compared = {variant.name: final for variant, _, final in found[1:] if not apart[variant.name]}
        base = {} if apart[self.study.base.name] else found[0][2]
        differences = stats.differences(base, compared)
        predict = self.study.config.predict
        return [
            Finding(
                variant,
                done,
                final,
                apart[variant.name],
                differences.get(variant.name),
                predict.get(variant.name, ""),
            )
            for variant, done, final in found
        ]

    def _apart(self, variant: Variant) -> str:
        base = self.study.base
        if variant.source != base.source:
            return "reads another text"
        if variant.lookahead > variant.config["model"]["block_size"]:
            return "no language-modelling loss: it sees its targets"
        return ""

    @property
    def compared(self) -> list[Finding]:
        return [row for row in self.rows if row.difference]

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.state != "done"]

    def curve(self, row: Finding) -> tuple[np.ndarray, np.ndarray]:
        """x (n,) and the metric (seeds, n) at each evaluation; x is what the budget makes equal."""
        by_step: dict[int, list[tuple[float, float]]] = {}
        for result in row.results:
            for record in result.records:
                if "val/loss" in record:
                    point = (self._spent(record, row.variant), self.metric.of(record, row.variant))
                    by_step.setdefault(record["step"], []).append(point)
        whole = [points for _, points in sorted(by_step.items()) if len(points) == len(row.results)]
        table = np.array(whole, dtype=float).reshape(len(whole), len(row.results), 2)
        return table[..., 0].mean(axis=1) if len(whole) else np.empty(0), table[..., 1].T

    def lengths(self, row: Finding) -> dict[int, list[float]]:
        """By multiple of the trained context: the metric of each run that could be evaluated there."""
        found: dict[int, list[float]] = {}
        for result in row.results:
            bits_per_nat = result.last("val/bits_per_byte") / result.last("val/loss")
            for multiple, loss in result.longer.items():
                if not isinstance(loss, str):
                    record = {"val/loss": loss, "val/bits_per_byte": loss * bits_per_nat}
                    found.setdefault(multiple, []).append(self.metric.of(record, row.variant))
        return found

    def _spent(self, record: dict[str, Any], variant: Variant) -> float:
        amounts = {
            "steps": record["step"],
            "tokens": record["tokens"],
            "flops": record["step"] * variant.cost.flops,
            "seconds": record["train_seconds"],
        }
        return amounts[self.study.config.budget]

    def remarks(self) -> Iterator[str]:
        """What a reader must know to read the numbers rightly."""
        study, metric, base = self.study, self.metric, self.study.base
        yield self._budget_remark()
        if study.config.budget == "seconds":
            yield "The steps were chosen by the speed of this machine, measured before the first run."
        if metric.above_floor:
            yield (
                f"The entropy floor of the validation text is {base.floor:.4f} nats per token, the lowest loss that "
                "any model can reach; losses are given as the distance to it."
            )
            if len({v.floor for v in study.variants}) > 1 and not metric.per_byte:
                yield "Variants have different entropy floors; each is measured from its own."
        if metric.per_byte:
            yield "Tokenizers differ, so losses are compared in bits per byte."
        yield from self._statistics_remarks()
        for row in self.rows:
            if 0 < row.variant.lookahead <= row.variant.config["model"]["block_size"]:
                yield f"{row.variant.name} sees some of its targets; these do not count in its loss."

    def _budget_remark(self) -> str:
        base, budget = self.study.base, self.study.config.budget
        if budget != "steps":
            return f"Every variant has as many {UNITS[budget]} as {base.name} has in {base.steps} steps."
        if len({v.steps for v in self.study.variants}) > 1:
            return "Variants set their own numbers of steps."
        return f"Every variant trains for {base.steps} steps."

    def _statistics_remarks(self) -> Iterator[str]:
        if len(self.study.seeds) == 1:
            yield "One seed: there is no interval, and nothing can be said of significance."
            return
        yield (
            f"Intervals are 95 % confidence intervals (Student's t) over {len(self.study.seeds)} seeds. Differences "
            "are paired: runs of one seed saw the same data in the same order, from the same initial weights where the "
            "shapes allow. The effect is the mean difference over the standard deviation of the differences."
        )
        n = len(self.compared)
        corrected = f"after Holm's correction over {n} comparisons; intervals are not corrected."
        yield (
            "A difference counts as shown where p < 0.05 in a paired t-test, "
            + (corrected if n > 1 else "the only one that was made.")
        )


def _last(result: Result) -> dict[str, Any]:
    return next((r for r in reversed(result.records) if "val/loss" in r), {"val/loss": None})
