"""loss.png: the course of a run in one picture."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from minilm.console import short
from minilm.files import write_atomic
from minilm.tracking import read_metrics

BLUE, RED, GREEN, INK, PALE = "#3d6fb4", "#d1495b", "#2e7d32", "#6b7280", "#e5e7eb"


@contextmanager
def freed() -> Iterator[None]:
    """What is made within a block or a function is let go after it, though its parts hold one another, as those of a
    figure do: megabytes each time. Only what is new is looked through, which takes little.
    """
    collected = gc.isenabled()
    gc.disable()  # what is new stays in the youngest generation
    try:
        yield
    finally:
        if collected:
            gc.enable()
        gc.collect(0)


@freed()
def plot_loss(run: Path | str, *, floor: float | None = None) -> Path | None:
    """Draw RUN/loss.png from RUN/metrics.jsonl and return its path; None if no loss was measured yet.

    Losses and `floor`, the lowest loss that any model can reach on this text, are in nats per token.
    """
    run = Path(run)
    records = read_metrics(run / "metrics.jsonl")
    train, val = series(records, "train/loss"), series(records, "val/loss")
    if not len(train) and not len(val):
        return None

    # the object interface: pyplot keeps every figure in global state and looks for a display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot(xmargin=0.02)
    if len(train):
        axes.plot(*train.T, color=BLUE, alpha=0.3, linewidth=0.8, marker="." if len(train) == 1 else "")
        axes.plot(train[:, 0], smooth(train[:, 1]), color=BLUE, linewidth=1.8, label="training, smoothed")
    if len(val):
        axes.plot(*val.T, color=RED, linewidth=1.4, marker="o", markersize=4, label="validation")
    if floor is not None:
        axes.axhline(
            floor, color=GREEN, linewidth=1.3, linestyle=(0, (5, 3)), label=f"entropy floor {floor:.3f}"
        )
    axes.set_ylim(*limits(train[:, 1], val[:, 1], floor))

    axes.set_title(f"{title(run)}\n", loc="left", fontsize=12, fontweight="bold", parse_math=False)
    axes.text(0, 1.025, summary(records, val, floor), transform=axes.transAxes, color=INK, fontsize=9)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss, nats per token", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="upper right", edgecolor="none")
    path = run / "loss.png"
    write_atomic(path, canvas.print_png)
    return path


def series(records: list[dict[str, Any]], key: str) -> np.ndarray:
    """(n, 2): step and value of each record with this key; a null (a loss that was not finite) becomes NaN."""
    points = [(record["step"], record[key]) for record in records if key in record]
    return np.array(points, dtype=float).reshape(-1, 2)


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean of each point's neighbours on both sides: fewer at the start, where the loss falls steeply."""
    index = np.arange(len(values))
    reach = np.minimum(len(values) // 30, index // 3)
    low, high = index - reach, np.minimum(index + reach + 1, len(values))
    known = np.isfinite(values)
    total = np.cumsum(np.append(0.0, np.where(known, values, 0.0)))
    count = np.cumsum(np.append(0, known))
    return np.where(known, (total[high] - total[low]) / np.maximum(count[high] - count[low], 1), np.nan)


def limits(train: np.ndarray, val: np.ndarray, floor: float | None) -> tuple[float, float]:
    """The range of losses to show: the floor stays in sight, and a run that diverges leaves at the top."""
    train, val = train[np.isfinite(train)], val[np.isfinite(val)]
    known = np.concatenate([train, val])
    if not len(known):
        return 0.0, 1.0
    first = max([*train[:1], *val[:1]])
    low = known.min() if floor is None else min(known.min(), floor)
    high = max(first, min(np.percentile(known, 95), 1.5 * first), low + 0.1)
    margin = 0.05 * (high - low)
    return low - margin, high + margin


def title(run: Path) -> str:
    """The folder's name; below `runs` its whole path, since the folder itself may be named by a time alone."""
    parts = run.resolve().parts
    return "/".join(parts[parts.index("runs") + 1 :]) if "runs" in parts[:-1] else parts[-1]


def summary(records: list[dict[str, Any]], val: np.ndarray, floor: float | None) -> str:
    """One line: how much training, and what came of it."""
    last = records[-1]
    time = timedelta(seconds=round(last["train_seconds"]))
    facts = [f"{short(last['tokens'])} tokens", f"{time} of training"]
    if np.isfinite(val[:, 1]).any():
        step, loss = val[np.nanargmin(val[:, 1])]
        above = "" if floor is None else f", {loss - floor:.3f} above the floor"
        facts.append(f"best validation loss {loss:.4f} at step {step:.0f}{above}")
    return "  ·  ".join(facts)
