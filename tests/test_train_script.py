"""scripts/train.py from end to end: what a run leaves, and what is left of it when it is stopped."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, script_as_typed

from minilm import checkpoint

CLOCK = {"train_seconds", "tokens_per_second"}
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}


def records(run):
    """metrics.jsonl without what a clock measured."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in lines]


def differences(a, b, at=""):
    """Where two checkpoints' states differ, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [at]
    if isinstance(a, dict):
        return [d for key in a.keys() | b.keys() for d in differences(a.get(key), b.get(key), f"{at}.{key}")]
    if isinstance(a, list | tuple):
        return [d for i, pair in enumerate(zip(a, b, strict=True)) for d in differences(*pair, f"{at}[{i}]")]
    return [] if a == b else [at]


def assert_same_end(run, whole):
    """The same losses, samples, weights, moments and all else that a run goes on from."""
    assert records(run) == records(whole)
    assert (run / "samples.txt").read_bytes() == (whole / "samples.txt").read_bytes()
    ours, theirs = checkpoint.load(run), checkpoint.load(whole)
    assert ours.step == theirs.step
    assert differences(ours.weights, theirs.weights) == []
    apart = {".train_seconds", ".metrics_position"}  # a clock's digits take more room or less
    assert set(differences(ours.state, theirs.state)) <= apart


# ---- a whole run ----


def test_a_run_leaves_everything_in_its_folder(tiny_run):
    run, _ = tiny_run
    assert {str(path.relative_to(run)) for path in run.rglob("*") if not path.is_symlink()} == {
        "config.yaml",
        "metrics.jsonl",
        "loss.png",
        "samples.txt",
        "checkpoints",
        *(
            f"checkpoints/step_{step:08d}{name}"
            for step in (16, 20)
            for name in (
                "",
                "/model.safetensors",
                "/config.yaml",
                "/tokenizer.json",
                "/state.pt",
                "/checksums.json",
            )
        ),
    }
    assert (run / "checkpoints" / "last").resolve() == run / "checkpoints" / "step_00000020"
    assert (run / "checkpoints" / "best").exists()
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [record["step"] for record in records(run)] == list(range(1, 21))
    assert {path.name for path in run.parent.iterdir()} == {"run", "runs"}
    assert (run.parent / "runs" / "latest").resolve() == run


def test_a_run_learns(tiny_run):
    losses = [record["train/loss"] for record in records(tiny_run[0])]
    assert losses[-1] < losses[0] - 0.2


def test_its_configuration_is_resolved_and_plain(tiny_run, text_file):
    run, _ = tiny_run
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert config["out_dir"] == str(run)
    assert config["data"]["path"] == str(text_file)
    assert config["train"]["max_steps"] == 20
    assert "hydra" not in config
    assert "${" not in (run / "config.yaml").read_text(encoding="utf-8")


def test_where_there_is_no_terminal_there_are_plain_lines(tiny_run):
    _, result = tiny_run
    assert result.err == ""
    assert "\x1b" not in result.out + result.err
    assert "\r" not in result.out
    lines = result.out.splitlines()
    assert lines[0].startswith("step 1/20  loss ")
    assert sum("validation loss" in line for line in lines) == 4  # three evaluations and the summary
    assert any(line.startswith("trained") for line in lines)
    assert lines[-1].split() == ["next", "python", "scripts/generate.py", "checkpoint=run"]


# ---- stopped and resumed, in new processes ----


@pytest.fixture(scope="module")
def whole(forked, tiny, tmp_path_factory):
    """whole(optimizer): the folder of a run that nothing has stopped."""
    made: dict[str, Path] = {}

    def run(optim):
        if optim not in made:
            made[optim] = tmp_path_factory.mktemp("whole") / "run"
            result = forked(
                "train", *tiny, f"optim={optim}", f"out_dir={made[optim]}", cwd=made[optim].parent
            )
            assert result.status == 0, result.err
        return made[optim]

    return run


@pytest.mark.parametrize(
    ("optim", "at", "send", "status", "saved"),
    [
        ("muon", "_update 9", (signal.SIGINT,), 130, 10),
        ("muon", "_update 11", (signal.SIGKILL,), -signal.SIGKILL, 8),
        ("adamw", "_evaluate 16", (signal.SIGTERM,), 143, 16),
        ("muon", "_sample 16", (signal.SIGKILL,), -signal.SIGKILL, 8),
        ("adamw", "_update 3", (signal.SIGKILL,), -signal.SIGKILL, None),
        ("muon", "_update 9", (signal.SIGINT, signal.SIGINT), 130, 8),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(forked, tiny, whole, tmp_path, optim, at, send, status, saved):
    arguments = [*tiny, f"optim={optim}", "out_dir=run", "resume=auto"]
    result = forked("train", *arguments, cwd=tmp_path, at=at, send=send)
    assert result.status == status
    assert "Traceback" not in result.err
    run = tmp_path / "run"
    if saved is None:
        assert not (run / "checkpoints").exists()
    else:
        assert checkpoint.load(run).step == saved
    if status in STOPPED.values() and len(set(send)) == len(send):
        assert f"stopped          after step {saved} of 20, saved" in result.out
        assert "next             python scripts/train.py resume=run" in result.out
    result = forked("train", *arguments, cwd=tmp_path)
    assert result.status == 0, result.err
    assert_same_end(run, whole(optim))


def test_a_run_may_be_killed_again_and_again(forked, tiny, whole, tmp_path):
    """Also between the record of a step and its checkpoint; each time from where the last attempt got to."""
    arguments = [*tiny, "optim=adamw", "out_dir=run", "resume=auto", "train.save_interval=1"]
    for step in (1, 2, 13):
        result = forked("train", *arguments, cwd=tmp_path, at=f"_report {step}", send=(signal.SIGKILL,))
        assert result.status == -signal.SIGKILL
    assert forked("train", *arguments, cwd=tmp_path).status == 0
    assert_same_end(tmp_path / "run", whole("adamw"))


def test_the_script_itself_resumes_what_it_began(tiny_run, forked, tiny, tmp_path):
    """tiny_run was started as a person does, in a process that had imported nothing."""
    arguments = [*tiny, "out_dir=run"]
    assert forked("train", *arguments, cwd=tmp_path, at="_update 12", send=(signal.SIGINT,)).status == 130
    result = script_as_typed("train", f"resume={tmp_path / 'run'}", cwd=tmp_path)
    assert result.status == 0, result.err
    assert_same_end(tmp_path / "run", tiny_run[0])


@pytest.mark.slow
def test_without_a_compiler_the_run_goes_on_and_is_the_same(tiny_run, tiny, tmp_path):
    none = {"CXX": "/nowhere/g++", "PATH": "/nowhere"}
    result = script_as_typed("train", *tiny, "out_dir=run", "compile=true", cwd=tmp_path, **none)
    assert result.status == 0
    assert "compile=true: no compiler works, going on without it" in result.err
    assert "Traceback" not in result.err
    assert_same_end(tmp_path / "run", tiny_run[0])


# ---- corpora of documents ----


def test_a_mixture_of_documents_is_trained_on_resumed_read_and_finetuned(forked, tiny, tmp_path, text_file):
    """All of it with attention within documents; the resumed run is the unbroken one, bit for bit."""
    text = text_file.read_text(encoding="utf-8")
    (tmp_path / "texts").mkdir()
    rows = [json.dumps({"text": text[i : i + 150]}) + "\n" for i in range(0, len(text), 150)]
    (tmp_path / "texts" / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    (tmp_path / "texts" / "whole.txt").write_text(text, encoding="utf-8")
    plain = f"{{data: file, path: '{text_file}'}}"
    sources = f"[{{data: folder, path: texts, val_fraction: 0.3}}, {plain}]"
    words = [word for word in tiny if not word.startswith("data")]
    words += ["data=mix", f"data.sources={sources}", "data.weights=[1,2]", "data.document_mask=true"]
    assert forked("train", *words, "out_dir=whole", cwd=tmp_path).status == 0
    stopped = forked("train", *words, "out_dir=run", cwd=tmp_path, at="_update 9", send=(signal.SIGTERM,))
    assert stopped.status == 143
    assert "documents are" not in stopped.err  # nothing is prepared twice
    resumed = forked("train", "resume=run", cwd=tmp_path)
    assert resumed.status == 0, resumed.err
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    for name, *more in (
        ("evaluate", "checkpoint=run", f"data.path={text_file}"),
        ("generate", "checkpoint=run", "max_new_tokens=40"),
        ("train", "init_from=run", "data=folder", "data.path=texts", "train.max_steps=1", "out_dir=more"),
    ):
        done = forked(name, *more, "threads=1", "device=cpu", cwd=tmp_path)
        assert done.status == 0, done.err


# ---- sweeps ----


def test_each_run_of_a_sweep_is_the_single_run(forked, tiny, tmp_path):
    result = forked("train", *tiny, "-m", "seed=1,2", "out_dir=sweep", cwd=tmp_path)
    assert result.status == 0, result.err
    assert [p.name for p in sorted((tmp_path / "sweep").iterdir()) if p.is_dir()] == ["0", "1"]
    assert {p.name for p in tmp_path.iterdir()} == {"sweep", "runs"}
    assert forked("train", *tiny, "seed=2", "out_dir=alone", cwd=tmp_path).status == 0
    assert_same_end(tmp_path / "sweep" / "1", tmp_path / "alone")
    assert records(tmp_path / "sweep" / "0") != records(tmp_path / "alone")
    assert yaml.safe_load((tmp_path / "sweep" / "0" / "config.yaml").read_text())["seed"] == 1


def test_a_failing_run_of_a_sweep_shows_and_the_others_are_whole(forked, tiny, tmp_path):
    result = forked("train", *tiny, "-m", "model.n_head=2,3,1", "out_dir=sweep", cwd=tmp_path)
    assert result.status == 2
    assert result.err.splitlines()[-1].startswith("train: model.n_head=3: model.n_head=3 must divide")
    assert "Traceback" not in result.err
    assert [checkpoint.load(tmp_path / "sweep" / name).step for name in "02"] == [20, 20]
    assert not (tmp_path / "sweep" / "1" / "metrics.jsonl").exists()


# ---- help ----

WITHOUT_TORCH = """
import runpy, sys
sys.argv = [sys.argv[1], *sys.argv[2:]]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("name", "arguments", "status", "says"),
    [
        ("train", ["--help"], 0, "schedule.warmup"),
        ("generate", ["--help"], 0, "max_new_tokens"),
        ("train", ["train.max_step=5"], 2, "did you mean train.max_steps?"),
        ("generate", ["max_tokens=5"], 2, "did you mean max_new_tokens?"),
    ],
)
def test_help_and_misspelt_keys_do_not_wait_for_torch(tmp_path, name, arguments, status, says):
    script = str(ROOT / "scripts" / f"{name}.py")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, script, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status
    assert done.stderr.splitlines()[-1] == "False"
    if status:
        assert says in done.stderr
        assert len(done.stderr.splitlines()) == 2
    else:
        assert all(
            part in done.stdout for part in [*says.split("."), "key=value", f"python scripts/{name}.py"]
        )
    assert list(tmp_path.iterdir()) == []


def test_a_reader_of_help_that_has_had_enough_sees_no_traceback():
    help_text = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "train.py"), "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    help_text.stdout.close()  # as `| head` does, only sooner
    assert help_text.stderr.read() == b""
    assert help_text.wait() == 141
