"""Scripts on a machine that fails them: one line and status 2, and what was saved is whole and goes on."""

import ctypes
import os
import shutil
import sys

import pytest
import torch
from crash import GROWING, Disk, full
from test_train_script import assert_same_end

from minilm import checkpoint, files, training
from minilm.generation import Generator


def one_line(result, name, *says):
    assert result.status == 2, result.err
    lines = [line for line in result.err.splitlines() if not line.startswith(("/", " "))]  # warnings
    assert len(lines) == 1, result.err
    assert lines[0].startswith(f"{name}: ")
    for words in says:
        assert words in lines[0]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(folder):
    """Every name below a folder, and when it was last written to."""
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


# ---- disks ----


@pytest.mark.parametrize("at", [1, pytest.param(9, marks=pytest.mark.slow), 60])
def test_a_full_disk_is_one_line_that_names_the_last_good_step(call, tiny, tiny_run, here, at):
    """At the run's first file, in its first steps, and in its checkpoints; once there is room, it goes on."""
    disk = Disk(at, full, GROWING)
    with disk.watch():
        result = call("train", *tiny, "out_dir=run")
    one_line(result, "train", "No space left on device")
    saved = checkpoint.find("run").name if os.path.exists("run/checkpoints/last") else None
    if at > 1:
        assert (
            f"the last good step is {int(saved[5:])}, in" if saved else "no checkpoint was saved"
        ) in result.err
    result = call("train", *tiny, "out_dir=run", "resume=auto")
    assert result.status == 0, result.err
    assert_same_end(here / "run", tiny_run[0])


def powerless():
    """Root is refused nothing, whatever a folder says: from here on this process has no such power."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capset(header, nothing) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.skipif(sys.platform != "linux", reason="takes root's power away by a call of Linux")
@pytest.mark.parametrize("closed", ["where the run would be", "the run", "its checkpoints"])
def test_a_folder_that_may_only_be_read_is_named(forked, tiny, tiny_run, tmp_path, closed):
    words = [*tiny, "out_dir=run"]
    folder = tmp_path
    if closed != "where the run would be":
        assert forked("train", *words, "train.max_steps=2", "train.eval_interval=1", cwd=tmp_path).status == 0
        words += ["resume=auto", "train.max_steps=4"]
        folder = tmp_path / "run" / ("checkpoints" if closed == "its checkpoints" else ".")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    metrics = tmp_path / "run" / "metrics.jsonl"
    if closed == "the run":
        metrics.chmod(0o444)
    folder.chmod(0o555)
    result = forked("train", *words, cwd=tmp_path, prepare=powerless)
    folder.chmod(0o755)
    one_line(result, "train", "Permission denied", "run")
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    if closed == "its checkpoints":
        assert "the last good step is 2" in result.err
        before, after = (
            {p: raw for p, raw in d.items() if "checkpoints" in p.parts} for d in (before, after)
        )
    assert after == before


# ---- two at once ----


@pytest.mark.parametrize("words", [["out_dir=run", "resume=auto"], ["resume=run"], ["out_dir=new"]])
def test_a_second_run_in_a_folder_is_refused(forked, tiny, tiny_run, tmp_path, words):
    """The kernel keeps the folder for the process that has it, here this one."""
    shutil.copytree(tiny_run[0], tmp_path / "run", symlinks=True)
    (tmp_path / "new").mkdir()
    folder = tmp_path / words[0].partition("=")[2]
    with files.held(folder / "metrics.jsonl", "nobody else"):
        before = tree(tmp_path)
        result = forked("train", *tiny, *words, cwd=tmp_path)
        assert tree(tmp_path) == before
    one_line(result, "train", f"out_dir={folder.resolve()}: another process is training there")


# ---- memory ----


def test_out_of_memory_names_what_takes_it_and_what_to_lower(call, tiny, tiny_run, here, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(training, "gradients", lambda *arguments, **options: torch.empty(1 << 55))
        result = call("train", *tiny, "out_dir=run")
    one_line(
        result,
        "train",
        "out of memory (tried to allocate ",
        "train.batch_size=4, train.micro_batch_size=null, train.eval_batch_size=64",
        "model.block_size=16: lower train.micro_batch_size first",
        "no checkpoint was saved yet",
    )
    result = call("train", *tiny, "out_dir=run")  # a run that came to nothing is none
    assert result.status == 0, result.err
    assert_same_end(here / "run", tiny_run[0])


def test_out_of_memory_while_generating(call, tiny_run, here, monkeypatch):
    monkeypatch.setattr(Generator, "_read", lambda *arguments: bytearray(1 << 60))
    result = call("generate", f"checkpoint={tiny_run[0]}", "samples=7", "threads=1", "device=cpu")
    one_line(result, "generate", "out of memory with samples=7, max_new_tokens=200: lower them")


# ---- runs that came from elsewhere ----


def test_a_run_does_not_go_on_through_a_link(call, tiny, tiny_run, here):
    """What is written would land in the folder that the link leads to."""
    shutil.copytree(tiny_run[0], here / "theirs", symlinks=True)
    shutil.copytree(tiny_run[0], here / "mine", symlinks=True)
    shutil.rmtree(here / "theirs" / "checkpoints")
    (here / "theirs" / "checkpoints").symlink_to(here / "mine" / "checkpoints")
    before = tree(here / "mine")
    result = call("train", *tiny, "resume=theirs", "train.max_steps=30")
    one_line(result, "train", f"theirs: its checkpoints lie elsewhere, in {here / 'mine'}")
    assert tree(here / "mine") == before

    (here / "victim").write_text("precious")
    (here / "mine" / "metrics.jsonl").unlink()
    (here / "mine" / "metrics.jsonl").symlink_to(here / "victim")
    before = tree(here / "mine")
    result = call("train", *tiny, "resume=mine", "train.max_steps=30")
    one_line(result, "train", f"metrics.jsonl is a link, to {here / 'victim'}")
    assert tree(here / "mine") == before
    assert (here / "victim").read_text() == "precious"
