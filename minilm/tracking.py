"""What a run leaves to read: metrics.jsonl and samples.txt always, trackers if they are asked for."""

import html
import importlib
import json
import math
import os
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from minilm.errors import ConfigError, first_line
from minilm.files import named, open_own

CONNECT_SECONDS = 30  # how long wandb may try to reach its server before training goes on without it
FINISH_SECONDS = 60  # and how long it may take to deliver the rest at the end


class AppendLog:
    """A text file that only grows: each entry is in the file as soon as it is written.

    `position()` goes into a checkpoint; `resume_at` cuts the file back to there, so that a resumed run
    neither loses an entry nor writes one twice. A file that has become shorter meanwhile goes on at its end.
    """

    def __init__(self, path: Path | str, resume_at: int | None = None) -> None:
        self._file = open_own(path)
        if resume_at is not None and resume_at < self._file.tell():
            self._file.truncate(resume_at)
            self._file.seek(resume_at)

    def write(self, entry: Any) -> None:
        with named(self._file.name):
            self._file.write(self.render(entry).encode(errors="backslashreplace"))
            self._file.flush()

    def render(self, entry: Any) -> str:
        return entry

    def position(self) -> int:
        """The length in bytes, after the disk holds it all."""
        with named(self._file.name):
            os.fsync(self._file.fileno())
            return self._file.tell()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class MetricsLog(AppendLog):
    """metrics.jsonl: one record a line. NaN and infinity, which JSON does not know, become null."""

    def render(self, entry: Mapping[str, Any]) -> str:
        return json.dumps(finite(entry), ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """The same value as JSON can hold it; numbers of numpy and torch become Python's own."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that was cut short (a killed run) is left out."""
    try:
        *lines, _unfinished = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; name the metrics.jsonl of a run") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise ConfigError(f"{path}: line {number} is not JSON; remove that line") from None
    return records


# ---- trackers ----


class Tracker:
    """Where a run is shown besides its own files. This one shows nothing."""

    run_id: str | None = None  # what an online service knows the run by
    wants_media = False  # whether samples and pictures are worth making

    def log(self, record: Mapping[str, Any], step: int) -> None:
        pass

    def sample(self, text: str, step: int) -> None:
        """A text that the model wrote."""

    def picture(self, name: str, make: Callable[[], np.ndarray], step: int) -> None:
        """make: returns (height, width, 3 or 4) uint8; called only where the picture is shown."""

    def finish(self, exit_code: int = 0) -> None:
        """Mark the run as finished, or as failed with an exit code other than 0."""


class Elsewhere(Tracker):
    """The trackers of another process, which this one helps to make pictures."""

    wants_media = True


class Trackers(Tracker):
    """Several at once. One that fails says so once and falls silent; training never stops for it."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)
        self.run_id = next((tracker.run_id for tracker in trackers if tracker.run_id), None)
        self.wants_media = any(tracker.wants_media for tracker in trackers)

    def log(self, record: Mapping[str, Any], step: int) -> None:
        self._each(lambda tracker: tracker.log(record, step))

    def sample(self, text: str, step: int) -> None:
        self._each(lambda tracker: tracker.sample(text, step))

    def picture(self, name: str, make: Callable[[], np.ndarray], step: int) -> None:
        if not self.wants_media:
            return
        try:
            image = make()
        except Exception as error:  # no tracker's fault: they all go on
            warnings.warn(
                f"no picture of {name}, training goes on without it: {first_line(error)}", stacklevel=2
            )
            return
        self._each(lambda tracker: tracker.picture(name, lambda: image, step))

    def finish(self, exit_code: int = 0) -> None:
        self._each(lambda tracker: tracker.finish(exit_code))
        self._trackers = []

    def _each(self, call: Callable[[Tracker], object]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                self.wants_media = any(other.wants_media for other in self._trackers)
                name = type(tracker).__name__.lower()
                warnings.warn(
                    f"{name} failed, training goes on without it: {first_line(error)}", stacklevel=3
                )


def start_trackers(
    wandb: Mapping[str, Any],
    tensorboard: bool,
    config: dict[str, Any],
    run_dir: Path | str,
    run_id: str | None,
    step: int,
) -> Trackers:
    """What the sections ask for, for a run in `run_dir` that begins, or goes on, after `step`."""
    trackers = [start_wandb(**wandb, config=config, run_dir=run_dir, run_id=run_id)]
    if tensorboard:
        trackers.append(TensorBoard(run_dir, step))
    return Trackers([tracker for tracker in trackers if tracker.wants_media])


def check_project(name: str) -> None:
    """ConfigError for a name that wandb would refuse when the run begins."""
    if found := set(name) & set("/\\#?%:"):
        raise ConfigError(f"wandb.project={name}: a name without {' '.join(sorted(found))}")


def check_packages(mode: str, tensorboard: bool) -> None:
    """ConfigError where a package that a tracker needs is not installed."""
    for package, extra, needed, said, off in (
        ("wandb", "", mode != "disabled", f"wandb.mode={mode}", "wandb.mode=disabled"),
        ("tensorboard", "[tensorboard]", tensorboard, "tensorboard=true", "tensorboard=false"),
    ):
        try:
            if needed:
                importlib.import_module(package)
        except ImportError as error:
            cure = f"pip install -e '.{extra}', or set {off}"
            raise ConfigError(f"{said} needs the package {package} ({error}): {cure}") from None


class TensorBoard(Tracker):
    """Event files in RUN/tensorboard, for `tensorboard --logdir runs`. A resumed run hides the steps it does anew."""

    wants_media = True

    def __init__(self, run_dir: Path | str, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(Path(run_dir) / "tensorboard"), purge_step=step + 1 if step else None
        )

    def log(self, record: Mapping[str, Any], step: int) -> None:
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def sample(self, text: str, step: int) -> None:
        indented = "\n".join(f"    {line}" for line in text.split("\n"))  # as it is: no markup
        self._writer.add_text("sample", indented, step)

    def picture(self, name: str, make: Callable[[], np.ndarray], step: int) -> None:
        self._writer.add_image(name, make(), step, dataformats="HWC")

    def finish(self, exit_code: int = 0) -> None:
        self._writer.close()


class Wandb(Tracker):
    """A run of Weights & Biases."""

    wants_media = True

    def __init__(self, run: Any) -> None:
        self._run = run
        self.run_id = run.id

    def log(self, record: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(record), step=step)

    def sample(self, text: str, step: int) -> None:
        from wandb import Html

        self._run.log({"sample": Html(f"<pre>{html.escape(text)}</pre>", inject=False)}, step=step)

    def picture(self, name: str, make: Callable[[], np.ndarray], step: int) -> None:
        from wandb import Image

        self._run.log({name: Image(make())}, step=step)

    def finish(self, exit_code: int = 0) -> None:
        self._run.finish(exit_code=exit_code)


def start_wandb(
    mode: Literal["disabled", "offline", "online"],
    project: str,
    name: str | None,
    group: str | None,
    config: dict[str, Any],
    run_dir: Path | str,
    run_id: str | None = None,
) -> Tracker:
    """A tracker for one run, its files in `run_dir`; `run_id` (a checkpoint's) carries an earlier one on.

    mode: "disabled" (wandb is not even imported), "offline" (asks nothing and connects to nothing;
    `wandb sync` uploads it later) or "online". Online without a key or a connection is one warning and
    goes on offline. It never asks for a key.
    """
    if mode == "disabled":
        return Tracker()
    if mode == "offline":
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its crash reporter would look up a host
    check_packages(mode, tensorboard=False)
    from wandb import Settings, init, setup

    Path(run_dir).mkdir(parents=True, exist_ok=True)
    # silent is what keeps wandb from asking for a key, if it is set before the first run
    settings = Settings(silent=True, console="off", init_timeout=CONNECT_SECONDS)
    if hasattr(settings, "finish_timeout"):  # older versions have none
        settings.finish_timeout = FINISH_SECONDS
    for attempt in ("online", "offline"):
        if attempt == "online" and mode == "offline":
            continue
        try:
            setup(settings)
            run = init(
                mode=attempt,
                project=project,
                name=name,
                group=group,
                config=config,
                dir=str(run_dir),
                id=run_id or secrets.token_hex(4),
                resume="allow" if run_id else None,
                reinit="create_new",  # several jobs in one process are several runs
                settings=settings,
            )
            return Wandb(run)
        except Exception as error:
            instead = "offline" if attempt == "online" else "without it"
            warnings.warn(
                f"wandb cannot run {attempt}, going on {instead}: {first_line(error)}", stacklevel=2
            )
    return Tracker()
