"""Several processes train as one does, leave one run behind, and end together.

A group is two or three processes over gloo, as torchrun would start them; each runs a list of commands. The second one
works in a folder of its own, as on another machine. All is in float64, so that differences show.
"""

import dataclasses
import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from minilm import checkpoint, launch, parallel, training
from minilm.config import CONFIGS, Command
from minilm.errors import ConfigError
from minilm.parallel import ALONE, World

CLOCK = {"train_seconds", "tokens_per_second"}
CLOSE = {"rtol": 0, "atol": 1e-10}
STEPS = ["train.batch_size=12", "train.micro_batch_size=2", "train.eval_interval=10", "train.grad_clip=0.5"]
#: tied and n-gram weights; and a norm that no gradient reaches, with matrices that no process holds whole
MODELS = {
    "adamw": ["optim=adamw", "model.tie_embeddings=true", "model.mlp=swiglu", "model.n_layer=2"],
    "muon": ["optim=muon", "model.mlp=none", "model.n_kv_head=1", "model.bias=true"],
}


@dataclasses.dataclass
class Said:
    """What a process of a group did with one command."""

    error: str = ""
    kind: str = ""
    step: int | None = None
    stopped_by: int | None = None
    starts: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    seeds: list[tuple[int, ...]] = dataclasses.field(default_factory=list)


@pytest.fixture(scope="module")
def asked(text_file):
    """asked(*words): what scripts/train.py makes of them."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):

        def command(*words: str, out_dir: str = "run") -> Command:
            words = (*TINY, f"data.path={text_file}", "model.dropout=0", *STEPS, *words, f"out_dir={out_dir}")
            config = OmegaConf.to_container(compose("train", overrides=list(words)), resolve=True)
            return Command(config, [word.partition("=")[0] for word in words], Path(out_dir), False)

        yield command


def run_all(commands, here: Path) -> list[Said]:
    """In this process, in float64, with everything slow left out."""
    os.chdir(here)
    launch.ROOT, training.plot_loss = here / "root", lambda *args, **options: None
    os.fsync = lambda descriptor: None
    torch.set_default_dtype(torch.float64)
    said = []
    for port, command, disturb in commands:
        os.environ["MASTER_PORT"] = str(port)
        said.append(it := Said())
        note(it, disturb if os.environ.get("RANK") == "1" else "")
        try:
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
        if n > 2:  # not the few that `health` looks at
            it.starts.append(tuple(found.tolist()))
        return found

    def seed_step(*place):
        it.seeds.append(place)
        SEED(*place)

    training.Trainer._update, training.Windows.starts, training.seed_step = update, starts, seed_step


def member(rank: int, size: int, commands, folder: Path) -> None:
    here = folder / f"rank{rank}"
    here.mkdir(parents=True, exist_ok=True)
    for number, stream in enumerate(("in", "out", "err")):
        os.dup2(os.open(here / stream, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    said = run_all(commands, here)
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(said))


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """group(size, [(command, disturbance), …]): the folder, exit codes and what each process said of each command."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["conftest", "minilm.launch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"]
    )

    def start(size, commands, folder=None):
        folder = folder or tmp_path_factory.mktemp("group")
        commands = [(free_port(), *each) for each in commands]
        processes = [
            context.Process(target=member, args=(r, size, commands, folder)) for r in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=300)
            process.kill()  # of no effect on one that has ended
        codes = [process.exitcode for process in processes]
        files = [folder / f"rank{r}.pickle" for r in range(size)]
        said = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
        return folder, codes, said

    return start


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def records(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in lines]


def assert_same_run(ours: Path, theirs: Path) -> None:
    """Losses, norms, rates, evaluations, weights and moments are those of the other run to 1e-10."""
    for a, b in zip(records(ours), records(theirs), strict=True):
        assert a == pytest.approx(b, rel=0, abs=1e-10)
    a, b = checkpoint.load(ours), checkpoint.load(theirs)
    torch.testing.assert_close(a.weights, b.weights, **CLOSE)
    assert all(weight.dtype == torch.float64 for weight in a.weights.values())
    torch.testing.assert_close(a.state["optimizers"], b.state["optimizers"], **CLOSE)
    assert (ours / "checkpoints/last").readlink() == (theirs / "checkpoints/last").readlink()
    assert (ours / "samples.txt").read_text() == (theirs / "samples.txt").read_text()


# ---- two and three processes, and one ----


@pytest.fixture(scope="module")
def alone(asked, tmp_path_factory):
    """What one process makes of each model, in a process of its own."""
    folder = tmp_path_factory.mktemp("alone")
    context = multiprocessing.get_context("forkserver")
    commands = [(0, asked(*MODELS[name], out_dir=name), "") for name in MODELS]
    process = context.Process(target=member, args=(0, 1, commands, folder))
    process.start()
    process.join(300)
    assert process.exitcode == 0, (folder / "rank0/err").read_text()
    return folder / "rank0", pickle.loads((folder / "rank0.pickle").read_bytes())


@pytest.fixture(scope="module")
def pair(asked, group):
    """All that two processes are asked to do, in one start."""
    whole = [
        (asked(*MODELS[name], f"parallel={how}", out_dir=f"{how}-{name}"), "")
        for how in ("ddp", "fsdp")
        for name in MODELS
    ]
    stopped = [
        (asked(*MODELS[name], f"parallel={how}", out_dir=f"stopped-{how}"), "SIGTERM")
        for how, name in (("ddp", "adamw"), ("fsdp", "muon"))
    ]
    refused = [
        (asked("train.batch_size=5", out_dir="five"), ""),
        (asked("data.path=in", out_dir="elsewhere"), ""),
        (asked("model.n_head=3", out_dir="three"), ""),
    ]
    return group(2, [*whole, *stopped, *refused])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_train_as_one(how, name, pair, alone):
    folder, codes, _ = pair
    assert codes == [0, 0], (folder / "rank0/err").read_text() + (folder / "rank1/err").read_text()
    assert_same_run(folder / "rank0" / f"{how}-{name}", alone[0] / name)
