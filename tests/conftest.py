"""What tests share: a small real text, and the scripts, run in this process or in one of their own."""

import importlib.util
import multiprocessing
import os
import pydoc_data.topics
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: tests leave the other cores to others

ROOT = Path(__file__).resolve().parents[1]
TEXT = pydoc_data.topics.topics["assignment"][:6000]
TINY = [
    *("data=file", "threads=1", "device=cpu", "precision=fp32", "schedule.warmup=2"),
    *("model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.block_size=16"),
    *("train.max_steps=20", "train.batch_size=4", "train.eval_interval=8", "train.log_interval=1"),
    *("train.sample_tokens=20", "model.dropout=0.1", "model.ngrams=[2,3]", "model.ngram_rows=100"),
]


@dataclass(frozen=True)
class Result:
    """What a script left: its exit status (minus a signal's number where one killed it), and what it wrote."""

    status: int
    out: str
    err: str


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests run where -m asks for them."""
    if not config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny(text_file: Path) -> list[str]:
    """Arguments of a run that takes a second."""
    return [*TINY, f"data.path={text_file}"]


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> tuple[Path, Result]:
    """A whole run of 20 steps, made by scripts/train.py as a person starts it, in a folder of its own."""
    folder = tmp_path_factory.mktemp("tiny")
    result = script_as_typed("train", *tiny, "out_dir=run", cwd=folder)
    assert result.status == 0, result.err
    return folder / "run", result


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Path:
    """A run of two steps whose model has a counterpart everywhere: without vectors for n-grams."""
    folder = tmp_path_factory.mktemp("plain")
    words = [*tiny, "model.ngrams=[]", "train.max_steps=2", "out_dir=run"]
    result = script_as_typed("train", *words, cwd=folder)
    assert result.status == 0, result.err
    return folder / "run"


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test cuts the power, so none has to wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# ---- scripts as a person starts them ----


def script_as_typed(name: str, *arguments: str, cwd: Path, stdin: bytes = b"", **env: str) -> Result:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        env=os.environ | env,
        timeout=600,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


# ---- scripts in new processes that have imported torch already ----


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """forked(name, *arguments, cwd=…): a script in a new process. `at`, `send` and `prepare`: see `_child`.

    seconds: how long it may live.
    """
    context = multiprocessing.get_context("forkserver")
    # torch.optim imports torch._dynamo when the first optimizer is made
    context.set_forkserver_preload(
        ["conftest", "minilm.launch", "minilm.say", "torch._dynamo", "minilm.config", "minilm.lab.run"]
    )
    cache = tmp_path_factory.mktemp("root")

    def run(
        name: str,
        *arguments: str,
        cwd: Path,
        stdin: bytes = b"",
        at: str = "",
        send: tuple[int, ...] = (),
        prepare: Callable[[], None] | None = None,
        seconds: float = 600,
    ) -> Result:
        streams = tmp_path_factory.mktemp("streams")
        (streams / "in").write_bytes(stdin)
        process = context.Process(
            target=_child, args=(name, arguments, cwd, cache, streams, at, send, prepare)
        )
        process.start()
        process.join(timeout=seconds)
        process.kill()  # of no effect on one that has ended
        process.join()
        out, err = ((streams / stream).read_text(encoding="utf-8") for stream in ("out", "err"))
        return Result(process.exitcode, out, err)

    return run


def _child(
    name: str,
    arguments: tuple[str, ...],
    cwd: Path,
    root: Path,
    streams: Path,
    at: str,
    send: tuple[int, ...],
    prepare: Callable[[], None] | None,
) -> None:
    """A script in this process, which sends itself the signals `send` where training does `at`: '_update 7', or
    '_update 7 2' for that of seed 2. prepare: called before the script is.
    """
    for number, stream in enumerate(("in", "out", "err")):
        os.dup2(os.open(streams / stream, os.O_RDWR | os.O_CREAT), number)
    sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))
    os.chdir(cwd)
    from minilm import launch, training

    # a picture, and waiting for the disk, take longer than a run
    launch.ROOT, training.plot_loss = root, lambda *args, **options: None
    os.fsync = lambda descriptor: None
    if at:
        method, step, *seed = at.split()
        plain = getattr(training.Trainer, method)

        def disturbed(self: Any, *args: Any, **options: Any) -> Any:
            if self.step == int(step) and seed in ([], [str(self.seed)]):
                for number in send:
                    os.kill(os.getpid(), number)
            return plain(self, *args, **options)

        setattr(training.Trainer, method, disturbed)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if prepare is not None:
        prepare()
    sys.argv = [f"{name}.py", *arguments]
    try:
        runpy.run_path(str(ROOT / "scripts" / f"{name}.py"), run_name="__main__")
    finally:
        # An interpreter that ends has joblib's workers end first. This process would wait for them as its children
        # while they wait for more work, or for semaphores that are gone.
        if loky := sys.modules.get("joblib.externals.loky"):
            loky.get_reusable_executor(reuse=True).shutdown(wait=True)


# ---- scripts in this process ----


@pytest.fixture
def call(tmp_path_factory, monkeypatch, capsys) -> Callable[..., Result]:
    """call(name, *arguments): a script's main program in this process, in the current folder."""
    from hydra.core.global_hydra import GlobalHydra

    from minilm import launch

    monkeypatch.setattr(launch, "ROOT", tmp_path_factory.getbasetemp() / "root")

    def run(name: str, *arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        GlobalHydra.instance().clear()
        capsys.readouterr()
        status: Any = 0
        try:
            load(name).main()
        except SystemExit as stop:
            status = stop.code or 0
        written = capsys.readouterr()
        return Result(status, written.out, written.err)

    return run


def load(name: str) -> ModuleType:
    """scripts/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
