"""report.md and report.html with their figures, results.csv (a row a run) and summary.csv (a row a variant)."""

import csv
import importlib.metadata
import io
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from minilm.bench.base import Table
from minilm.bench.report import machine
from minilm.config import differences
from minilm.console import short
from minilm.files import write_atomic
from minilm.lab import charts
from minilm.lab.findings import Finding, Findings
from minilm.lab.results import Result
from minilm.lab.stats import Mean

PACKAGES = ("minilm", "torch", "numpy", "hydra-core", "scipy", "statsmodels", "matplotlib")
TEMPLATES = Path(__file__).parent
CLOCK = ("tokens/s", "training time")  # columns that no second run repeats


@dataclass(frozen=True)
class Section:
    """A table of the report and what is to be said of it."""

    table: Table
    text: str = ""


def write(findings: Findings) -> list[Path]:
    """Write the report into the study's folder and return the paths of what is in it. The page comes last."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = findings.study.folder
    figures = charts.figures(findings)
    for name, (_, svg) in figures.items():
        write_atomic(folder / f"{name}.svg", svg)
    write_atomic(folder / "results.csv", _csv([_run(findings, result) for result in findings.results]))
    write_atomic(folder / "summary.csv", _csv([_summary(findings, row) for row in findings.rows]))
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=lambda name: str(name).endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    view = {
        "study": findings.study,
        "findings": findings,
        "answers": with_rows(Section(outcome(findings)), Section(predictions(findings))),
        "details": with_rows(*details(findings)),
        "figures": figures,
        "inline": {name: charts.themed(svg) for name, (_, svg) in figures.items()},
        "colors": {row.variant.name: f"--v{i % len(charts.PALETTE)}" for i, row in enumerate(findings.rows)},
        "palette": charts.PALETTE,
        "samples": [(row.variant.name, *_sample(row)) for row in findings.rows],
        "commands": [(result, command(result)) for result in findings.results],
        "configs": [(row.variant.name, _config(row, findings)) for row in findings.rows],
        "machine": environment_facts(findings),
        "clock": CLOCK,
    }
    paths = [folder / name for name in ("results.csv", "summary.csv", "report.md", "report.html")]
    for path in paths[2:]:
        write_atomic(path, environment.get_template(path.name).render(view))
    return paths


# ---- tables ----


def with_rows(*sections: Section) -> list[Section]:
    return [section for section in sections if section.table.rows]


def details(findings: Findings) -> list[Section]:
    """What is to be known besides the answer."""
    return [
        Section(
            lengths(findings),
            "Means over seeds, on the same text: a longer window shows each token more of it.",
        ),
        Section(
            health(findings),
            "Lowest and highest layer, means over seeds, at the last look in training.",
        ),
        Section(costs(findings), "\n".join(findings.study.chosen)),
    ]


def outcome(findings: Findings) -> Table:
    """What came out: the table that answers the question."""
    metric = findings.metric
    columns = [
        "variant",
        "seeds",
        "mean [95 %]",
        f"minus {findings.study.base.name} [95 %]",
        "effect",
        "p",
        "verdict",
    ]
    rows = []
    for row in findings.rows:
        found = row.difference
        rows.append(
            [
                row.variant.name,
                f"{len(row.final)} of {len(findings.study.seeds)}",
                interval(row.mean) if row.mean else "",
                interval(found.mean, "+") if found else "",
                number(found.effect, "+.1f") if found else "",
                _p(found.corrected) if found else "",
                row.verdict
                if found or row.apart
                else ("the base" if row.variant is findings.study.base else ""),
            ]
        )
    return Table(f"{metric.name[0].upper()}{metric.name[1:]}", columns, rows)


def predictions(findings: Findings) -> Table:
    rows = [
        [row.variant.name, row.predicted, row.verdict, row.outcome]
        for row in findings.rows
        if row.predicted and row.difference
    ]
    return Table("Predicted and measured", ["variant", "predicted", "measured", ""], rows)


def lengths(findings: Findings) -> Table:
    multiples = findings.study.config.evaluate_at
    size = findings.study.base.config["model"]["block_size"]
    rows = []
    for row in findings.rows:
        cells = []
        found = findings.lengths(row)
        for multiple in multiples:
            reasons = [r.longer[multiple] for r in row.results if isinstance(r.longer.get(multiple), str)]
            values = found.get(multiple, [])
            cells.append(f"{sum(values) / len(values):.4f}" if values else str(reasons[0]) if reasons else "")
        if any(cells):
            rows.append([row.variant.name, *cells])
    columns = ["variant", *(f"{multiple}× ({multiple * size} tokens)" for multiple in multiples)]
    return Table(f"Longer contexts: {findings.metric.name}", columns, rows)


def health(findings: Findings) -> Table:
    rows = []
    for row in findings.rows:
        if figures := row.health():
            layers = {name: values.mean(axis=0) for name, values in figures.items()}
            rows.append([row.variant.name, *(f"{v.min():.3g} – {v.max():.3g}" for v in layers.values())])
    return Table(
        "Inside attention", ["variant", "std of scores", "entropy, nats", "saturated rows", "p(1 − p)"], rows
    )


def costs(findings: Findings) -> Table:
    rows = []
    for row in findings.rows:
        v = row.variant
        speed, seconds = row.spread(lambda r: r.tokens_per_second), row.spread(lambda r: r.seconds)
        rows.append(
            [
                v.name,
                f"{v.parameters:,}",
                short(v.flops_per_token),
                f"{v.steps:,}",
                short(v.steps * v.cost.tokens),
                short(v.steps * v.cost.flops),
                "" if speed is None else short(speed),
                "" if seconds is None else f"{seconds:.1f} s",
            ]
        )
    columns = ["variant", "parameters", "FLOPs per token", "steps", "tokens", "FLOPs", *CLOCK]
    return Table("What it cost", columns, rows)


def interval(found: Mean, sign: str = "") -> str:
    value = f"{found.value:{sign}.4f}"
    return value if math.isnan(found.low) else f"{value} [{found.low:{sign}.4f}, {found.high:{sign}.4f}]"


def number(value: float, form: str) -> str:
    if math.isnan(value):
        return ""
    return f"{value:{form}}" if math.isfinite(value) else ("∞" if value > 0 else "−∞")


def _p(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


# ---- what else is on the page ----


def command(result: Result) -> str:
    """What to type to make a run anew, by itself."""
    return f"python scripts/train.py {' '.join(map(shlex.quote, result.job.words))}"


def _sample(row: Finding) -> tuple[int | None, str]:
    """The seed and the last sample of the variant's first finished run."""
    if not row.results:
        return None, ""
    first = min(row.results, key=lambda result: result.job.seed)
    return first.job.seed, first.sample


def _config(row: Finding, findings: Findings) -> str:
    """The base's whole configuration; of the other variants what differs from it."""
    drop = ("out_dir", "resume", "seed")
    own, base = (
        {k: v for k, v in x.config.items() if k not in drop} for x in (row.variant, findings.study.base)
    )
    if row.variant is not findings.study.base:
        return "\n".join(f"{key}: {new}    # {old}" for key, old, new in _flat(base, own)) or "the same"
    return yaml.safe_dump(own, sort_keys=False, allow_unicode=True)


def _flat(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [
        found for key in sorted(a.keys() | b.keys()) for found in differences(key, a.get(key), b.get(key))
    ]


def environment_facts(findings: Findings) -> list[tuple[str, str]]:
    facts = machine(findings.study.base.cost.setting)
    versions = ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
    return [*((key, str(value)) for key, value in facts.items() if key != "torch"), ("packages", versions)]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


# ---- CSV ----


def _run(findings: Findings, result: Result) -> dict[str, Any]:
    variant = result.job.variant
    final = next(row.final for row in findings.rows if row.variant is variant)
    longer = {f"val_loss_at_{m}x": result.longer.get(m, "") for m in findings.study.config.evaluate_at}
    return {
        "variant": variant.name,
        "seed": result.job.seed,
        "state": result.state,
        "reason": result.reason,
        "steps": result.step,
        "val_loss": _or_empty(result.loss),
        "floor": _or_empty(variant.floor),
        "bits_per_byte": _or_empty(result.last("val/bits_per_byte")),
        "metric": _or_empty(final.get(result.job.seed)),
        **longer,
        "parameters": variant.parameters,
        "flops_per_token": round(variant.flops_per_token),
        "flops": round(variant.cost.flops * variant.steps),
        "tokens_per_second": _or_empty(result.tokens_per_second and round(result.tokens_per_second)),
        "train_seconds": result.seconds,
        "command": command(result),
    }


def _summary(findings: Findings, row: Finding) -> dict[str, Any]:
    mean, found = row.mean, row.difference
    return {
        "variant": row.variant.name,
        "metric": findings.metric.name,
        "seeds": len(row.final),
        **_interval_columns("mean", mean),
        **_interval_columns("difference", found.mean if found else None),
        "effect": _or_empty(found.effect if found else None),
        "p": _or_empty(found.p if found else None),
        "p_holm": _or_empty(found.corrected if found else None),
        "verdict": row.verdict,
        "predicted": row.predicted,
    }


def _interval_columns(name: str, mean: Mean | None) -> dict[str, Any]:
    values: Sequence[Any] = (mean.value, mean.low, mean.high) if mean else (None, None, None)
    return dict(zip((name, f"{name}_low", f"{name}_high"), map(_or_empty, values), strict=True))


def _or_empty(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _csv(rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
