"""What scripts/plan.py does: the costs of a training run, before anything trains."""

import sys
from dataclasses import dataclass

from minilm.bench.base import Table
from minilm.bench.measure import Product, free_bytes, median_seconds
from minilm.bench.report import print_table, show_bytes, show_seconds
from minilm.bench.setting import Run, Setting
from minilm.bench.training import TrainingStep
from minilm.build import check
from minilm.config import Command
from minilm.console import short
from minilm.errors import ConfigError
from minilm.finetune import with_vocab_size
from minilm.launch import options_of


@dataclass(frozen=True)
class PlanConfig:
    """Of configs/plan.yaml, what is not of train.yaml or the vocabulary's size."""

    seconds: float

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ConfigError(f"seconds={self.seconds}: a number from 0 on, 0 for no measurement")


@dataclass(frozen=True)
class Pace:
    """Seconds of a step, and how they were found."""

    seconds: float
    how: str
    at_least: bool = False


def plan(command: Command) -> None:
    """Print the plan of the run that train.py would make of the same words. Raises ConfigError where it would."""
    options_of(command.config)
    config = with_vocab_size(command)
    seconds = PlanConfig(**check(PlanConfig, {"seconds": config["seconds"]}, "")).seconds
    setting = Setting.of(config)
    run = Run.of(setting)
    tables = [parameters(run), flops(run), memory(run), cache(run)]  # whatever is wrong is told here
    print(f"vocab_size={setting.vocab_size}: {setting.vocab_source}")
    print(f"device={setting.device} precision={setting.precision}\n")
    for table in tables:
        print_table(table, sys.stdout)
    if seconds:
        print_table(clock(run, measure(run, seconds)), sys.stdout)


def parameters(run: Run) -> Table:
    parts = {part: count for part, count in run.setting.cost.parameters().items() if count}
    parts["total"] = sum(parts.values())
    return Table("Parameters", ["", "numbers"], [[part, f"{count:,}"] for part, count in parts.items()])


def flops(run: Run) -> Table:
    cost = run.setting.cost
    size = cost.model.block_size
    forward, both = cost.flops(size), cost.flops(size, training=True)
    grows = cost.flops(2 * size).attention > 1.5 * forward.attention
    name = (
        "attention, all pairs: grows with the context"
        if grows
        else "attention: does not grow with the context"
    )
    rows = [
        [name, short(forward.attention), short(both.attention)],
        ["the rest", short(forward.rest), short(both.rest)],
        ["total", short(forward.total), short(both.total)],
    ]
    return Table(f"FLOPs per token, {size} tokens of context", ["", "forward", "forward+backward"], rows)


def memory(run: Run) -> Table:
    size, bytes_ = run.setting.cost.model.block_size, run.memory
    rows = {
        "weights": bytes_.weights,
        "gradients": bytes_.gradients,
        f"state of {run.optimizer}": bytes_.optimizer,
        "activations": bytes_.activations,
        "peak: gradients come as activations go": bytes_.peak,
    }
    title = f"Training memory, {run.windows} windows of {size} tokens at a time"
    return Table(title, ["", "bytes"], [[name, show_bytes(n)] for name, n in rows.items()])


def cache(run: Run) -> Table:
    cost = run.setting.cost
    size = cost.model.block_size
    kept = cost.cache_bytes(size)
    longer = ", and any longer one" if kept == cost.cache_bytes(2 * size) else ""
    row = [f"one text of {size} tokens{longer}", show_bytes(kept)]
    return Table("Cache while generating", ["", "bytes"], [row])


def measure(run: Run, seconds: float) -> Pace:
    """How fast this machine trains the model: by real steps where those are quick, else by its matrix products."""
    device = run.setting.device
    bound = run.flops / matmul_rate(run)
    if 10 * bound > seconds or 1.5 * run.memory.peak > free_bytes(device):
        return Pace(bound, "from the speed of its matrix products", at_least=True)
    step = TrainingStep(run.setting)
    return Pace(
        median_seconds({0: step}, device, repeats=9, budget=seconds)[0], "the median of a few real steps"
    )


def matmul_rate(run: Run) -> float:
    """FLOPs a second of the feed-forward layer's product, or of a square one where there is none, in its precision."""
    setting, cost = run.setting, run.setting.cost
    tokens, width, hidden = min(run.tokens, 4096), cost.model.n_embd, cost.mlp.hidden or cost.model.n_embd
    product = Product(tokens, width, hidden, setting.device, setting.dtype)
    return product.flops / median_seconds({0: product}, setting.device, repeats=7)[0]


def clock(run: Run, pace: Pace) -> Table:
    more = "at least " if pace.at_least else ""
    total = pace.seconds * run.train.max_steps
    rows = [
        ["a step", more + show_seconds(pace.seconds)],
        ["tokens per second", ("at most " if more else "") + short(run.tokens / pace.seconds)],
        ["FLOPs per second", short(run.flops / pace.seconds)],
        [f"{run.train.max_steps} steps, without evaluations and samples", more + show_seconds(total)],
    ]
    return Table(f"Time on this machine, {pace.how}", ["", ""], rows)
