"""Whole training runs against one another: how long each recipe trains, and to which loss."""

import json
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from minilm.bench.base import Bench, Claim, Report, Table
from minilm.bench.child import in_child
from minilm.bench.measure import Progress
from minilm.bench.report import COLORS, log_axes, show_seconds
from minilm.bench.setting import Setting
from minilm.config import Command, compose
from minilm.errors import ConfigError
from minilm.launch import train
from minilm.resume import rooted

Curve = list[tuple[float, float]]  # (seconds of the training clock, loss of the whole validation text)


class RaceBench(Bench):
    """The training run with one recipe and the other in turn, each seed anew, in processes of their own.

    Clocks are training clocks: all updates, the first one and any compilation included; evaluation and saving not.
    baseline, challenger: recipes; both train on the bench's own text. seeds: of the challenger; the first
    `baseline_seeds` of them are the baseline's as well. faster: claimed of the challenger's clock. loss: claimed of
    each challenger's last validation loss, at most.
    """

    def __init__(
        self,
        *,
        baseline: str,
        challenger: str,
        faster: float,
        loss: float,
        seeds: list[int],
        baseline_seeds: int = 1,
    ) -> None:
        if not seeds or not 1 <= baseline_seeds <= len(seeds):
            raise ConfigError(
                f"bench.seeds={seeds}, bench.baseline_seeds={baseline_seeds}: some, and 1 … of them"
            )
        self.recipes = {"baseline": baseline, "challenger": challenger}
        self.faster, self.loss = faster, loss
        self.seeds, self.baseline_seeds = seeds, baseline_seeds

    def run(self, setting: Setting, progress: Progress) -> Report:
        progress.expect(len(self.seeds) + self.baseline_seeds)
        curves: dict[str, dict[int, Curve]] = {name: {} for name in self.recipes}
        for i, seed in enumerate(self.seeds):
            for name, recipe in self.recipes.items():
                if name == "challenger" or i < self.baseline_seeds:
                    config = compose("train", [f"recipe={recipe}", f"seed={seed}", "train.sample_tokens=0"])
                    config |= {key: setting.config[key] for key in ("threads", "device", "compile")}
                    curves[name][seed] = trained(rooted(config | {"data": setting.config["data"]}))
                    progress.step()
        clock = median(curve[-1][0] for curve in curves["baseline"].values())
        ratios = {seed: clock / curve[-1][0] for seed, curve in curves["challenger"].items()}
        rows = [
            [f"{self.recipes[name]}, seed {seed}", show_seconds(curve[-1][0]), f"{curve[-1][1]:.4f}"]
            + [f"{clock / curve[-1][0]:.1f}"]
            for name, runs in curves.items()
            for seed, curve in runs.items()
        ]
        slowest, worst = min(ratios.values()), max(c[-1][1] for c in curves["challenger"].values())
        of = f"of {self.recipes['challenger']}, the worst of {len(self.seeds)} seeds"
        return Report(
            title=f"{self.recipes['challenger']} against {self.recipes['baseline']}",
            tables=[Table("Training", ["", "clock", "validation loss", "times as fast"], rows)],
            claims=[
                Claim(
                    f"clock of {self.recipes['baseline']} over that {of}",
                    f"≥ {self.faster:g}",
                    f"{slowest:.1f}",
                    slowest >= self.faster,
                ),
                Claim(f"validation loss {of}", f"≤ {self.loss:g}", f"{worst:.4f}", worst <= self.loss),
            ],
            data={"curves": curves, "ratios": ratios},
            draw=partial(_draw, self.recipes, curves),
            notes=[
                "Clocks hold updates alone, from the first one on. The loss is that of the whole validation text."
            ],
        )


def trained(config: dict[str, Any]) -> Curve:
    """A training run in a process and a folder of its own, which is then thrown away; ConfigError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        done = in_child(train_here, config, cwd=folder, capture_output=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise ConfigError(f"a run of the race failed: {reason[-1]}")
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return [(record["train_seconds"], record["val/loss"]) for record in records if "val/loss" in record]


def train_here(config: dict[str, Any]) -> None:
    """Train as a configuration says, in ./run."""
    train(Command(config | {"out_dir": "run"}, ["out_dir"], Path("run"), False))


def _draw(recipes: dict[str, str], curves: dict[str, dict[int, Curve]], figure: Any) -> None:
    axes = log_axes(figure, (1, 1, 1), "training clock, seconds", "validation loss, nats per token")
    axes.set_yscale("linear")
    for (name, recipe), color in zip(recipes.items(), COLORS, strict=False):
        for i, curve in enumerate(curves[name].values()):
            axes.plot(
                *zip(*curve, strict=True), color=color, marker="o", markersize=4, label="" if i else recipe
            )
    axes.legend(frameon=False, fontsize=8)
