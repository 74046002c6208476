"""A training step the plain way and the quick ways: tokens per second, the share of the machine, peak memory."""

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minilm.bench.base import Bench, Claim, Report, Table
from minilm.bench.child import answer
from minilm.bench.measure import Product, Progress, median_seconds
from minilm.bench.report import COLORS, show_bytes, show_seconds
from minilm.bench.setting import Run, Setting
from minilm.bench.training import TrainingStep
from minilm.console import short
from minilm.errors import ConfigError
from minilm.plots import INK

COMPILED = "compiled"
STEPS = 3  # of the process that is weighed
SQUARES = (1024, 2048, 4096)  # widths of the products that the machine's speed is measured by
SHARE = 0.2  # by which the planned memory may be off


class StepBench(Bench):
    """Whole updates of one model, each way in turn; then a process of its own for each way, to weigh it.

    ways: 'fp32' or 'bf16', and 'bf16 compiled'; the first is the one to compare with, the last the one to claim of.
    faster: at least so many times as fast. busy: at least this share of the rate of the best bf16 product.
    """

    def __init__(
        self, *, ways: list[str], faster: float, busy: float, repeats: int = 7, budget: float = 40.0
    ) -> None:
        for way in ways:
            precision, *rest = way.split()
            if precision not in ("fp32", "bf16") or rest not in ([], [COMPILED]):
                raise ConfigError(f"bench.ways: {way}: expected fp32 or bf16, and 'compiled' after it or not")
        if len(set(ways)) < max(2, len(ways)) or COMPILED in ways[0]:
            raise ConfigError(f"bench.ways={ways}: two or more, each once, the first not compiled")
        self.ways, self.faster, self.busy = ways, faster, busy
        self.repeats, self.budget = repeats, budget

    def run(self, setting: Setting, progress: Progress) -> Report:
        if setting.device.type != "cpu":
            raise ConfigError(
                f"device={setting.device}: this bench weighs a process on a CPU; for a GPU see gpu_check"
            )
        settings = {way: _setting_of(setting, way) for way in self.ways}
        batch, size = setting.config["train"]["batch_size"], setting.cost.model.block_size
        tokens = batch * size
        width = setting.cost.model.n_embd
        shapes = [(tokens, width, setting.cost.mlp.hidden or width), *((n, n, n) for n in SQUARES)]
        products = {" × ".join(map(str, shape)): Product(*shape) for shape in shapes}
        cases: dict[str, Callable[[], object]] = {way: TrainingStep(it) for way, it in settings.items()}
        cases |= products
        progress.expect(len(cases) * self.repeats + len(self.ways))
        seconds = median_seconds(
            cases, setting.device, repeats=self.repeats, budget=self.budget, progress=progress
        )
        del cases
        weights = {}
        for way, it in settings.items():
            weights[way] = answer(weigh, it.config)
            progress.step()
        flops = model_flops(setting)
        rates = {name: product.flops / seconds[name] for name, product in products.items()}
        best = max(rates, key=lambda name: rates[name])
        planned = {way: Run.of(it).memory.peak for way, it in settings.items()}
        plain, fast = self.ways[0], self.ways[-1]
        rows = [
            [
                way,
                show_seconds(seconds[way]),
                short(tokens / seconds[way]),
                f"{seconds[plain] / seconds[way]:.2f}",
                f"{flops / seconds[way] / rates[best]:.0%}",
                show_bytes(planned[way]),
                show_bytes(weights[way]["grown"]),
                show_bytes(weights[way]["peak"]),
            ]
            for way in self.ways
        ]
        columns = ["", "a step", "tokens/s", "×", "of the product", "planned", "grown", "process"]
        expected = {way: planned[way] + weights[way]["peak"] - weights[way]["grown"] for way in self.ways}
        off = {way: weights[way]["peak"] / expected[way] - 1 for way in self.ways}
        worst = max(off, key=lambda way: abs(off[way]))
        ratio, share = seconds[plain] / seconds[fast], flops / seconds[fast] / rates[best]
        heavier = weights[fast]["peak"] / weights[plain]["peak"]
        claims = [
            Claim(f"speed of {fast} over {plain}", f"≥ {self.faster}", f"{ratio:.2f}", ratio >= self.faster),
            Claim(
                f"FLOPs a second of {fast} over those of the best bf16 product",
                f"≥ {self.busy:.0%}",
                f"{share:.0%}",
                share >= self.busy,
            ),
            Claim(
                f"peak of the process over its own part and the plan, the worst: {worst}",
                f"within {SHARE:.0%}",
                f"{off[worst]:+.0%}",
                abs(off[worst]) <= SHARE,
            ),
            Claim(f"peak of the process, {fast} over {plain}", "≤ 1", f"{heavier:.2f}", heavier <= 1),
        ]
        return Report(
            title=f"A training step of {sum(setting.cost.parameters().values()):,} parameters, "
            f"{batch} windows of {size} tokens",
            tables=[
                Table("Training steps", columns, rows),
                Table(
                    "Products in bf16",
                    ["", "FLOPs per second"],
                    [[name, short(rate)] for name, rate in rates.items()],
                ),
            ],
            claims=claims,
            data={
                "rows": [
                    {"way": way, "seconds": seconds[way], "planned_bytes": planned[way], **weights[way]}
                    for way in self.ways
                ],
                "tokens": tokens,
                "flops": flops,
                "product_rates": rates,
            },
            draw=partial(_draw, self.ways, {way: tokens / seconds[way] for way in self.ways}, weights),
            notes=[
                "Time is the median of interleaved steps. FLOPs are the model's: three times its forward pass.",
                f"Memory is of {STEPS} steps in a process of its own: all of it at its peak, and what it grew by since "
                "a step of a tiny model, which is the process's own part. The plan is of uncompiled steps.",
            ],
        )


def weigh(config: dict[str, Any]) -> None:
    """Print what a process grows by in a few training steps."""
    small = config["model"] | {"n_layer": 1, "n_embd": 2 * config["model"]["n_head"], "block_size": 8}
    setting = Setting.of(config | {"model": small})
    TrainingStep(setting)()  # the libraries, and what they set up at their first use, are the process's own
    if config["compile"]:
        torch.compiler.reset()  # or the compiler takes the two models for one of varying shape
    before = peak_resident()
    step = TrainingStep(Setting.of(config))
    for _ in range(STEPS):
        step()
    peak = peak_resident()
    print(json.dumps({"grown": peak - before, "peak": peak}))


def peak_resident() -> int:
    """The most memory that this process has had resident, in bytes."""
    try:  # getrusage counts what the parent held when it started this process
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _setting_of(setting: Setting, way: str) -> Setting:
    precision, *rest = way.split()
    config = setting.config | {
        "precision": precision,
        "compile": "strict" if rest else False,
        "vocab_size": setting.vocab_size,
        "threads": torch.get_num_threads(),
    }
    return replace(setting, config=config, precision=precision)


def model_flops(setting: Setting) -> float:
    """Of a training step: three times those of a forward pass, whatever is made twice (Chowdhery et al. 2022)."""
    size = setting.cost.model.block_size
    return 3 * setting.cost.flops(size).total * size * setting.config["train"]["batch_size"]


def _draw(ways: list[str], speeds: dict[str, float], weights: dict[str, dict[str, int]], figure: Any) -> None:
    bars = (
        ("tokens per second", [speeds[way] for way in ways]),
        ("peak of the process, MiB", [weights[way]["peak"] / 2**20 for way in ways]),
    )
    for place, (label, values) in enumerate(bars, start=1):
        axes = figure.add_subplot(1, 2, place)
        axes.bar_label(axes.bar(ways, values, color=COLORS[: len(ways)], width=0.6), fmt="{:,.0f}")
        axes.set_ylabel(label, color=INK)
        axes.tick_params(colors=INK)
        axes.spines[["top", "right"]].set_visible(False)
