"""What a kill, a signal or a full disk leaves at whatever moment it comes: whole checkpoints, and a run that goes on
as if nothing had happened. A clock of our own stands in for the real one, so that runs are compared to the last byte.
"""

import os
import random
import signal
import time
from collections import Counter
from functools import partial

import pytest
from crash import GROWING, Disk, Killed, dead, full, in_this_process, ticking
from test_training import make, resume, same

from minilm import checkpoint, training
from minilm.checkpoint import FILES
from minilm.errors import ConfigError
from minilm.files import write_atomic

SHORT = {
    "max_steps": 4,
    "eval_interval": 2,
    "sample_tokens": 2,
    "keep": 1,
    "batch_size": 1,
    "eval_batch_size": 99,
}


def stand_ins(monkeypatch):
    """No waiting for the disk, a few bytes in the place of the picture, and a clock of our own."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(
        training, "plot_loss", lambda run, **options: write_atomic(run / "loss.png", b"picture")
    )
    monkeypatch.setattr(training, "time", ticking())


def trained(run, disk, saved):
    """Train in `run`, from its last checkpoint if there is one, as resume=auto does; `saved` gets the steps saved."""
    try:
        checkpoint.find(run)
        trainer = resume(run, **SHORT)
    except ConfigError:
        trainer = make(run, **SHORT)
    save = trainer._save

    def noted(**options):
        save(**options)
        saved.append(trainer.step)

    trainer._save = noted
    with disk.watch():
        trainer.fit()
    return trainer


def contents(run):
    """All that a run leaves for others to read, to the last byte but for its own name, and its state."""
    last = run / "checkpoints" / "last"
    paths = [*run.iterdir(), *last.iterdir()]
    bytes_of = {path.name: path.read_bytes() for path in paths if path.is_file()}
    bytes_of = {name: raw.replace(bytes(run), b"RUN") for name, raw in bytes_of.items()}
    del bytes_of["state.pt"], bytes_of["checksums.json"]  # the one holds the other's, and both the run's name
    return bytes_of | {"state": checkpoint.load(run).state}


def assert_whole(run, least):
    """No checkpoint to be seen is damaged, and the last one is of step `least` or a later one."""
    seen = [path for path in (run / "checkpoints").glob("*") if not path.name.startswith(".")]
    assert [checkpoint.damage(path, FILES) for path in seen] == [None] * len(seen)
    if least:
        assert checkpoint.load(run).step >= least


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The folder of a run that nothing has stopped, and what it did on the disk, in order."""
    run, disk = tmp_path_factory.mktemp("unbroken") / "run", Disk()
    with pytest.MonkeyPatch.context() as patch:
        stand_ins(patch)
        trained(run, disk, [])
    return run, disk.names


def presses(number, times):
    """A signal to this process, that often; then no more."""
    left = iter([number] * times)
    return lambda: os.kill(os.getpid(), number) if next(left, None) else None


# name: what strikes, the operations that it strikes at, and what may end the run; where nothing does, it has saved
# its last step
STRIKES = {
    "SIGKILL": (lambda: dead, (), Killed),
    "disk full": (lambda: full, GROWING, (OSError, ConfigError)),
    "SIGTERM": (lambda: presses(signal.SIGTERM, 1), (), ()),
    "Ctrl-C": (lambda: presses(signal.SIGINT, 1), (), ()),
    "Ctrl-C twice": (lambda: presses(signal.SIGINT, 2), (), KeyboardInterrupt),
}
SIGNALS = ("SIGTERM", "Ctrl-C", "Ctrl-C twice")
# at which operations: at some from half of the run on, that is in the second checkpoint, which takes the place of the
# first; with -m slow at every one, a signal from where training begins
STRIDES = {"SIGKILL": 5, "disk full": 5, "SIGTERM": 24, "Ctrl-C": 24, "Ctrl-C twice": 8}


@pytest.mark.parametrize("name", STRIKES)
@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_goes_on_as_if_unbroken_whatever_struck_at_any_operation_of_the_disk(
    tmp_path, monkeypatch, capsys, unbroken, name, all_of_them
):
    """A write stops in its middle; after a kill nothing more happens on the disk, and while it is full nothing that
    takes room. Signals wait for the end of a step.
    """
    stand_ins(monkeypatch)
    whole, operations = unbroken
    strike, only, ends = STRIKES[name]
    expected, kinds = contents(whole), [kind for kind in operations if not only or kind in only]
    first = len(kinds) // 2 if not all_of_them else 5 if name in SIGNALS else 1
    assert {"open", "write", "mkdir", "symlink"} <= set(kinds)
    assert only or {"fsync", "rename", "replace", "unlink", "rmdir"} <= set(kinds)
    broken = 0
    moments = range(first, len(kinds) + 1, 1 if all_of_them else STRIDES[name])
    for at in moments:
        run, saved = tmp_path / str(at), []
        try:
            trainer = trained(run, Disk(at, strike(), only), saved)
            assert name in SIGNALS
            assert trainer.stopped_by in (signal.SIGTERM, signal.SIGINT)
            assert saved[-1] == trainer.step
        except ends:
            broken += 1
        assert_whole(run, saved[-1] if saved else 0)
        trained(run, Disk(), [])
        assert same(contents(run), expected), f"{name} at {at}, {kinds[at - 1]}"
    assert broken > 5 or not ends
    if all_of_them:
        with capsys.disabled():
            print(f"\n{name} at {len(moments)} operations, of which {broken} ended the run at once")


# ---- real processes ----


def words(tiny, *others):
    short = ["train.max_steps=6", "train.eval_interval=2", "train.sample_tokens=3", "model.ngrams=[]"]
    return [*tiny, *short, "out_dir=run", "resume=auto", *others]


@pytest.fixture(scope="module")
def whole(forked, tiny, tmp_path_factory):
    """A run that nothing has stopped, what its process did on the disk, and how many seconds it took."""
    folder, began = tmp_path_factory.mktemp("whole"), time.monotonic()
    result = forked(
        "train", *words(tiny), cwd=folder, prepare=partial(in_this_process, tally=folder / "tally")
    )
    assert result.status == 0, result.err
    return folder / "run", (folder / "tally").read_text().split(), time.monotonic() - began


def go_on(forked, tiny, whole, folder, kills):
    """Start the run, and again each time that it is killed: at operation number kills[0] of its process, kills[1] of
    the next one … None is at a moment that chance chooses. Then once more, to the end.

    Returns how many were killed.
    """
    run, least, killed = folder / "run", 0, 0
    for at in kills:
        result = forked(
            "train",
            *words(tiny),
            cwd=folder,
            prepare=partial(in_this_process, at),
            seconds=random.uniform(0, whole[2]) if at is None else 600,
        )
        assert result.status in (0, -signal.SIGKILL), result.err
        killed += result.status != 0
        assert_whole(run, least)
        least = checkpoint.load(run).step if (run / "checkpoints" / "last").exists() else 0
    result = forked("train", *words(tiny), cwd=folder, prepare=in_this_process)
    assert result.status == 0, result.err
    assert same(contents(run), contents(whole[0]))
    return killed


def test_a_process_that_is_killed_again_and_again_goes_on(forked, tiny, whole, tmp_path):
    """Among the first writes of the run, in a checkpoint, and in the one after."""
    count = len(whole[1])
    assert go_on(forked, tiny, whole, tmp_path, kills=[count // 8, count // 2, count // 3]) == 3


@pytest.mark.slow
def test_a_hundred_kills(forked, tiny, whole, tmp_path, capsys):
    """One at each operation of the whole process, and fifty at moments that chance chooses."""
    tally: Counter[str] = Counter()
    for at, kind in enumerate(whole[1], start=1):
        (folder := tmp_path / str(at)).mkdir()
        tally[kind] += go_on(forked, tiny, whole, folder, kills=[at])
    for n in range(10):
        (folder := tmp_path / f"chance{n}").mkdir()
        tally["at random"] += go_on(forked, tiny, whole, folder, kills=[None] * 5)
    with capsys.disabled():
        shares = ", ".join(f"{kind} {n}" for kind, n in tally.most_common())
        print(f"\nkilled {tally.total()} times: {shares}")
    assert tally.total() >= 100
    assert {"write", "fsync", "rename", "replace"} <= set(tally)
