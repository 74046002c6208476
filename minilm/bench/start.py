"""How long a person waits before anything happens: for help, for the answer to a misspelt key, for the first step."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from minilm.bench.base import Bench, Claim, Report, Table
from minilm.bench.measure import Progress, median_seconds
from minilm.bench.report import COLORS, show_seconds
from minilm.bench.setting import Setting
from minilm.errors import ConfigError
from minilm.plots import INK
from minilm.words import CONFIGS

TRAIN = [sys.executable, str(CONFIGS.parent / "scripts" / "train.py")]
TORCH, HELP, MISSPELT, STEP = "import torch", "--help", "a misspelt key", "the first training step"
PATIENCE = 300.0  # seconds after which a run that has made no step is given up


class StartBench(Bench):
    """Whole processes, in turn; the default run of scripts/train.py, its corpus made and cached before.

    quick: help and a misspelt key take at most this share of the time that importing torch takes. step: seconds that
    the first step may come after that.
    """

    def __init__(self, *, quick: float, step: float, repeats: int = 5) -> None:
        if repeats < 1:
            raise ConfigError(f"bench.repeats={repeats}: a positive whole number")
        self.quick, self.step, self.repeats = quick, step, repeats

    def run(self, setting: Setting, progress: Progress) -> Report:
        cases: dict[str, Callable[[], object]] = {
            TORCH: partial(_finish, [sys.executable, "-c", "import torch"], 0),
            HELP: partial(_finish, [*TRAIN, "--help"], 0),
            MISSPELT: partial(_finish, [*TRAIN, "model.n_hed=4"], 2),
            STEP: _first_step,
        }
        progress.expect(len(cases) * self.repeats)
        seconds = median_seconds(cases, setting.device, repeats=self.repeats, least=0, progress=progress)
        share = {name: seconds[name] / seconds[TORCH] for name in (HELP, MISSPELT)}
        later = seconds[STEP] - seconds[TORCH]
        claims = [
            Claim(
                f"{name}: time over that of {TORCH}", f"≤ {self.quick}", f"{ratio:.2f}", ratio <= self.quick
            )
            for name, ratio in share.items()
        ]
        claims.append(
            Claim(
                f"{STEP} is done after {TORCH} by",
                f"≤ {self.step} s",
                show_seconds(later),
                later <= self.step,
            )
        )
        return Report(
            title="From the command to its answer",
            tables=[Table("Start", ["", "time"], [[name, show_seconds(s)] for name, s in seconds.items()])],
            claims=claims,
            data={"seconds": seconds},
            draw=partial(_draw, seconds),
            notes=["Whole processes, the medians of interleaved repeats, files in the system's cache."],
        )


def _finish(command: list[str], status: int) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == status, done.stderr


def _first_step() -> None:
    """Until metrics.jsonl of a run has its first line, which tells of step 1."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [*TRAIN, f"out_dir={run}"]
        with subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                deadline = time.monotonic() + PATIENCE
                while not _has_line(run / "metrics.jsonl"):
                    assert process.poll() is None, "the run ended before its first step"
                    assert time.monotonic() < deadline, "no step was made"
                    time.sleep(0.005)
            finally:
                process.kill()


def _has_line(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _draw(seconds: dict[str, float], figure: Any) -> None:
    axes = figure.add_subplot()
    bars = axes.barh(list(seconds), list(seconds.values()), color=COLORS[: len(seconds)], height=0.6)
    axes.bar_label(bars, fmt="{:.2f} s", padding=4)
    axes.invert_yaxis()
    axes.set_xlabel("seconds", color=INK)
    axes.tick_params(colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
