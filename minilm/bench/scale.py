"""How far a machine goes: for each model and context the speed, the costs, and the loss after as much time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from minilm.bench.base import Bench, Report, Table
from minilm.bench.generate import READ_BYTES, READERS
from minilm.bench.measure import Product, Progress, free_bytes, median_seconds
from minilm.bench.race import Curve, trained
from minilm.bench.report import COLORS, log_axes, show_bytes
from minilm.bench.setting import Run, Setting
from minilm.bench.step import SQUARES, model_flops
from minilm.bench.training import TrainingStep
from minilm.config import compose
from minilm.console import short
from minilm.errors import ConfigError
from minilm.resume import rooted

#: of the bench's own words
SHARED = ("data", "tokenizer", "seed", "device", "precision", "threads", "compile")


class ScaleBench(Bench):
    """Training of `models` at `contexts` tokens: a step timed, then a whole run of as many steps as fill `seconds`.

    models: a name, and the words of train.py that make it. tokens: of an update, whatever the context. Speeds stand
    beside the machine's own: its best product of matrices, and how fast it reads memory.
    """

    def __init__(
        self,
        *,
        models: dict[str, list[str]],
        contexts: list[int],
        tokens: int = 4096,
        seconds: float = 30.0,
        repeats: int = 5,
    ) -> None:
        if not models or not contexts or seconds <= 0 or repeats < 1:
            raise ConfigError("bench: it needs models, contexts, seconds and repeats")
        if odd := [n for n in contexts if n < 1 or tokens % n]:
            raise ConfigError(f"bench.contexts={odd}: each must divide bench.tokens={tokens}")
        self.models, self.contexts, self.tokens = models, contexts, tokens
        self.seconds, self.repeats = seconds, repeats

    def run(self, setting: Setting, progress: Progress) -> Report:
        cases = {(name, n): self.case(setting, name, n) for name in self.models for n in self.contexts}
        progress.expect(len(cases) * (self.repeats * (1 + len(SQUARES)) + 1) + len(READERS) * self.repeats)
        buffer = torch.ones(READ_BYTES // 4, device=setting.device)
        readers = {name: partial(read, buffer) for name, read in READERS.items()}
        timed = median_seconds(readers, setting.device, repeats=self.repeats, progress=progress)
        del buffer, readers
        read_rate = READ_BYTES / min(timed.values())
        rows: list[dict[str, Any]] = []
        for (name, context), run in cases.items():
            seconds, rate = self.time(run, progress)
            steps = max(1, round(self.seconds / seconds))
            curve = self.train(run, steps)
            progress.step()
            rows.append(
                {
                    "model": name,
                    "context": context,
                    "parameters": sum(run.setting.cost.parameters().values()),
                    "flops_per_token": run.setting.cost.flops(context, training=True).total,
                    "bytes": run.memory.peak,
                    "tokens_per_second": self.tokens / seconds,
                    "of_product": model_flops(run.setting) / seconds / rate,
                    "product_rate": rate,
                    "steps": steps,
                    "train_seconds": curve[-1][0],
                    "loss": curve[-1][1],
                }
            )
        best = max(row["product_rate"] for row in rows)
        precision = setting.precision
        return Report(
            title=f"Training for {self.seconds:g} seconds each, {self.tokens} tokens a step, {precision}",
            tables=[
                self.table(rows),
                Table(
                    "The machine",
                    ["", "a second"],
                    [
                        [f"FLOPs of the best {precision} product", short(best)],
                        ["bytes read from memory", short(read_rate)],
                    ],
                ),
            ],
            claims=[],
            data={"rows": rows, "bytes_read_per_second": read_rate},
            draw=partial(_draw, rows),
            notes=[
                "Memory is planned, FLOPs a token are of training. A step's time is the median of a few; the share is "
                "of the rate of the best product timed beside it. The loss is of the whole validation text, after a "
                f"run of about {self.seconds:g} seconds of updates."
            ],
        )

    def case(self, setting: Setting, name: str, context: int) -> Run:
        """The run of a model at a context. Raises ConfigError, which names the model, where there can be none."""
        words = [f"model.block_size={context}", f"train.batch_size={self.tokens // context}"]
        try:
            config = compose("train", [*self.models[name], *words])
            config = rooted(config | {key: setting.config[key] for key in SHARED})
            run = Run.of(Setting.of(config | {"vocab_size": setting.vocab_size}))
            if run.memory.peak > free_bytes(setting.device):
                raise ConfigError(f"a step takes {show_bytes(run.memory.peak)}, more memory than is free")
        except ConfigError as error:
            raise ConfigError(f"bench.models, {name}: {error}") from None
        return run

    def time(self, run: Run, progress: Progress) -> tuple[float, float]:
        """Seconds of a step, and FLOPs a second of the best of a few square products."""
        device, dtype = run.setting.device, run.setting.dtype
        products = {n: Product(n, n, n, device, dtype) for n in SQUARES}
        cases: dict[int, Callable[[], object]] = {0: TrainingStep(run.setting), **products}
        seconds = median_seconds(cases, device, repeats=self.repeats, budget=10, progress=progress)
        return seconds[0], max(product.flops / seconds[n] for n, product in products.items())

    def train(self, run: Run, steps: int) -> Curve:
        """A run of so many steps, evaluated in its end."""
        config = {key: value for key, value in run.setting.config.items() if key != "vocab_size"}
        train = config["train"] | {"max_steps": steps, "eval_interval": steps, "sample_tokens": 0}
        return trained(config | {"train": train | {"health_interval": None}})

    def table(self, rows: list[dict[str, Any]]) -> Table:
        columns = [
            "",
            "context",
            "parameters",
            "FLOPs a token",
            "memory",
            "tokens/s",
            "of the product",
            "loss",
        ]
        shown = [
            [
                row["model"],
                str(row["context"]),
                short(row["parameters"]),
                short(row["flops_per_token"]),
                show_bytes(row["bytes"]),
                short(row["tokens_per_second"]),
                f"{row['of_product']:.0%}",
                f"{row['loss']:.3f}",
            ]
            for row in rows
        ]
        return Table(f"Models and contexts; the loss after {self.seconds:g} s", columns, shown)


def _draw(rows: list[dict[str, Any]], figure: Any) -> None:
    for place, (key, label) in enumerate(
        (("tokens_per_second", "tokens per second"), ("loss", "validation loss, nats per token")), start=1
    ):
        axes = log_axes(figure, (1, 2, place), "parameters", label)
        axes.set_xscale("log", base=10)
        axes.xaxis.set_major_formatter(lambda n, _: short(n))
        for context, color in zip(sorted({row["context"] for row in rows}), COLORS, strict=False):
            points = sorted((row["parameters"], row[key]) for row in rows if row["context"] == context)
            axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, label=f"{context}")
        axes.legend(frameon=False, fontsize=8, title="context", title_fontsize=8)
