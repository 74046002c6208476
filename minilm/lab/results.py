"""What the runs of a study have left in their folders, finished or not."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from minilm import checkpoint as checkpoints
from minilm.errors import ConfigError
from minilm.lab.longer import LONGER
from minilm.lab.study import Job
from minilm.tracking import read_metrics

FAILED, LOG = "failed.txt", "log.txt"


@dataclass(frozen=True)
class Result:
    """One run. state: waiting, running (or stopped in its middle), failed, done. reason: of a failure."""

    job: Job
    state: str
    reason: str
    records: list[dict[str, Any]]

    def last(self, key: str) -> Any:
        """The newest value of a metric, None if there is none."""
        return next((r[key] for r in reversed(self.records) if r.get(key) is not None), None)

    @property
    def step(self) -> int:
        return self.records[-1]["step"] if self.records else 0

    @property
    def seconds(self) -> float:
        """Of training."""
        return self.records[-1]["train_seconds"] if self.records else 0.0

    @property
    def loss(self) -> float | None:
        """Validation loss at the end, nats per token."""
        return self.last("val/loss")

    @property
    def tokens_per_second(self) -> float | None:
        return self.records[-1]["tokens"] / self.seconds if self.seconds else None

    @cached_property
    def longer(self) -> dict[int, float | str]:
        """Validation losses by the multiple of the trained context, or why there is none."""
        try:
            found = json.loads((self.job.folder / LONGER).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return {int(multiple): value for multiple, value in found.items()}

    @cached_property
    def sample(self) -> str:
        """What the model wrote last; empty if nothing."""
        try:
            text = (self.job.folder / "samples.txt").read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
        return re.split(r"(?m)^--- step \d+\n", text)[-1].strip("\n")


def read(job: Job, evaluate_at: Sequence[int] = ()) -> Result:
    """The run of a job as it stands now."""
    try:
        records = read_metrics(job.folder / "metrics.jsonl")
    except ConfigError:
        records = []
    state, reason = "running" if records else "waiting", ""
    if (job.folder / FAILED).exists():
        state, reason = "failed", (job.folder / FAILED).read_text(encoding="utf-8")
    found = Result(job, state, reason, records)
    if (
        state != "failed"
        and _saved_step(job) == job.variant.steps
        and found.longer.keys() >= set(evaluate_at)
    ):
        return replace(found, state="done")
    return found


def _saved_step(job: Job) -> int | None:
    try:
        return int(checkpoints.find(job.folder).name.removeprefix("step_"))
    except (ConfigError, ValueError):
        return None
