"""What a person sees while a model trains: a live bar on a terminal, plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self, TextIO

LINE_SECONDS = 5.0  # between two plain progress lines
BAR_LINE_SECONDS = 20.0  # between two lines where a bar is not to be had
REDRAW_SECONDS = 0.25  # between two redrawings of the bar

# Control characters other than newline and tab, as symbols: a model may sample an escape sequence.
SYMBOLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
SYMBOLS |= {0x7F: "\N{SYMBOL FOR DELETE}"} | {code: f"\\x{code:x}" for code in range(0x80, 0xA0)}


class Console:
    """Shows training from step `start` to `max_steps` on `stream` (standard output), for a `with` block.

    Text appears as it is: nothing in it is markup, control characters are shown and not obeyed, and what the
    encoding of the terminal lacks is escaped.
    """

    def __init__(self, max_steps: int, start: int = 0, stream: TextIO | None = None) -> None:
        self.max_steps, self.start = max_steps, start
        self.stream = stream or sys.stdout
        self._bar: Any = None  # rich's, while it lives
        self._began = time.monotonic()
        self._shown = -float("inf")

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self.stream.isatty() and os.environ.get("TERM") != "dumb":
            self._bar = live_bar(self.stream)
            self._task = self._bar.add_task(
                "", total=self.max_steps, completed=self.start, loss="", speed="", left=""
            )
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def progress(self, step: int, *, loss: float, tokens_per_second: float) -> None:
        """Cheap enough for every step: shows it now and then, and the last one always."""
        now = time.monotonic()
        pause = LINE_SECONDS if self._bar is None else REDRAW_SECONDS
        if now - self._shown < pause and step < self.max_steps:
            return
        self._shown = now
        seconds = (now - self._began) / max(step - self.start, 1) * (self.max_steps - step)
        shown = {
            "loss": f"loss {loss:.4f}",
            "speed": f"{short(tokens_per_second)} tokens/s",
            "left": f"{timedelta(seconds=round(seconds))} left",
        }
        if self._bar is None:
            self.say("  ".join([f"step {step}/{self.max_steps}", *shown.values()]))
        else:
            self._bar.update(self._task, completed=step, **shown)
            self._bar.refresh()

    def say(self, text: str) -> None:
        """A line of text, above the bar."""
        self._print(text)

    def sample(self, step: int, text: str) -> None:
        """A text that the model wrote, set apart by a heading and an indent."""
        self._print(f"--- sample at step {step}", style="dim")
        self._print(text, indent=4)

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Names and values, in two columns."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self._print(f"{name:<{width}}  {value}")

    def _print(self, text: str, *, indent: int = 0, style: str = "") -> None:
        encoding = self.stream.encoding or "utf-8"
        text = text.translate(SYMBOLS).encode(encoding, "backslashreplace").decode(encoding)
        if self._bar is None:
            lines = [" " * indent + line if line else "" for line in text.split("\n")]
            self.stream.write("\n".join(lines) + "\n")
            self.stream.flush()
        else:
            from rich.padding import Padding
            from rich.text import Text

            line = Text(text, style=style, overflow="fold")
            # without an indent the terminal wraps, so that a long path can be copied whole
            self._bar.print(Padding(line, (0, 0, 0, indent)) if indent else line, soft_wrap=not indent)


def live_bar(stream: TextIO) -> Any:
    """A bar that draws when told to: a thread that redraws it would take time from training."""
    from rich.console import Console as Terminal
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("loss", "speed", "left")]
    terminal = Terminal(file=stream, markup=False, emoji=False, highlight=False)
    return Progress(
        TextColumn("step"), MofNCompleteColumn(), BarColumn(), *columns, console=terminal, auto_refresh=False
    )


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Shows on standard error how much of some work is done: a bar on a terminal, elsewhere a line now and then. The
    block calls it with (done, total), or None for a total that is not known."""
    from rich.console import Console as Terminal
    from rich.progress import Progress

    terminal, shown = Terminal(stderr=True), time.monotonic()
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def show(done: int, total: int | None) -> None:
            nonlocal shown
            now = time.monotonic()
            if terminal.is_terminal:
                progress.update(task, completed=done, total=total)
            elif now - shown > BAR_LINE_SECONDS:
                shown = now
                of = f"{done / total:.0%}" if total else f"{done:,}"
                print(f"{what}: {of} done", file=sys.stderr, flush=True)

        yield show


def short(number: float) -> str:
    """1234567 as 1.23 M."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"
