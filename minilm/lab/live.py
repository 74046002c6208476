"""The state of a study while its runs go on: a table on a terminal, a line now and then elsewhere."""

import sys
import threading
import time
from datetime import timedelta
from typing import Any, Self, TextIO

from minilm.lab.results import Result, read
from minilm.lab.study import Study

REFRESH_SECONDS = 1.0  # seldom: the thread that draws takes its time from training
COLORS = {"waiting": "dim", "running": "bold", "done": "green", "failed": "red"}


class Live:
    """Shows the runs of a study on `stream` for a `with` block, read from their folders by a thread."""

    def __init__(self, study: Study, stream: TextIO | None = None) -> None:
        self.study, self.jobs = study, study.jobs
        self.stream = stream or sys.stdout  # as it is now: a run sends its own output elsewhere
        self.results = [read(job, study.config.evaluate_at) for job in self.jobs]
        self._began, self._flops_before = time.monotonic(), self._flops()
        self._stop = threading.Event()
        self._screen: Any = None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if kept := sum(result.state == "done" for result in self.results):
            self._say(f"{kept} of {len(self.jobs)} runs are done already, and kept")
        if self.stream.isatty():
            from rich.console import Console
            from rich.live import Live as Screen

            console = Console(file=self.stream, highlight=False)
            self._screen = Screen(
                self._table(),
                console=console,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._screen.start()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._update()
        if self._screen is not None:
            self._screen.stop()

    def _watch(self) -> None:
        while not self._stop.wait(REFRESH_SECONDS):
            self._update()

    def _update(self) -> None:
        before, self.results = (
            self.results,
            [
                old if old.state == "done" else read(job, self.study.config.evaluate_at)
                for job, old in zip(self.jobs, self.results, strict=True)
            ],
        )
        if self._screen is not None:
            self._screen.update(self._table(), refresh=True)
            return
        for old, new in zip(before, self.results, strict=True):
            if new.state != old.state and new.state in ("done", "failed"):
                self._say(f"{_line(new)}; {self._left()}")

    def _say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def _flops(self) -> float:
        return sum(result.step * result.job.variant.cost.flops for result in self.results)

    def _left(self) -> str:
        """How many runs have ended, and how long the others will take by what the steps since the start took."""
        going = [result for result in self.results if result.state in ("waiting", "running")]
        rest = sum((r.job.variant.steps - r.step) * r.job.variant.cost.flops for r in going)
        done = self._flops() - self._flops_before
        text = f"{len(self.results) - len(going)} of {len(self.results)} runs have ended"
        if rest and done:
            seconds = (time.monotonic() - self._began) / done * rest
            text += f", about {timedelta(seconds=round(seconds))} left"
        return text

    def _table(self) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(
            box=SIMPLE_HEAD, pad_edge=False, title=Text(self.study.config.question), title_justify="left"
        )
        table.add_column("variant")
        for name in ("seed", "step", "loss", "left"):
            table.add_column(name, justify="right")
        table.add_column("", no_wrap=True, overflow="ellipsis")  # the report has reasons in full
        for result in self.results:
            job = result.job
            cells = [job.variant.name, str(job.seed), f"{result.step}/{job.variant.steps}", *_cells(result)]
            table.add_row(*(Text(cell) for cell in cells), style=COLORS[result.state])
        table.caption = Text(self._left())
        table.caption_justify = "left"
        return table


def _cells(result: Result) -> tuple[str, str, str]:
    """Loss, time left, and what else there is to say."""
    loss = result.loss if result.state == "done" else result.last("train/loss")
    left = ""
    if result.state == "running" and result.step:
        rest = result.seconds / result.step * (result.job.variant.steps - result.step)
        left = str(timedelta(seconds=round(rest)))
    note = result.reason if result.state == "failed" else result.state
    return ("" if loss is None else f"{loss:.4f}", left, note)


def _line(result: Result) -> str:
    job = result.job
    if result.state == "failed":
        return f"{job.variant.name}, seed {job.seed}: failed: {result.reason}"
    loss = f"validation loss {result.loss:.4f}" if result.loss is not None else "no validation loss"
    return f"{job.variant.name}, seed {job.seed}: {loss} after {result.step} steps, {result.seconds:.0f} s"
