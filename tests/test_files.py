import errno
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minilm import files
from minilm.errors import ConfigError
from minilm.files import sha256_of, write_atomic, write_synced
from minilm.tracking import AppendLog

FAULTS = [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]


@pytest.mark.parametrize(
    ("data", "content"),
    [
        (b"\x00\xff\r\n", b"\x00\xff\r\n"),
        ("é\n日本", "é\n日本".encode()),
        (lambda file: file.write(b"abc"), b"abc"),
        ("", b""),
    ],
)
def test_writes_exactly_what_is_given(tmp_path, data, content):
    path = tmp_path / "file"
    path.write_text("before")
    write_atomic(str(path), data)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]
    assert sha256_of(path) == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, broken, fault):
    def fail(*arguments):
        raise fault

    def half(file):
        file.write(b"half")
        fail()

    path = tmp_path / "file"
    path.write_text("before")
    if broken != "write":
        monkeypatch.setattr(os, broken, fail)
    with pytest.raises(type(fault)):
        write_atomic(path, half if broken == "write" else "after")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_the_old_file_stays_whole_until_the_new_one_is(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")

    def write(file):
        file.write(b"af")
        file.flush()
        assert path.read_text() == "before"
        [temporary] = set(tmp_path.iterdir()) - {path}
        assert temporary.name.startswith(f".file.tmp-{os.getpid()}-")
        file.write(b"ter")

    write_atomic(path, write)
    assert path.read_text() == "after"


# ---- one process at a time ----

HOLDER = """
import sys, time
from minilm.files import held
with held(sys.argv[1], "busy"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_file_is_held_against_other_processes_until_the_one_that_holds_it_dies(tmp_path):
    path = tmp_path / "file"
    path.write_text("kept")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="busy"), files.held(path, "busy"):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with files.held(path, "busy"):
        pass
    assert path.read_text() == "kept"


@pytest.mark.parametrize("without", ["locks on this disk", "locks on this system"])
def test_where_there_are_no_locks_nobody_is_refused(tmp_path, monkeypatch, without):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    if without == "locks on this disk":
        monkeypatch.setattr("fcntl.flock", refuse)
    else:
        monkeypatch.setattr(files, "fcntl", None)
    with files.held(tmp_path / "file", "busy"), files.held(tmp_path / "file", "busy"):
        pass


def test_a_run_writes_through_no_link(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "metrics.jsonl").symlink_to("victim")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is a link, to victim: remove it"):
        files.open_own(tmp_path / "metrics.jsonl")
    assert (tmp_path / "victim").read_text() == "precious"


# ---- folders ----


def test_a_new_folder_is_there_when_it_is_whole(tmp_path):
    with files.new_folder(tmp_path / "a" / "new") as folder:
        (folder / "x").write_text("1")
        assert not (tmp_path / "a" / "new").exists()
    assert (tmp_path / "a" / "new" / "x").read_text() == "1"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["new"]


def test_a_new_folder_that_fails_leaves_nothing(tmp_path):
    def fail():
        with files.new_folder(tmp_path / "new") as folder:
            (folder / "x").write_text("1")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_may_be_filled_and_one_with_something_in_it_not(tmp_path):
    with files.new_folder(tmp_path / "new"):
        pass
    with files.new_folder(tmp_path / "new") as folder:
        (folder / "x").write_text("1")
    with pytest.raises(ConfigError, match=r"out=.*new is there already"), files.new_folder(tmp_path / "new"):
        pass
    assert (tmp_path / "new" / "x").read_text() == "1"
    with (
        pytest.raises(ConfigError, match=r"out=.*cannot be made"),
        files.new_folder(tmp_path / "new" / "x" / "y"),
    ):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's disk that is always full")
@pytest.mark.parametrize(
    "write",
    [lambda: write_synced("/dev/full", b"text"), lambda: AppendLog("/dev/full").write("text")],
    ids=["a whole file", "a line"],
)
def test_a_full_disk_says_which_file_it_would_not_take(write):
    with pytest.raises(OSError, match="/dev/full") as refused:
        write()
    assert refused.value.errno == errno.ENOSPC
