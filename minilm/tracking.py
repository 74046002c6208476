"""What a run leaves to read: metrics.jsonl and samples.txt always, Weights & Biases if it is asked for."""

import json
import math
import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from minilm.errors import ConfigError

CONNECT_SECONDS = 30  # how long wandb may try to reach its server before training goes on without it
FINISH_SECONDS = 60  # and how long it may take to deliver the rest at the end


class AppendLog:
    """A text file that only grows: each entry is in the file as soon as it is written.

    `position()` goes into a checkpoint; `resume_at` cuts the file back to there, so that a resumed run
    neither loses an entry nor writes one twice. A file that has become shorter meanwhile goes on at its end.
    """

    def __init__(self, path: Path | str, resume_at: int | None = None) -> None:
        self._file = open(path, "ab")  # noqa: SIM115 (closed by close)
        if resume_at is not None and resume_at < self._file.tell():
            self._file.truncate(resume_at)
            self._file.seek(resume_at)

    def write(self, entry: Any) -> None:
        self._file.write(self.render(entry).encode(errors="backslashreplace"))
        self._file.flush()

    def render(self, entry: Any) -> str:
        return entry

    def position(self) -> int:
        """The length in bytes, after the disk holds it all."""
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


# ---- Weights & Biases ----


class NoWandb:
    """Tracks nothing."""

    run_id: str | None = None
    url: str | None = None

    def log(self, record: Mapping[str, Any], step: int) -> None:
        pass

    def finish(self, exit_code: int = 0) -> None:
        pass


class Wandb(NoWandb):
    """Tracks a run with wandb. When wandb fails it says so once and falls silent; training never stops for it."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.run_id = run.id
        self.url = run.url  # None offline

    def log(self, record: Mapping[str, Any], step: int) -> None:
        if self._run is not None:
            self._try(lambda: self._run.log(dict(record), step=step))

    def finish(self, exit_code: int = 0) -> None:
        """Mark the run as finished, or as failed with an exit code other than 0."""
        if self._run is not None:
            self._try(lambda: self._run.finish(exit_code=exit_code))
        self._run = None

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            self._run = None
            warnings.warn(f"wandb failed, training goes on without it: {first_line(error)}", stacklevel=3)


def start_wandb(
    mode: str,
    project: str,
    name: str | None,
    group: str | None,
    config: dict[str, Any],
    run_dir: Path | str,
    run_id: str | None = None,
) -> NoWandb:
    """A tracker for one run, its files in `run_dir`; `run_id` (a checkpoint's) carries an earlier one on.

    mode: "disabled" (wandb is not even imported), "offline" (asks nothing and connects to nothing;
    `wandb sync` uploads it later) or "online". Online without a key or a connection is one warning and
    goes on offline. It never asks for a key.
    """
    if mode == "disabled":
        return NoWandb()
    if mode not in ("offline", "online"):
        raise ConfigError(f"wandb.mode={mode}: disabled, offline or online")
    if mode == "offline":
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its crash reporter would look up a host
    try:
        from wandb import Settings, init, setup
    except ImportError as error:
        cure = "pip install wandb, or set wandb.mode=disabled"
        raise ConfigError(f"wandb.mode={mode} needs the package wandb ({error}): {cure}") from None

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
    return NoWandb()


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
