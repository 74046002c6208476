"""A disk that stands still at a chosen operation, for the tests of what a crash, a signal or a full disk leaves."""

import builtins
import errno
import io
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

#: calls by which a program changes what a disk holds; beside them `open` to write, and each `write` of the system
CALLS = ("fsync", "mkdir", "rename", "replace", "symlink", "link", "unlink", "rmdir", "utime")
GROWING = ("open", "write", "mkdir", "symlink", "link")  # what a full disk refuses


class Killed(BaseException):
    """Stands for SIGKILL in a process that has to live on."""


class Disk:
    """Counts operations; from number `at` on, `strike` is called before each of them; of a write, in its middle.

    only: the operations that count. names: those there were.
    """

    def __init__(
        self, at: int | None = None, strike: Callable[[], object] = lambda: None, only: tuple[str, ...] = ()
    ) -> None:
        self.at, self.strike, self.only = at, strike, only
        self.names: list[str] = []

    def reaches(self, name: str) -> bool:
        if self.only and name not in self.only:
            return False
        self.names.append(name)
        return self.at is not None and len(self.names) >= self.at

    def stop(self, name: str) -> None:
        if self.reaches(name):
            self.strike()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watches the operations of this process."""
        with ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(patch.object(os, name, self._watched(name, getattr(os, name))))
            stack.enter_context(patch.object(builtins, "open", self._open(builtins.open)))
            yield

    def _watched(self, name: str, real: Callable) -> Callable:
        def call(*arguments, **options):
            if not (name == "mkdir" and os.path.isdir(arguments[0])):  # which only looks
                self.stop(name)
            return real(*arguments, **options)

        return call

    def _open(self, real: Callable) -> Callable:
        disk = self

        class Raw(io.FileIO):
            def write(self, data) -> int:
                if not disk.reaches("write"):
                    return super().write(data)
                written = super().write(bytes(data)[: len(data) // 2]) if len(data) > 1 else 0
                disk.strike()
                return written or super().write(data)

            def truncate(self, size=None) -> int:
                disk.stop("truncate")
                return super().truncate(size)

        def opened(file, mode="r", *arguments, **options):
            if mode not in ("wb", "ab"):
                return real(file, mode, *arguments, **options)
            disk.stop("open")
            return io.BufferedWriter(Raw(file, mode))

        return opened


def dead() -> None:
    """From now on nothing more happens on the disk: what is left is what a SIGKILL leaves."""
    raise Killed


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ticking() -> SimpleNamespace:
    """A clock that goes on by one second each time it is looked at: all that is written is then the same each time."""
    ticks = itertools.count()
    return SimpleNamespace(perf_counter=lambda: float(next(ticks)), time_ns=time.time_ns)


WATCHED = ExitStack()  # lives as long as the process


def in_this_process(at: int | None = None, tally: Path | None = None) -> None:
    """For the start of a process of its own: it is killed at operation `at`; `tally` gets the names of all it did."""
    from minilm import training

    training.time = ticking()  # type: ignore[assignment]
    disk = Disk(at, die)
    WATCHED.enter_context(disk.watch()) if tally is None else _tallied(disk, tally)


def _tallied(disk: Disk, tally: Path) -> None:
    from multiprocessing.util import Finalize

    watching = disk.watch()
    watching.__enter__()

    def write() -> None:
        watching.__exit__(None, None, None)
        tally.write_text("\n".join(disk.names))

    Finalize(None, write, exitpriority=0)
