"""Learning-rate schedules: step and length of the run -> multiplier of every group's own rate."""

import math
from dataclasses import dataclass
from typing import ClassVar

from minilm.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Warm up linearly over `warmup` steps, then follow `shape`. None is the usual number, a fifth of a short run."""

    warmup: int | None = 0

    usual: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.warmup is not None and self.warmup < 0:
            raise ConfigError(f"schedule.warmup={self.warmup}: a number of steps, 0 or more, or null")

    def check(self, max_steps: int) -> None:
        """ConfigError where the warm-up outlasts the run."""
        if self.warmup is not None and self.warmup > max_steps:
            raise ConfigError(
                f"schedule.warmup={self.warmup} is longer than the run, train.max_steps={max_steps}: "
                "shorten the one, lengthen the other, or say schedule.warmup=null"
            )

    def __call__(self, step: int, max_steps: int) -> float:
        """The multiplier of step 0 … max_steps − 1."""
        warmup = min(self.usual, max_steps // 5) if self.warmup is None else self.warmup
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return self.shape((step - warmup) / max(1, max_steps - warmup))

    def shape(self, progress: float) -> float:
        """The multiplier after warm-up, `progress` from 0 to 1."""
        return 1.0


@dataclass(frozen=True)
class Constant(Schedule):
    """Full rate after the warm-up."""


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine down to `final` of the full rate (Loshchilov & Hutter 2017)."""

    final: float = 0.1

    usual = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_final(self.final)

    def shape(self, progress: float) -> float:
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Trapezoid(Schedule):
    """Full rate, then linearly down to `final` of it over the last `decay` of the run (Hägele et al. 2024)."""

    decay: float = 0.5
    final: float = 0.0

    usual = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_final(self.final)
        if not 0 < self.decay <= 1:
            raise ConfigError(f"schedule.decay={self.decay}: a share of the run, above 0 and at most 1")

    def shape(self, progress: float) -> float:
        return self.final + (1 - self.final) * min(1.0, (1 - progress) / self.decay)


def check_final(final: float) -> None:
    if not 0 <= final <= 1:
        raise ConfigError(f"schedule.final={final}: a share of the full rate, from 0 to 1")
