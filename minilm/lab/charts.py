"""The figures of a report, as SVG by matplotlib: small enough to be read on a phone.

Colours stand for roles. `themed` turns them into the page's own, so that one figure suits paper and a dark screen.
"""

import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from minilm.lab.findings import Finding, Findings

INK, LINE = "#5b6470", "#dfe3e8"
PALETTE = ("#3d6fb4", "#d1495b", "#b7791f", "#2a8c82", "#7b52ab", "#8a5a44", "#c2549d", "#64748b")
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be read aloud, found and copied
    "text.parse_math": False,  # a $ in a name is a $
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "grid.color": LINE,
    "legend.frameon": False,
}
BUDGETS = {"steps": "step", "tokens": "tokens", "flops": "FLOPs", "seconds": "seconds of training"}
HEALTH = {
    "score_std": "standard deviation of the scores",
    "entropy": "entropy of a row of weights, nats",
    "saturated": "share of saturated rows",
    "gradient": "p(1 − p), the softmax's gradient",
}


def draw(name: str, paint: Callable[[Any], None], *, width: float = 4.2, height: float = 3.2) -> str:
    """The SVG of what `paint` draws into a figure of so many inches; the same for the same numbers."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: Any = STYLE | {"svg.hashsalt": name}
    with matplotlib.rc_context(style):  # ids differ between figures of one page
        figure = Figure(figsize=(width, height), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        paint(figure)
        out = io.StringIO()
        canvas.print_svg(out, metadata={"Date": None, "Title": name})
    return out.getvalue()


def themed(svg: str) -> str:
    """For inside a page: without the file's head, as wide as its place, colours by the page's names for them."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL
    )  # it would style the whole page
    own = 'role="img" stroke-linejoin="round"'
    svg = re.sub(r'(<svg[^>]*?) width="[\d.]+pt" height="[\d.]+pt"', rf"\1 {own}", svg, count=1)
    names = {INK: "--ink-soft", LINE: "--line", "#ffffff": "--card"}
    names |= {color: f"--v{i}" for i, color in enumerate(PALETTE)}
    for color, name in names.items():
        svg = svg.replace(color, f"var({name})")
    return svg


def color(findings: Findings, row: Finding) -> str:
    return PALETTE[findings.rows.index(row) % len(PALETTE)]


def figures(findings: Findings) -> dict[str, tuple[str, str]]:
    """The figures there are data for: name -> (caption, SVG)."""
    made = {}
    metric, base = findings.metric.name, findings.study.base.name
    bands = "bands go from the lowest to the highest seed"
    if findings.compared:
        with_interval = "its mean with the 95 % interval, and each seed as a dot"
        what = with_interval if len(findings.study.seeds) > 1 else "of one seed, so without an interval"
        caption = f"Difference from {base} in the {metric}: {what}. Left of zero is better."
        height = 1.1 + 0.42 * len(findings.compared)
        made["differences"] = (caption, draw("differences", _differences(findings), height=height))
    if any(row.results and not row.apart for row in findings.rows):
        caption = f"Learning curves: the {metric}. Lines are means over seeds, {bands}."
        made["curves"] = (caption, draw("curves", _curves(findings), height=3.8))
    for name, label in HEALTH.items():
        if any(name in row.health() for row in findings.rows):
            caption = (
                f"Layer by layer, at the last look in training: {label}. Lines are means over seeds, {bands}."
            )
            made[name] = (caption, draw(name, _layers(findings, name, label), height=3.2))
    if any(findings.lengths(row) and not row.apart for row in findings.rows):
        caption = (
            f"Read in longer windows than trained on: the {metric}. Lines are means over seeds, {bands}."
        )
        made["longer"] = (caption, draw("longer", _lengths(findings), height=3.8))
    return made


def _legend(figure: Any, n: int) -> None:
    figure.legend(
        loc="outside lower center", ncols=min(n, 3), fontsize=8.5, handlelength=1.4, columnspacing=1.2
    )


def _differences(findings: Findings) -> Callable[[Any], None]:
    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        for y, row in enumerate(findings.compared):
            assert row.difference is not None
            found, hue = row.difference, color(findings, row)
            axes.scatter(found.each, [y - 0.18] * len(found.each), s=12, color=hue, alpha=0.45, linewidths=0)
            if found.mean.n > 1:
                axes.plot(
                    [found.mean.low, found.mean.high], [y, y], color=hue, linewidth=2, solid_capstyle="round"
                )
            axes.scatter([found.mean.value], [y], s=34, color=hue, zorder=3, linewidths=0)
        names = [row.variant.name for row in findings.compared]
        axes.set_yticks(range(len(names)), [_short(name) for name in names], fontsize=9)
        axes.set_ylim(len(names) - 0.5, -0.6)
        axes.axvline(0, color=INK, linewidth=1)
        axes.grid(axis="x")
        axes.tick_params(length=0)
        axes.spines["left"].set_visible(False)
        axes.locator_params(axis="x", nbins=6)
        axes.margins(x=0.08)
        axes.set_xlabel(f"minus {findings.study.base.name}, {findings.metric.unit}")

    return paint


def _curves(findings: Findings) -> Callable[[Any], None]:
    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        shown = 0
        for row in findings.rows:
            x, values = findings.curve(row)
            if row.apart or not len(x):
                continue
            shown += 1
            _band(axes, row, color(findings, row), x, values.T, size=2.5)
        _log_axis(axes)
        axes.set_xlabel(BUDGETS[findings.study.config.budget])
        axes.set_ylabel(findings.metric.name.replace(", ", ",\n"))
        _legend(figure, shown)

    return paint


def _band(axes: Any, row: Finding, hue: str, x: Any, seeds: Any, *, size: float) -> None:
    """A variant's mean over seeds at each x, and the band from lowest to highest. seeds: the values at each x."""
    label = _short(row.variant.name)
    means = [np.mean(each) for each in seeds]
    axes.plot(x, means, color=hue, linewidth=1.7, marker="o", markersize=size, label=label)
    if min(map(len, seeds)) > 1:
        low, high = [min(each) for each in seeds], [max(each) for each in seeds]
        axes.fill_between(x, low, high, color=hue, alpha=0.18, linewidth=0)


def _log_axis(axes: Any) -> None:
    """Distances on a logarithmic axis with plain numbers on it; a straight one where a value is not positive."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    low, high = axes.dataLim.intervaly
    if low > 0:
        axes.set_yscale("log")
        subs = (
            (1.0, 2.0, 3.0, 5.0)
            if high / low > 4
            else tuple(np.arange(1, 10, 0.5 if high / low < 1.6 else 1))
        )
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=subs))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_locator(LogLocator(base=10, subs=()))
    axes.grid(axis="y")
    axes.tick_params(length=0)


def _layers(findings: Findings, name: str, label: str) -> Callable[[Any], None]:
    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        rows = [row for row in findings.rows if name in row.health()]
        for row in rows:
            values = row.health()[name]
            layers = np.arange(1, values.shape[1] + 1)
            _band(axes, row, color(findings, row), layers, values.T, size=3.5)
        axes.set_xticks(np.arange(1, 1 + max(row.health()[name].shape[1] for row in rows)))
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        axes.tick_params(length=0)
        axes.set_xlabel("layer")
        axes.set_ylabel(label)
        _legend(figure, len(rows))

    return paint


def _lengths(findings: Findings) -> Callable[[Any], None]:
    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        shown = 0
        for row in findings.rows:
            found = findings.lengths(row)
            if row.apart or not found:
                continue
            shown += 1
            x = sorted(found)
            _band(axes, row, color(findings, row), x, [found[m] for m in x], size=4)
        multiples = findings.study.config.evaluate_at
        axes.set_xscale("log", base=2)
        axes.set_xticks(multiples, [f"{m}×" for m in multiples])
        axes.minorticks_off()
        _log_axis(axes)
        axes.set_xlabel(
            f"context, in multiples of the {findings.study.base.config['model']['block_size']} tokens trained on"
        )
        axes.set_ylabel(findings.metric.name.replace(", ", ",\n"))
        _legend(figure, shown)

    return paint


def _short(name: str) -> str:
    """A name that is not too long for a figure."""
    return name if len(name) <= 24 else name[:23] + "…"
