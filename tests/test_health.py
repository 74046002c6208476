"""A long run is as healthy at its end as at its beginning: memory, open files, time a step and a token."""

import gc
import os
import subprocess
import sys
import time
import tracemalloc
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
from conftest import ROOT
from scipy.stats import trim_mean
from torch import nn

from minilm.attention import Causal, MultiHeadAttention, SlidingWindow
from minilm.generation import Generator
from minilm.model import GPT, GPTConfig
from minilm.training import Trainer

MIB = 2**20
#: of the whole run's memory; what is kept of each token is its id, in two lists of Python's
MAY_GROW = 4 * MIB
BYTES_A_TOKEN = 16
SLOWER = 1.1  # the last tenth over the first
SMALLEST = [
    *("data=file", "threads=1", "device=cpu", "precision=fp32", "model.n_layer=1", "model.n_head=1"),
    *("model.n_embd=8", "model.block_size=8", "model.ngrams=[]", "train.batch_size=1", "optim=adamw"),
]


# ---- the whole way: processes as a person starts them, watched from outside ----


@dataclass(frozen=True)
class Look:
    """At a process: seconds of the processor it has had, bytes of memory, open files, steps or tokens done."""

    seconds: float
    memory: int
    files: int
    done: int


def watch(command, done, *, cwd, out, every=0.5):
    """Looks at a process until it has ended well. done: how far it is, as its output tells."""
    looks = []
    with open(out, "wb") as stream:
        process = subprocess.Popen(command, cwd=cwd, stdout=stream, stderr=subprocess.PIPE)
        proc, page, ticks = (
            Path("/proc") / str(process.pid),
            os.sysconf("SC_PAGE_SIZE"),
            os.sysconf("SC_CLK_TCK"),
        )
        while process.poll() is None:
            try:
                memory = int((proc / "statm").read_text().split()[1]) * page
                fields = (proc / "stat").read_text().rpartition(")")[2].split()
                seconds = (int(fields[11]) + int(fields[12])) / ticks
                looks.append(Look(seconds, memory, len(os.listdir(proc / "fd")), done()))
            except (OSError, ValueError, IndexError):  # it has just ended
                break
            time.sleep(every)
        _, err = process.communicate()
    assert process.returncode == 0, err.decode()
    return [look for look in looks if look.done]


def tenths(looks):
    """The looks at the first tenth of the work, once it is under way, and at the last."""
    begin, end = looks[0].done, looks[-1].done
    tenth = (end - begin) / 10
    return [k for k in looks if k.done <= begin + tenth], [k for k in looks if k.done >= end - tenth]


def pace(looks):
    """Seconds of the processor for one step or token: what else the machine does hardly counts."""
    gaps = [(b.seconds - a.seconds) / (b.done - a.done) for a, b in pairwise(looks) if b.done > a.done]
    return trim_mean(gaps, 0.25)


def assert_healthy(looks, unit, kept=0):
    """kept: bytes that the work may well keep."""
    first, last = tenths(looks)
    memory, files = (
        [median(getattr(look, name) for look in part) for part in (first, last)]
        for name in ("memory", "files")
    )
    paces = pace(first), pace(last)
    print(
        f"\n{looks[-1].done:,} {unit}s in {looks[-1].seconds - looks[0].seconds:,.0f} s of CPU, first tenth and last: "
        f"memory {memory[0] / MIB:.1f} and {memory[1] / MIB:.1f} MiB, open files {files[0]:.0f} and {files[1]:.0f}, "
        f"{1e6 * paces[0]:.0f} and {1e6 * paces[1]:.0f} µs a {unit}"
    )
    assert memory[1] - memory[0] <= MAY_GROW + kept
    assert files[1] <= files[0]
    assert paces[1] <= SLOWER * paces[0]


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="looks into /proc")


@pytest.mark.slow
@needs_proc
def test_fifty_thousand_steps(tmp_path, text_file):
    steps = 50_000
    command = [
        sys.executable,
        str(ROOT / "scripts" / "train.py"),
        *SMALLEST,
        f"data.path={text_file}",
        "out_dir=run",
    ]
    command += [f"train.max_steps={steps}", "train.eval_interval=5000", "train.log_interval=100"]
    metrics = tmp_path / "run" / "metrics.jsonl"

    def done():
        *_, last = metrics.read_bytes().rstrip().rsplit(b'"step": ', 1)
        return int(last.split(b",")[0])

    looks = watch(command, done, cwd=tmp_path, out=tmp_path / "out")
    assert_healthy(looks, "step")


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("words", [[], ["mask=sliding", "mask.window=4"]], ids=["sliding anew", "rolling"])
def test_two_hundred_thousand_tokens(tmp_path, text_file, forked, words):
    tokens = 200_000
    run = forked(
        "train", *SMALLEST, *words, f"data.path={text_file}", "train.max_steps=2", "out_dir=run", cwd=tmp_path
    )
    assert run.status == 0, run.err
    out = tmp_path / "out"
    command = [
        sys.executable,
        str(ROOT / "scripts" / "generate.py"),
        "checkpoint=run",
        "threads=1",
        "device=cpu",
    ]
    command += [f"max_new_tokens={tokens}", "seed=1"]
    looks = watch(command, lambda: out.stat().st_size, cwd=tmp_path, out=out)  # a character is a token
    assert_healthy(looks, "token", kept=BYTES_A_TOKEN * tokens)


# ---- the short way: what Python holds, at two moments of a few hundred steps or tokens ----


def held():
    """Bytes that Python has allocated, live tensors, open files."""
    gc.collect()
    tensors = sum(type(thing) in (torch.Tensor, nn.Parameter) for thing in gc.get_objects())
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return tracemalloc.get_traced_memory()[0], tensors, files


@pytest.fixture
def look():
    """look(n) after each step: at three of them, whose first starts the tracing. looks: what was found, by step."""
    looks = {}

    def at(n, begin, first, last):
        if n == begin:
            tracemalloc.start()
        elif n in (first, last):
            looks[n] = held()

    at.looks = looks
    yield at
    tracemalloc.stop()


def assert_nothing_gathers(looks):
    """A leak of one small object a step would be 50 bytes each."""
    (step, (memory, tensors, files)), (later, (more_memory, more_tensors, more_files)) = looks.items()
    assert (more_tensors, more_files) == (tensors, files)
    assert more_memory - memory < 20 * (later - step)


def test_training_gathers_nothing(call, look, monkeypatch, tmp_path, text_file):
    report = Trainer._report

    def looking(self, *measured):
        report(self, *measured)
        look(self.step, 20, 60, 260)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "_report", looking)
    monkeypatch.setattr("minilm.training.plot_loss", lambda *args, **options: None)
    words = [
        f"data.path={text_file}",
        "train.max_steps=560",
        "train.eval_interval=100",
        "train.sample_tokens=8",
    ]
    assert call("train", *SMALLEST, *words, "out_dir=run").status == 0
    assert_nothing_gathers(look.looks)


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(4)], ids=["sliding anew", "rolling"])
def test_generating_gathers_nothing(look, mask):
    config = GPTConfig(vocab_size=20, block_size=8, n_layer=1, n_head=1, n_embd=8)
    model = GPT(config, attention=lambda: MultiHeadAttention(8, n_head=1, mask=mask))
    for number, _ in enumerate(Generator(model).tokens([[1, 2]], 1210, seed=1)):
        look(number, 100, 400, 1200)
    assert_nothing_gathers(look.looks)
