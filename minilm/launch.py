"""From a command to a finished run: everything checked and built, the run folder, then the loop."""

import contextlib
import json
import os
import random
import signal
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
import yaml

from minilm import tokenizer as tokenizers
from minilm.attention.kernels import without_gradients
from minilm.build import Name, build_corpus, build_model, check, construct, load_weights, outline
from minilm.checkpoint import Checkpoint
from minilm.config import Command
from minilm.data import ROOT, Corpus, TokenData
from minilm.errors import ConfigError
from minilm.files import write_atomic
from minilm.finetune import start_from
from minilm.maps import picture_of
from minilm.model import GPT
from minilm.optim import Optim, load_states
from minilm.parallel import ALONE, Parallel, World, joined
from minilm.resume import alone_in, find_resumed, folder_of, merge, rooted
from minilm.runtime import (
    MachineConfig,
    compile_model,
    resolve_precision,
    set_deterministic,
    set_up_cpu,
)
from minilm.schedule import Schedule
from minilm.tokenizer import Tokenizer
from minilm.tracking import (
    Elsewhere,
    Trackers,
    check_packages,
    check_project,
    start_trackers,
    start_wandb,
)
from minilm.training import REQUEUE, TrainConfig, Trainer, sample_prompt
from minilm.trouble import machine_trouble


@dataclass(frozen=True)
class RunConfig(MachineConfig):
    """The top level of configs/train.yaml."""

    out_dir: Name
    resume: Name | None
    init_from: Name | None
    tensorboard: bool
    deterministic: bool = False  # older checkpoints do not say it


@dataclass(frozen=True)
class Parts:
    """What a run is made of, but for the model and the tokens."""

    options: RunConfig
    train: TrainConfig
    schedule: Schedule
    optim: Optim
    wandb: dict[str, Any]
    device: torch.device
    precision: str
    corpus: Corpus
    tokenizer: Tokenizer

    @classmethod
    def of(cls, settings: dict[str, Any], begins: Checkpoint | None = None, world: World = ALONE) -> Self:
        """All of it checked and built, for one process of `world`; the tokenizer is that of the checkpoint that the run
        begins with, if any.

        Raises ConfigError, and writes nothing.
        """
        options = options_of(settings)
        train = TrainConfig(**check(TrainConfig, settings["train"], "train"))
        if train.batch_size % world.size:
            fewer = train.batch_size // world.size * world.size
            raise ConfigError(
                f"train.batch_size={train.batch_size}: {world.size} processes cannot share so many windows equally; "
                f"say {fewer or world.size} or {fewer + world.size}, or start another number of processes"
            )
        schedule = construct(settings, "schedule", Schedule)
        schedule.check(train.max_steps)
        optim = construct(settings, "optim", Optim)
        wandb = check(start_wandb, settings["wandb"], "wandb", exclude=("config", "run_dir", "run_id"))
        check_project(wandb["project"])
        check_packages(wandb["mode"], options.tensorboard)
        device = world.device(options.device)
        precision = resolve_precision(options.precision, device)
        set_up_cpu(options.threads)
        set_deterministic(options.deterministic)
        if settings["attention"].get("backend") == "flex" and device.type != "cuda":
            raise without_gradients(device)
        corpus = build_corpus(settings)
        tokenizer = tokenizers.from_dict(begins.tokenizer) if begins else fit(settings, corpus)
        return cls(options, train, schedule, optim, wandb, device, precision, corpus, tokenizer)

    def tokens(self, block_size: int) -> TokenData:
        """The text as tokens. Raises ConfigError where it is too short, or a sample could not begin."""
        data = self.corpus.prepare(self.tokenizer, ROOT / "data" / "cache")
        data.check(block_size)
        sample_prompt(self.train.sample_prompt, self.tokenizer, data)  # an unknown character is refused now
        return data


def fit(settings: dict[str, Any], corpus: Corpus) -> Tokenizer:
    """The tokenizer that the configuration asks for, with an end token where there are documents to separate."""

    def make(texts: Iterable[str]) -> Tokenizer:
        return construct(settings, "tokenizer", Tokenizer, method="fit", texts=texts, end=corpus.documents)

    return corpus.fit(make, settings["tokenizer"], ROOT / "data" / "cache")


def train(command: Command) -> Trainer:
    """Train as `command` says, from the start or from a checkpoint: in this process, or with those that were started
    with it. Raises ConfigError before anything is written.
    """
    options_of(command.config)
    parallel = construct(command.config, "parallel", Parallel)
    # the stack is of what ends with the run: its folder is let go
    with joined(command.config["device"], parallel.timeout) as world, ExitStack() as stack:
        # shared, as a folder named by the clock is the main process's
        trainer = _train(world.share(command), world, stack)
    if trainer.stopped_by in REQUEUE:
        # all is saved: now whoever handled that signal before us may requeue the job
        signal.raise_signal(trainer.stopped_by)  # type: ignore[arg-type]
    return trainer


def _train(command: Command, world: World, stack: ExitStack) -> Trainer:
    trainer = _trainer(command, world, stack)
    exit_code = 1
    try:
        with machine_trouble(_memory(trainer.config, trainer.settings), trainer.last_good):
            trainer.fit()
        exit_code = 128 + trainer.stopped_by if trainer.stopped_by else 0
    finally:
        trainer.writer.finish(exit_code)
    return trainer


def _trainer(command: Command, world: World, stack: ExitStack) -> Trainer:
    """All that is needed to train, in the run's folder. A checkpoint that the run begins with is held no longer than
    this takes: it is as large as the model and what its optimizers remember.
    """
    settings, saved, source = world.on_main(lambda: _beginning(command))
    begins = saved or source

    def build() -> tuple[Parallel, Parts, GPT, TokenData]:
        parallel = construct(settings, "parallel", Parallel)
        parts = Parts.of(settings, begins, world)
        stack.enter_context(machine_trouble(_memory(parts.train, settings)))
        if begins:  # what does not fit is refused before it takes any memory
            outline(begins, parts.tokenizer, settings)
        torch.manual_seed(parts.options.seed)
        model = build_model(settings, parts.tokenizer.vocab_size, parts.tokenizer.end_token)
        return parallel, parts, model, parts.tokens(model.config.block_size)

    parallel, parts, model, data = world.together(build)
    world.alike({"data": data.source, "precision": parts.precision})
    if begins:
        world.on_main(lambda: load_weights(model, begins))
    wrapped, hold = parallel.spread(model, model.blocks, parts.device, world)
    forward = world.together(lambda: compile_model(wrapped, parts.options.compile))
    optimizers = parts.optim.build(model)
    if saved:
        if saved.state.get("source") != data.source:
            raise world.refusal("data: the text is not the one that the run to resume was trained on")
        states = world.spread(saved.state.get("optimizers", []), optimizers)
        world.together(lambda: load_states(optimizers, states))

    run = world.on_main(lambda: folder_of(saved, command) if saved else _new_folder(command))
    world.on_main(lambda: stack.enter_context(alone_in(run)))
    settings = rooted(settings) | {"out_dir": str(run), "resume": None}
    run_id = saved.state.get("wandb_run_id") if saved else None
    writer = Trackers([Elsewhere()])
    if world.main:
        writer = start_trackers(
            parts.wandb,
            parts.options.tensorboard,
            config=settings,
            run_dir=run,
            run_id=run_id,
            step=saved.step if saved else 0,
        )
        write_atomic(run / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        _point_latest(run)
    trainer = Trainer(
        model,
        forward=forward,
        tokenizer=parts.tokenizer,
        data=data,
        optimizers=optimizers,
        schedule=parts.schedule,
        config=parts.train,
        run=run,
        settings=settings,
        seed=parts.options.seed,
        precision=parts.precision,
        writer=writer,
        picture=picture_of(model, parts.tokenizer, settings),
        world=world,
        hold=hold,
    )
    if saved:
        trainer.restore(saved)
    return trainer


def _memory(train: TrainConfig, settings: dict[str, Any]) -> str:
    """What takes the memory of a run, and what to lower."""
    return (
        f"train.batch_size={train.batch_size}, train.micro_batch_size={json.dumps(train.micro_batch_size)}, "
        f"train.eval_batch_size={train.eval_batch_size} and the context model.block_size="
        f"{settings['model'].get('block_size')}: lower train.micro_batch_size first, which changes no result, or "
        "train.eval_batch_size, or the context; scripts/plan.py tells what a run needs"
    )


def _beginning(command: Command) -> tuple[dict[str, Any], Checkpoint | None, Checkpoint | None]:
    """The configuration, the checkpoint to go on from, and the one whose weights a new run begins with."""
    started, source = start_from(command)
    saved = find_resumed(command)
    settings = merge(saved, command) if saved else started
    return settings | {"wandb": _grouped(settings["wandb"], command)}, saved, source


def _grouped(wandb: dict[str, Any], command: Command) -> dict[str, Any]:
    """The runs of a sweep belong together, unless it was said otherwise."""
    if command.sweep is None or wandb.get("group") is not None:
        return wandb
    return wandb | {"group": "-".join(command.sweep.parts[-2:])}


def options_of(settings: dict[str, Any]) -> RunConfig:
    """The top level of a run's configuration. Raises ConfigError for what is none."""
    top = {
        key: value for key, value in settings.items() if key in {field.name for field in fields(RunConfig)}
    }
    return RunConfig(**check(RunConfig, top, ""))


def _new_folder(command: Command) -> Path:
    """Makes the run's folder. A named one must not hold a run; the default one gets a name of its own."""
    folder = command.out_dir
    log = folder / "metrics.jsonl"  # an empty one is of a run that came to nothing
    holds_run = os.path.exists(folder / "checkpoints") or (os.path.exists(log) and os.stat(log).st_size > 0)
    if holds_run and not command.default_out_dir and command.config["resume"] != "auto":
        raise ConfigError(
            f"out_dir={folder} holds a run already: say resume=auto to go on with it, or name another"
        )
    n = 1
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=not command.default_out_dir)
            return folder.resolve()
        except FileExistsError:
            if not command.default_out_dir:
                raise ConfigError(f"out_dir={folder} is a file: name a folder") from None
            n += 1
            folder = command.out_dir.with_name(f"{command.out_dir.name}-{n}")
        except OSError as error:
            raise ConfigError(f"out_dir={folder}: cannot be made ({error.strerror})") from None


def _point_latest(run: Path) -> None:
    """runs/latest, beside where the command was started, leads to the newest run."""
    latest = Path("runs/latest")
    aside = latest.with_name(f".latest-{os.getpid()}-{random.getrandbits(32):08x}")
    try:
        latest.parent.mkdir(exist_ok=True)
        aside.symlink_to(os.path.relpath(run, latest.parent))
        os.replace(aside, latest)
    except OSError as error:  # a folder that cannot be written, a system without symlinks
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        warnings.warn(f"{latest} was not set ({error.strerror}): name the run folder instead", stacklevel=2)
