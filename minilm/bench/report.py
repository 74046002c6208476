"""How results look: tables on the terminal and in a file, numbers in JSON, one picture."""

import io
import json
import platform
from pathlib import Path
from typing import Any, TextIO

import torch

from minilm.bench.base import Report, Table
from minilm.bench.setting import Setting
from minilm.files import write_atomic
from minilm.plots import BLUE, GREEN, INK, PALE, RED

COLORS = (RED, BLUE, GREEN, "#b7791f")


def print_table(table: Table, stream: TextIO) -> None:
    """A table with colours on a terminal, and plain text elsewhere."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    tty = stream.isatty()
    grid = Grid(box=SIMPLE_HEAD if tty else None, pad_edge=False, show_edge=False)
    for i, column in enumerate(table.columns):
        grid.add_column(Text(column), justify="right" if i else "left", no_wrap=not tty)
    for row in table.rows:
        grid.add_row(*map(Text, row))
    console = Console(file=stream, highlight=False, width=None if tty else 200)
    console.print(Text(table.title, style="bold"))
    console.print(grid)
    console.print()


def print_report(report: Report, stream: TextIO) -> None:
    claims = [[c.text, c.expected, c.measured, "yes" if c.holds else "NO"] for c in report.claims]
    for table in report.tables:
        print_table(table, stream)
    if claims:
        print_table(Table("Predictions", ["", "expected", "measured", "holds"], claims), stream)
    for note in report.notes:
        print(note, file=stream)


def write_report(name: str, report: Report, setting: Setting, folder: Path) -> list[Path]:
    """Writes FOLDER/NAME.txt, NAME.json and NAME.png and returns their paths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    text, json_file, picture = (folder / f"{name}.{kind}" for kind in ("txt", "json", "png"))
    lines = io.StringIO()
    print_report(report, lines)
    write_atomic(text, lines.getvalue())
    whole = {
        "bench": name,
        "machine": machine(setting),
        "config": setting.config,
        "claims": [vars(claim) for claim in report.claims],
        "notes": report.notes,
        **report.data,
    }
    write_atomic(json_file, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    report.draw(figure)
    figure.suptitle(report.title, fontsize=12, fontweight="bold")
    write_atomic(picture, canvas.print_png)
    return [text, json_file, picture]


def machine(setting: Setting) -> dict[str, Any]:
    """Where the numbers come from."""
    device = setting.device
    return {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device} {platform.machine()}",
        "precision": setting.precision,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def log_axes(figure: Any, place: tuple[int, int, int], x: str, y: str) -> Any:
    """Axes on which a power law is a straight line."""
    from matplotlib.ticker import StrMethodFormatter

    axes = figure.add_subplot(*place)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def show_seconds(seconds: float) -> str:
    """0.00123 as 1.23 ms, 4000 as 1 h 7 min."""
    if seconds >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60} min"
    if seconds >= 60:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def show_bytes(n: float) -> str:
    """1536 as 1.5 KiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if n >= 1024**power:
            return f"{n / 1024**power:.4g} {unit}"
    return f"{n:.0f} B"
