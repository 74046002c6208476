"""What people type wrong, and the one line that each of them reads: the table is in mistakes.py.

Nothing is printed beside the line, no file is left where the script was started, and the exit status is 2.
"""

import os
import shutil
import subprocess
import sys
import time
import warnings
from statistics import median

import mistakes
import pytest
from conftest import ROOT, Result, script_as_typed

from minilm import checkpoint, launch
from minilm import mistakes as refusals
from minilm.errors import ConfigError
from minilm.words import groups

SLOWEST = 3  # a refusal, over the time of importing torch


def rows(table):
    return [(script, row, says) for script, found in table.items() for row, says in found.items()]


ROWS = rows(mistakes.ROWS)


@pytest.fixture(scope="session")
def files(tmp_path_factory, tiny_run):
    """A folder of files with something wrong about each."""
    folder = tmp_path_factory.mktemp("files")
    contents = {
        "empty.txt": b"",
        "latin-1.txt": b"caf\xe9",
        "utf-16.txt": "text".encode("utf-16"),
        "nul.txt": b"abc\0def",
        "short.txt": b"less than a window..",
        "rows.jsonl": b'{"body": "less"}\n',
        "none/.gitignore": b"",
        "words.txt": b"another text than the one that was learned. " * 50,
        "recipe/unknown.yaml": b"# @package _global_\nmodle: {n_layer: 2}\n",
        "recipe/misspelt.yaml": b"# @package _global_\ntrain: {max_step: 2}\n",
        "recipe/group.yaml": b"# @package _global_\ndefaults:\n  - override /positon: rope\n",
        "recipe/choice.yaml": b"# @package _global_\ndefaults:\n  - override /position: ropee\n",
        "recipe/torn.yaml": b"# @package _global_\nmodel: {n_layer: 2",
    }
    for name, raw in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(raw)
    damaged = shutil.copytree(tiny_run[0], folder / "damaged", symlinks=True) / "checkpoints"
    for weights in damaged.glob("step_*/model.safetensors"):
        raw = bytearray(weights.read_bytes())
        raw[-1] ^= 1
        weights.write_bytes(raw)
    return folder


@pytest.fixture(scope="session")
def places(tmp_path_factory, tiny, tiny_run, plain_run, files, forked):
    """What the braces of a row stand for."""
    folder = tmp_path_factory.mktemp("others")
    others = {"nomask": "mask=none", "prefix": "mask=prefix", "linear": "attention=linear"}
    for name, word in others.items():
        made = forked("train", *tiny, word, "train.max_steps=2", f"out_dir={name}", cwd=folder)
        assert made.status == 0, made.err
    return {"files": files, "run": tiny_run[0], "plain": plain_run} | {name: folder / name for name in others}


@pytest.fixture
def refused(monkeypatch, tmp_path, tiny, places):
    """refused(run, script, row, says): holds that the row ends with its one line, and nothing else happened."""
    monkeypatch.chdir(tmp_path)

    def check(run, script, row, says):
        right = (tiny if script in mistakes.TRAINERS else []) + mistakes.RIGHT[script]
        words = [word.format(**places) for word in [*right, *row.split(" ")]]
        variables = [word for word in words if word.partition("=")[0].replace("_", "").isupper()]
        for variable in variables:
            monkeypatch.setenv(*variable.split("=", 1))
        before = state(places.values())
        result = run(script, *(word for word in words if word not in variables))
        assert (result.status, result.out) == (2, ""), result.err
        assert result.err.endswith("\n")
        assert len(result.err.splitlines()) == 1, result.err
        assert result.err.startswith(f"{script}: ")
        assert says.format(**places) in result.err
        assert list(tmp_path.iterdir()) == []
        assert state(places.values()) == before

    return check


def state(folders):
    return {path: path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*")}


@pytest.mark.parametrize(("script", "row", "says"), ROWS, ids=[f"{script} {row}" for script, row, _ in ROWS])
def test_a_mistake_is_one_line(refused, call, script, row, says):
    refused(call, script, row, says)


@pytest.mark.slow
def test_every_mistake_as_typed_within_the_time_of_an_import(refused, tmp_path, monkeypatch):
    """All rows as processes of their own, timed beside imports of torch."""

    def timed(*command):
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C.UTF-8"})
        return time.monotonic() - began, Result(done.returncode, done.stdout, done.stderr)

    imports, taken = [], {}
    for number, (script, row, says) in enumerate(ROWS):
        if number % 10 == 0:
            imports.append(timed(sys.executable, "-c", "import torch")[0])

        def run(name, *words, row=row):
            taken[name, row], result = timed(sys.executable, str(ROOT / "scripts" / f"{name}.py"), *words)
            return result

        with monkeypatch.context():
            refused(run, script, row, says)
    whole = median(imports)
    print(f"\n{len(taken)} mistakes; torch is imported in {whole:.2f} s")
    for (script, row), seconds in sorted(taken.items(), key=lambda pair: -pair[1])[:10]:
        print(f"  {seconds / whole:.2f} of that: {script} {row}")
    assert median(taken.values()) <= SLOWEST * whole
    assert sorted(taken.values())[len(taken) * 9 // 10] <= SLOWEST * whole


def test_a_sweep_says_which_jobs_were_refused_and_runs_the_others(forked, tiny, tmp_path):
    words = [*tiny, "train.max_steps=2", "out_dir=sweep"]
    result = forked("train", "-m", "optim.lr=0.1,fast", "seed=1,-1", *words, cwd=tmp_path)
    assert result.status == 2
    assert result.err.splitlines() == [
        "train: optim.lr=0.1 seed=-1: seed=-1: a whole number from 0 to 2^63 - 1",
        "train: optim.lr=fast seed=1: optim.lr=fast: expected a number",
        "train: optim.lr=fast seed=-1: seed=-1: a whole number from 0 to 2^63 - 1",
    ]
    assert [path.parent.name for path in tmp_path.glob("sweep/*/metrics.jsonl")] == ["0"]


def test_a_sweep_of_a_script_that_keeps_nothing_leaves_nothing(call, monkeypatch, tmp_path, tiny_run):
    monkeypatch.chdir(tmp_path)
    words = [f"checkpoint={tiny_run[0]}", "threads=1", "device=cpu", "max_new_tokens=2"]
    result = call("generate", "-m", "seed=1,2", *words)
    assert (result.status, result.err.count("decode 1 tokens"), list(tmp_path.iterdir())) == (0, 2, [])


def test_without_a_model_the_message_says_where_it_was_looked_for(call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = call("generate", "prompt=Once")
    assert result.status == 2
    assert result.err.startswith("generate: no checkpoint at runs/latest: there is no such folder")


def test_as_typed_too(tmp_path, tiny_run):
    """In a process of its own, in a poor locale: é arrives, and nothing else is printed around the line."""
    poor = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"}
    result = script_as_typed("generate", "prompt=Hi? é", f"checkpoint={tiny_run[0]}", cwd=tmp_path, **poor)
    assert (result.status, result.out, len(result.err.splitlines())) == (2, "", 1)
    assert result.err.startswith(
        "generate: tokenizer=char: 'H' (U+0048), '?' (U+003F), 'é' (U+00E9) not among"
    )
    assert list(tmp_path.iterdir()) == []


BROKEN = """
import runpy, sys, types
module = types.ModuleType("minilm.launch")
module.train = lambda command: 1 / 0
sys.modules["minilm.launch"] = module
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("sweep", [[], ["-m", "out_dir=sweep"]])
def test_a_fault_of_ours_shows_where_it_happened(tmp_path, sweep):
    script = str(ROOT / "scripts" / "train.py")
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, script, *sweep], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "module.train = " in done.stderr or "<lambda>" in done.stderr
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


# ---- suggestions ----

KNOWN = [
    "seed",
    "optim.lr",
    "optim.betas",
    "optim",
    "train.max_steps",
    "train.keep",
    "train",
    "model.n_layer",
    "model",
]


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("sed", "did you mean seed?"),
        ("lr", "did you mean optim.lr?"),
        ("train.lr", "did you mean optim.lr?"),
        ("train.max_step", "did you mean train.max_steps?"),
        ("n_layers", "did you mean model.n_layer?"),
        ("modle.n_layer", "did you mean model.n_layer?"),
        ("train.zzz", "train has max_steps, keep"),
        ("zzz", "the top level has seed, optim, train, model"),
        ("zzz.qqq", "there are seed, optim, train, model"),
        ("mask.window", "only mask=sliding has it"),
        ("tokenizer.vocab_size", "only tokenizer=bpe has it"),
    ],
)
def test_a_misspelt_key_is_told_the_nearest(key, says):
    assert refusals._nearest(key, KNOWN, groups("train")) == says


# ---- how a program ends ----


def test_ctrl_c_is_no_fault_of_ours(capsys):
    with pytest.raises(SystemExit) as stop, refusals.in_one_line("train", "train"):
        raise KeyboardInterrupt
    assert stop.value.code == 130
    assert capsys.readouterr().err == "train: interrupted\n"


def test_a_mistake_is_one_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as stop, refusals.in_one_line("train", "train"):
        raise ConfigError("data.path=x:\n  no such   file")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "train: data.path=x: no such file\n"


def test_a_warning_of_ours_is_one_line_and_another_says_where_it_comes_from():
    usual = warnings.formatwarning
    with refusals.warned_in_one_line("train"):
        ours = warnings.formatwarning("going on offline", UserWarning, launch.__file__, 7)
        another = warnings.formatwarning("deprecated", UserWarning, "/elsewhere/library.py", 7)
    assert ours == "train: going on offline\n"
    assert another == "/elsewhere/library.py:7: UserWarning: deprecated\n"
    assert warnings.formatwarning is usual


def test_a_model_whose_weights_are_no_numbers_is_said_to_be_so(call, monkeypatch, tmp_path, tiny_run):
    monkeypatch.chdir(tmp_path)
    saved = checkpoint.load(tiny_run[0])
    for weight in saved.weights.values():
        weight.fill_(float("nan"))
    kept = {"config": saved.config, "tokenizer": saved.tokenizer}
    checkpoint.save(tmp_path / "diverged", 1, weights=saved.weights, state=saved.state, **kept)
    result = call("generate", "checkpoint=diverged", "device=cpu", "prompt=a")
    assert result.status == 2
    assert result.err.splitlines()[-1].startswith(
        "generate: cannot draw a token: the largest logit of row 0 is nan"
    )


def test_a_fault_of_ours_is_not_hidden():
    with pytest.raises(ZeroDivisionError), refusals.in_one_line("train", "train"):
        raise ZeroDivisionError
