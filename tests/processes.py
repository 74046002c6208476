"""A group of processes over gloo, as torchrun would start them: each runs a list of commands, in a folder of its own as
on a machine of its own, and tells what it did. For the tests of training in several processes.
"""

import dataclasses
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
from pathlib import Path

import torch
from crash import Disk, die

from minilm import launch, training
from minilm.errors import ConfigError

REQUEUED = 77


@dataclasses.dataclass
class Said:
    """What a process of a group did with one command."""

    error: str = ""
    kind: str = ""
    step: int | None = None
    stopped_by: int | None = None
    disk: list[str] = dataclasses.field(default_factory=list)
    starts: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    seeds: list[tuple[int, ...]] = dataclasses.field(default_factory=list)


def start_group(size: int, commands: list, folder: Path) -> tuple[Path, list[int | None], list]:
    """Processes of which each runs the commands, as `run_all` does. Returns the folder, their exit codes, and what each
    said of each command, None where it did not come to the end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["conftest", "minilm.launch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"]
    )
    commands = [(free_port(), *each) for each in commands]
    processes = [context.Process(target=member, args=(r, size, commands, folder)) for r in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
        process.kill()  # of no effect on one that has ended
    codes = [process.exitcode for process in processes]
    files = [folder / f"rank{r}.pickle" for r in range(size)]
    return folder, codes, [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def run_all(commands, here: Path) -> list[Said]:
    """In this process, in float64, with everything slow left out.

    A command is disturbed in its step 10, in the last process, by an error or by the signal of a name; or the first
    process is killed: at that operation of its disk, if it is a whole number, or after so many seconds.
    """
    os.chdir(here)
    launch.ROOT, training.plot_loss = here / "root", lambda *args, **options: None
    os.fsync = lambda descriptor: None
    said = []
    for port, command, disturb in commands:
        torch.set_default_dtype(torch.float64 if command.config["precision"] == "fp32" else torch.float32)
        os.environ["MASTER_PORT"] = str(port)
        said.append(it := Said())
        rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
        note(it, disturb if rank == last and isinstance(disturb, str) else "")
        disk = Disk(disturb if rank == 0 and isinstance(disturb, int) else None, die)
        it.disk = disk.names
        if rank == 0 and isinstance(disturb, float):
            threading.Timer(disturb, die).start()
        try:
            with disk.watch():
                trainer = launch.train(command)
            it.step, it.stopped_by = trainer.step, trainer.stopped_by
        except (ConfigError, ValueError) as error:
            it.error, it.kind = str(error), type(error).__name__
    return said


UPDATE, STARTS, SEED = training.Trainer._update, training.Windows.starts, training.seed_step


def note(it: Said, disturb: str) -> None:
    """Notes what training reads and draws; and in step 10 it is disturbed: by a signal to itself, or an error."""

    def update(self):
        if disturb and self.step == 10:
            if disturb == "error":
                raise ZeroDivisionError("a bug in one process")
            os.kill(os.getpid(), getattr(signal, disturb))
        return UPDATE(self)

    def starts(self, first, n):
        found = STARTS(self, first, n)
        if n != training.HEALTH_WINDOWS:
            it.starts.append(tuple(found.tolist()))
        return found

    def seed_step(*place):
        it.seeds.append(place)
        SEED(*place)

    training.Trainer._update, training.Windows.starts, training.seed_step = update, starts, seed_step


def member(rank: int, size: int, commands, folder: Path) -> None:
    here = folder / f"rank{rank}"
    here.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(REQUEUED))
    for number, stream in enumerate(("in", "out", "err")):
        os.dup2(os.open(here / stream, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(250, exit=True)
    said = run_all(commands, here)
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(said))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
