"""The loop: update, evaluate, report, save, resume. It knows nothing of the model's insides."""

import os
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from minilm import checkpoint as checkpoints
from minilm.attention.diagnostics import health
from minilm.attention.positions import at_least_float32
from minilm.checkpoint import Checkpoint
from minilm.console import Console
from minilm.data import TokenData, Windows
from minilm.errors import ConfigError
from minilm.evaluation import evaluate, perplexity
from minilm.files import clear_unfinished
from minilm.generation import Generator, encode_prompt
from minilm.model import GPT
from minilm.parallel import ALONE, World, local, whole
from minilm.plots import plot_loss
from minilm.runtime import autocast, seed_step
from minilm.sampling import Sampler
from minilm.schedule import Schedule
from minilm.tokenizer import Tokenizer
from minilm.tracking import AppendLog, MetricsLog, Tracker

MOST = 10**12  # steps, which no run reaches; what counts them is 64 bits wide
MOST_WINDOWS = 1 << 20  # at a time
HEALTH_WINDOWS = 2  # enough for means over thousands of rows

#: what `Trainer.restore` reads of a checkpoint's state, and the types that it was saved with
RESTORED: dict[str, tuple[type, ...]] = {
    "scaler": (dict,),
    "step": (int,),
    "seen": (int,),
    "train_seconds": (float,),
    "skipped": (int,),
    "best": (float,),
    "val_loss": (float, type(None)),
    "metrics_position": (int,),
    "samples_position": (int,),
    "wandb_run_id": (str, type(None)),
}

#: how a queue says that it wants the machine back; a job's runner may handle it, as submitit does
REQUEUE = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]


@dataclass(frozen=True)
class TrainConfig:
    """configs/train.yaml, section train.

    batch_size: windows an update. micro_batch_size: windows at a time, where memory is short; the gradient is the
    same. grad_clip: largest norm of the gradient, null for none. skip_nonfinite: updates that a run may leave out
    because their loss or gradient is not finite; the next one stops it. eval_interval, log_interval, save_interval:
    in steps; save_interval null saves at each evaluation. health_interval: steps between looks at the layers'
    scores and softmax (`attention.diagnostics.health`), null for none. keep: checkpoints kept besides the best.
    sample_prompt: null starts a paragraph. sample_tokens: 0 for no samples.
    """

    max_steps: int
    batch_size: int
    micro_batch_size: int | None = None
    grad_clip: float | None = 1.0
    skip_nonfinite: int = 0
    eval_interval: int = 250
    eval_batch_size: int = 64
    log_interval: int = 10
    health_interval: int | None = 100
    save_interval: int | None = None
    keep: int = 2
    sample_prompt: str | None = None
    sample_tokens: int = 200

    def __post_init__(self) -> None:
        positive = ("batch_size", "micro_batch_size", "eval_interval", "eval_batch_size", "log_interval")
        for key in (*positive, "health_interval", "save_interval", "keep"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"train.{key}={value}: a positive whole number")
        for key in ("max_steps", "sample_tokens", "skip_nonfinite"):
            if not 0 <= getattr(self, key) <= MOST:
                raise ConfigError(f"train.{key}={getattr(self, key)}: a whole number from 0 to {MOST:,}")
        for key in ("batch_size", "eval_batch_size"):
            if getattr(self, key) > MOST_WINDOWS:
                raise ConfigError(f"train.{key}={getattr(self, key)}: at most {MOST_WINDOWS:,} windows")
        if self.grad_clip is not None and not self.grad_clip > 0:
            raise ConfigError(f"train.grad_clip={self.grad_clip}: a positive number, or null for no clipping")


class Trainer:
    """Trains `model` on `data` and leaves everything it makes in the folder `run`.

    forward: the model as it is called in training (compiled, perhaps); its parameters are the model's.
    settings: the whole configuration, plain, as it goes into checkpoints. writer: a tracker, which shows the run
    elsewhere. picture: (height, width, 4) uint8 of a sample's ids, for trackers that take pictures; None for none.
    world: the processes that train together. hold: a context for micro-batches whose gradients may wait for the last.
    """

    def __init__(
        self,
        model: GPT,
        *,
        forward: Callable[[Tensor], Tensor],
        tokenizer: Tokenizer,
        data: TokenData,
        optimizers: list[Optimizer],
        schedule: Schedule,
        config: TrainConfig,
        run: Path,
        settings: dict[str, Any],
        seed: int,
        precision: str,
        writer: Tracker,
        picture: Callable[[list[int]], np.ndarray] | None = None,
        world: World = ALONE,
        hold: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.model, self.forward, self.tokenizer, self.data = model, forward, tokenizer, data
        self.optimizers, self.schedule, self.config = optimizers, schedule, config
        self.run, self.settings, self.seed, self.precision, self.writer = (
            run,
            settings,
            seed,
            precision,
            writer,
        )
        self.picture, self.world, self.hold = picture, world, hold
        self.run_id = writer.run_id  # what a tracker will know the run by when it goes on
        self.device = next(model.parameters()).device
        self.block_size = model.config.block_size
        self.windows = Windows(data.train, self.block_size, seed, data.mixed)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        self.step = 0
        self.seen = 0  # windows trained on: where the data goes on, whatever the batch size was
        self.seconds = 0.0  # the training clock: updates alone
        self.skipped = 0  # updates left out, their loss or gradient not being finite
        self.best = float("inf")
        self.val_loss: float | None = None
        self.resumed: Checkpoint | None = None
        self.saved_at: int | None = None
        self.stopped_by: int | None = None  # a signal, as all processes know
        self.signalled: int | None = None  # one that came to this process

    def restore(self, saved: Checkpoint) -> None:
        """Take up a run where its checkpoint left it; model and optimizers have their states already."""
        batch_size = saved.config.get("train", {}).get("batch_size", self.config.batch_size)
        state = {
            "skipped": 0,
            "seen": saved.step * batch_size,
        } | saved.state  # runs of old knew nothing of these
        for key, kinds in RESTORED.items():
            value = state.get(key)
            if key not in state or type(value) not in kinds or (type(value) is int and value < 0):
                raise ConfigError(
                    f"checkpoint {saved.path}: state.pt: {key} is {value!r:.80}, as no run saves it"
                )
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.seconds = state["step"], state["train_seconds"]
        self.seen, self.skipped = state["seen"], state["skipped"]
        self.best, self.val_loss = state["best"], state["val_loss"]
        self.resumed, self.saved_at = saved, saved.step
        self.run_id = self.writer.run_id or state["wandb_run_id"]

    def fit(self) -> None:
        """Train to the end, or until a signal; always leaves a checkpoint of the last whole step."""
        at = self.resumed.state if self.resumed else {}
        folder = self.run if self.world.main else None
        if folder:
            clear_unfinished(folder)
        self.metrics = MetricsLog(_log(folder, "metrics.jsonl"), resume_at=at.get("metrics_position", 0))
        self.samples = AppendLog(_log(folder, "samples.txt"), resume_at=at.get("samples_position", 0))
        with (
            self.metrics,
            self.samples,
            self._signals(),
            Console(self.config.max_steps, self.step) as self.console,
        ):
            if self.model.mask.lookahead > self.block_size:
                self.console.say(
                    "this mask shows each token its own target: the loss is no language-modelling loss"
                )
            while not self._stopped() and self.step < self.config.max_steps:
                started = time.perf_counter()
                loss, measured = self._update()
                self.step += 1
                self.seen += self.config.batch_size
                elapsed = time.perf_counter() - started
                self.seconds += elapsed
                speed = self.config.batch_size * self.block_size / elapsed
                self.console.progress(self.step, loss=loss, tokens_per_second=speed)
                self._report(loss, {**measured, "tokens_per_second": speed})
            self._save(best=False)
            self._plot()
            self._stopped()
            self._summarise()

    def _update(self) -> tuple[float, dict[str, float]]:
        """One step of every optimizer. Returns the mean loss in nats per token, and what else was measured."""
        c = self.config
        seed_step(self.seed, self.step, self.world.rank)
        rows = c.batch_size // self.world.size  # of the batch; each process reads its own
        first = self.seen + self.world.rank * rows
        batch = torch.from_numpy(self.windows.batch(first, rows))
        inputs, targets = batch[:, :-1], self.model.hide_leaks(batch[:, 1:])
        mean = gradients(
            self.forward,
            inputs.to(self.device),
            targets.to(self.device),
            windows=c.micro_batch_size or rows,
            precision=self.precision,
            scaler=self.scaler,
            world=self.world,
            hold=self.hold,
        )
        factor = self.schedule(self.step, c.max_steps)
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        norm = step(self.optimizers, self.model.parameters(), self.scaler, c.grad_clip, loss=mean)
        measured = {"lr": self.rates[0][0] * factor, "grad_norm": norm}
        if not np.isfinite(mean) or not (self.scaler.is_enabled() or np.isfinite(norm)):
            what = f"the loss is {mean} and the gradient's norm {norm}"
            if self.skipped == c.skip_nonfinite:
                self._fail(what)
            self.skipped += 1
            self.console.say(f"step {self.step}: {what}: left out ({self.skipped} of {c.skip_nonfinite})")
            measured["skipped"] = self.skipped
        return mean, measured

    def _report(self, loss: float, measured: dict[str, float]) -> None:
        """Log, evaluate, sample and save, whichever is due after this step."""
        c = self.config
        last = self.step == c.max_steps
        evaluating = self.step % c.eval_interval == 0 or last
        if evaluating:
            self._check_weights()
        record: dict[str, Any] = {}
        if self.step == 1 or self.step % c.log_interval == 0 or last or "skipped" in measured:
            record |= {"train/loss": loss, **measured}
        if c.health_interval and self.step % c.health_interval == 0:
            windows = torch.from_numpy(self.windows.batch(self.seen, HEALTH_WINDOWS))
            record |= health(self.model, windows[:, :-1])
        if evaluating and len(self.data.val) > 1:
            record |= self._evaluate()
        if record:
            tokens = self.seen * self.block_size
            record = {"step": self.step, "tokens": tokens, "train_seconds": round(self.seconds, 3), **record}
            self.metrics.write(record)
            self.writer.log(record, self.step)
        if evaluating:
            self._sample()
        better = "val/loss" in record and record["val/loss"] < self.best
        if better:
            self.best = record["val/loss"]
        due = evaluating if c.save_interval is None else self.step % c.save_interval == 0
        if better or due:
            self._save(best=better)
        if evaluating:
            self._plot()

    def _plot(self) -> None:
        if self.world.main:
            plot_loss(self.run, floor=self.data.floor)

    def _evaluate(self) -> dict[str, float]:
        self.val_loss = loss = evaluate(
            self.model,
            self.data.val,
            block_size=self.block_size,
            batch_size=self.config.eval_batch_size,
            autocast=autocast(self.device, self.precision),
            world=self.world,
        )
        self.console.say(f"step {self.step}: validation loss {nats_and_bits(loss, self.data)}")
        return {
            "val/loss": loss,
            "val/bits_per_byte": self.data.bits_per_byte(loss),
            "val/perplexity": perplexity(loss),
        }

    def _sample(self) -> None:
        c = self.config
        ahead = self.model.mask.lookahead
        if not c.sample_tokens or ahead == float("inf"):
            return
        prompt = sample_prompt(c.sample_prompt, self.tokenizer, self.data)
        if len(prompt) < ahead:  # a prefix is read as a whole: the text's own beginning
            prompt = [*prompt, *self.data.train[: int(ahead) - len(prompt)].tolist()]
        cached = 2 * ahead <= self.block_size  # else a full context would leave less than the prefix
        generator = Generator(self.model, Sampler(temperature=0.8, top_k=50), cache=cached)
        ids = list(prompt)
        for chosen in generator.tokens([prompt], c.sample_tokens, seed=self.seed + self.step):
            ids.append(int(chosen[0]))
        text = self.tokenizer.decode(ids[len(self.tokenizer.prompt_start) :]).strip("\n")
        self.console.sample(self.step, text)
        self.samples.write(f"--- step {self.step}\n{text}\n\n")
        self.writer.sample(text, self.step)
        if self.picture is not None and self.world.share(self.writer.wants_media):
            self.writer.picture("attention", partial(self.picture, ids), self.step)

    def _summarise(self) -> None:
        """What came out, where it lies, and what to type next."""
        data, rows = self.data, [("trained", f"{self.step} steps in {self.seconds:.1f} s")]
        if self.val_loss is not None:
            rows += [("validation loss", nats_and_bits(self.val_loss, data))]
        if data.floor is not None:
            rows += [("entropy floor", nats_and_bits(data.floor, data))]
        here = Path.cwd()
        run = str(self.run.relative_to(here) if self.run.is_relative_to(here) else self.run)
        command = f"python scripts/generate.py checkpoint={shlex.quote(run)}"
        if self.stopped_by is not None and self.step < self.config.max_steps:
            command = f"python scripts/train.py resume={shlex.quote(run)}"
            rows[0] = ("stopped", f"after step {self.step} of {self.config.max_steps}, saved")
        self.console.table([*rows, ("all of it is in", run), ("next", command)])

    def _save(self, *, best: bool) -> None:
        if self.saved_at == self.step and not best:
            return  # nothing has happened since
        self._check_weights()
        weights = self.world.gather(self.model.state_dict(keep_vars=True))
        optimizers = self.world.gather([optimizer.state_dict() for optimizer in self.optimizers])
        if self.world.main:
            checkpoints.save(
                self.run,
                self.step,
                weights=weights,
                state={
                    "step": self.step,
                    "seen": self.seen,
                    "optimizers": optimizers,
                    "scaler": self.scaler.state_dict(),
                    "train_seconds": self.seconds,
                    "skipped": self.skipped,
                    "best": self.best,
                    "val_loss": self.val_loss,
                    "metrics_position": self.metrics.position(),
                    "samples_position": self.samples.position(),
                    "wandb_run_id": self.run_id,
                    "source": self.data.source,
                },
                config=self.settings,
                tokenizer=self.tokenizer.to_dict(),
                best=best,
                keep=self.config.keep,
            )
        self.saved_at = self.step

    def _check_weights(self) -> None:
        """A finite loss can still make a last step to nowhere, which must not replace a good checkpoint."""
        lost = not all(bool(local(weight).isfinite().all()) for weight in self.model.parameters())
        if self.world.largest(lost):
            self._fail("the weights are no longer finite")

    def _fail(self, what: str) -> None:
        raise self.world.refusal(
            f"step {self.step}: {what}, training stops; {self.last_good()}; try a lower optim.lr, or "
            "train.skip_nonfinite=N to leave out up to N such updates"
        )

    def last_good(self) -> str:
        """What a run that breaks off has saved, for a person."""
        try:
            return f"the last good step is {self.saved_at}, in {checkpoints.find(self.run)}"
        except ConfigError:
            return "no checkpoint was saved yet"

    def _stopped(self) -> bool:
        """Whether a signal has come to any process."""
        self.stopped_by = self.world.largest(self.signalled or 0) or None
        return self.stopped_by is not None

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run after the step that is under way, and so does a queue's signal that somebody
        handles; a second SIGINT ends it at once.
        """

        def stop(number: int, frame: Any) -> None:
            if self.signalled == signal.SIGINT == number:
                raise KeyboardInterrupt
            self.signalled = number

        queue = [number for number in REQUEUE if callable(signal.getsignal(number))]
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, *queue)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _log(folder: Path | None, name: str) -> Path:
    """A file of the run's; where there is none, nowhere."""
    return folder / name if folder else Path(os.devnull)


def gradients(
    forward: Callable[[Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    windows: int,
    precision: str,
    scaler: torch.amp.GradScaler,
    world: World = ALONE,
    hold: Callable[[], AbstractContextManager] = nullcontext,
) -> float:
    """The mean loss in nats per token; its gradient, times the scaler's factor, is added to the parameters'.

    inputs, targets: (B, T), of which `windows` rows at a time are in memory; a target of −1 does not count. They are
    this process's part of the batch; the mean is over all parts. hold: see `Trainer`.
    """
    counted = world.sum(int((targets >= 0).sum()))
    mean = counted / world.size  # processes average their gradients, which are to be summed
    total = torch.zeros((), device=inputs.device)
    pieces = list(zip(inputs.split(windows), targets.split(windows), strict=True))
    for i, (x, y) in enumerate(pieces, start=1):
        with hold() if i < len(pieces) else nullcontext():
            with autocast(inputs.device, precision):
                logits = forward(x)
            logits = logits.to(at_least_float32(logits.dtype)).flatten(0, 1)
            loss = F.cross_entropy(logits, y.flatten(), ignore_index=-1, reduction="sum")
            scaler.scale(loss / mean).backward()
        total += loss.detach()
    return world.sum(float(total)) / counted


def step(
    optimizers: list[Optimizer],
    parameters: Iterable[nn.Parameter],
    scaler: torch.amp.GradScaler,
    limit: float | None,
    *,
    loss: float = 0.0,
) -> float:
    """Clip the gradient to a norm of `limit` (None: as it is), step and forget it; returns the norm it had.

    A gradient or a `loss` that is not finite moves nothing.
    """
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = float(whole(nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)))
    for optimizer in optimizers:
        if np.isfinite(loss) and (
            scaler.is_enabled() or np.isfinite(norm)
        ):  # a scaler looks at the norm itself
            scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    return norm


def nats_and_bits(loss: float, data: TokenData) -> str:
    return f"{loss:.4f} nats per token, {data.bits_per_byte(loss):.4f} bits per byte"


def sample_prompt(prompt: str | None, tokenizer: Tokenizer, data: TokenData) -> list[int]:
    """Ids that samples start from: the prompt, else the beginning of a document, or of a paragraph where there are
    none, else the training text's first token.
    """
    if not prompt and data.end is not None and not tokenizer.prompt_start:
        return [data.end]
    try:
        return encode_prompt(tokenizer, prompt or "\n\n")
    except ConfigError as error:
        if prompt:
            raise ConfigError(f"train.sample_prompt: {error}") from None
        return [*tokenizer.prompt_start, int(data.train[0])]
