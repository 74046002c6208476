"""What a bench is given, and what it gives back."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minilm.bench.measure import Progress
from minilm.bench.setting import Setting


@dataclass(frozen=True)
class Table:
    """Text in rows; the first column names the row, the others are numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Claim:
    """A prediction beside its measurement."""

    text: str
    expected: str
    measured: str
    holds: bool


@dataclass(frozen=True)
class Report:
    """tables, claims, notes: for people. data: what was measured, for JSON. draw: draws into a matplotlib figure."""

    title: str
    tables: list[Table]
    claims: list[Claim]
    data: dict[str, Any]
    draw: Callable[[Any], None]
    notes: list[str] = field(default_factory=list)


class Bench(ABC):
    """A measurement; its constructor's keywords are its file in configs/bench/."""

    @abstractmethod
    def run(self, setting: Setting, progress: Progress) -> Report: ...
