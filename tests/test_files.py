import errno
import hashlib
import os

import pytest

from minilm.files import sha256_of, write_atomic

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
