"""What befalls a checkpoint: a save that fails or is killed at any of its calls, and files that are damaged."""

import contextlib
import errno
import io
import os
import shutil

import pytest
import torch
from test_checkpoint import assert_holds, names, save, values

from minilm import checkpoint as checkpoints
from minilm.checkpoint import FILES, SUMS, find, load
from minilm.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick_disk")


# ---- interruptions ----

FAULTS = [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]


class Calls:
    """Counts the calls by which a save changes the disk; the one numbered `fail_at` raises `fault`."""

    def __init__(self, monkeypatch, fail_at=None, fault=None, late=False, watch=lambda: None):
        self.fail_at, self.fault, self.late, self.watch = fail_at, fault, late, watch
        self.count, self.watching = 0, False
        system = ("fsync", "open", "mkdir", "rename", "replace", "symlink", "link", "unlink", "rmdir")
        for owner, name in [
            *[(os, name) for name in system],
            (torch, "save"),
            (checkpoints.tensors, "write"),
            (checkpoints.files, "write_synced"),
            (checkpoints.files, "sha256_of"),
        ]:
            monkeypatch.setattr(owner, name, self.wrap(getattr(owner, name)))

    def wrap(self, function):
        def call(*arguments, **options):
            if self.watching:
                return function(*arguments, **options)
            self.count += 1
            number = self.count
            self.watching = True
            self.watch()
            self.watching = False
            if number == self.fail_at and not self.late:
                raise self.fault
            result = function(*arguments, **options)
            if number == self.fail_at:
                raise self.fault
            return result

        return call


def three_saves(run):
    """A run with a best and a last checkpoint, and one that the next save pushes out."""
    save(run, 100, best=True)
    save(run, 200)
    save(run, 300)


def save_new(run):
    save(run, 400, best=True)


def save_again(run):
    save(run, 300, best=True)


def assert_whole(run):
    """Nothing half made is to be seen, and both links lead to what they promise."""
    for path in (run / "checkpoints").iterdir():
        assert not path.name.startswith("."), path
        assert checkpoints.damage(path, FILES) is None, path
    saved = load(run)
    assert_holds(saved, saved.step)


@pytest.mark.parametrize("saving", [save_new, save_again])
@pytest.mark.parametrize(("fault", "late"), [(FAULTS[0], False), (FAULTS[1], True)], ids=repr)
def test_no_failure_harms_what_was_saved(tmp_path, monkeypatch, fault, late, saving):
    three_saves(tmp_path / "model")
    for number in range(1, 1000):
        run = tmp_path / str(number)
        shutil.copytree(tmp_path / "model", run, symlinks=True)
        with monkeypatch.context() as patch:
            calls = Calls(patch, number, fault, late)
            with contextlib.suppress(type(fault)):
                saving(run)
        if calls.count < number:
            break  # the whole save has passed without the fault
        assert_whole(run)
        assert find(run).name in ("step_00000300", "step_00000400")
        if number % 5 == 0:
            save(run, 500, best=True)
            assert_whole(run)
    assert number > 30


@pytest.mark.parametrize("saving", [save_new, save_again])
def test_a_kill_at_any_moment_leaves_good_links_and_the_next_save_tidies_up(tmp_path, monkeypatch, saving):
    run = tmp_path / "run"
    three_saves(run)
    moments = []

    def watch():
        moments.append(tmp_path / f"moment{len(moments)}")
        shutil.copytree(run, moments[-1], symlinks=True)

    with monkeypatch.context() as patch:
        Calls(patch, watch=watch)
        saving(run)
    assert len(moments) > 30
    for moment in moments:
        for name in ("last", "best"):
            assert checkpoints.damage(moment / "checkpoints" / name, FILES) is None
        saved = load(moment)
        assert_holds(saved, saved.step)
        assert saved.step in (300, 400)
        save(moment, 500)
        assert_whole(moment)


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
@pytest.mark.parametrize("written", [0, 0.5, 1])
def test_a_full_disk_while_writing_state(tmp_path, monkeypatch, fault, written):
    save(tmp_path, 100)
    real = torch.save

    def torn(value, file):
        real(value, file)
        file.truncate(int(file.tell() * written))
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", torn)
        with pytest.raises(type(fault)):
            save(tmp_path, 200)
    assert names(tmp_path) == ["last", "step_00000100"]
    assert_holds(load(tmp_path), 100)
    save(tmp_path, 200)
    assert_holds(load(tmp_path), 200)


def test_a_full_disk_is_an_oserror():
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoints.write_state(values(1), Full())


def test_remains_of_a_killed_run_are_ignored_and_swept(tmp_path):
    save(tmp_path, 100)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step_00000100", folder / ".tmp-step_00000200")
    (folder / ".tmp-step_00000200" / "state.pt").write_bytes(b"half")
    (folder / ".tmp-last").symlink_to(".tmp-step_00000200")
    assert_holds(load(tmp_path), 100)
    save(tmp_path, 200)
    assert names(tmp_path) == ["last", "step_00000100", "step_00000200"]


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path, 100)
    save(tmp_path, 100, weights={"w": torch.full((2, 3), 7.0)})
    assert names(tmp_path) == ["last", "step_00000100"]
    assert (load(tmp_path).weights["w"] == 7).all()


# ---- damage ----


@pytest.mark.parametrize("name", [*FILES, SUMS])
def test_missing_files_are_named(tmp_path, name):
    good, path = save(tmp_path, 400), save(tmp_path, 500)
    (path / name).unlink()
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert str(caught.value) == f"checkpoint {path}: {name} is missing: use {good}"


@pytest.mark.parametrize("bits", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_file_cut_at_any_byte_or_with_any_bit_flipped_is_named_and_the_checkpoint_before_offered(
    tmp_path, bits
):
    """Every length and every byte, of which a bit is flipped, or each of them in turn."""
    good, path = save(tmp_path, 400), save(tmp_path, 500)
    cases = 0
    for name in (*FILES, SUMS):
        content = (path / name).read_bytes()
        for place in range(len(content)):
            for damaged in (content[:place], *(flipped(content, place, bit) for bit in range(bits))):
                (path / name).write_bytes(damaged)
                problem = checkpoints.damage(path, FILES) or ""
                # a bit of the checksums may make any of their files look wrong
                assert "damaged" in problem or "missing" in problem, (name, place)
                assert name in problem or name == SUMS, (name, place)
                cases += 1
                if cases % 500 == 0:
                    with pytest.raises(ConfigError) as caught:
                        load(tmp_path)
                    assert str(caught.value) == f"checkpoint {path}: {problem}: use {good}"
        (path / name).write_bytes(content)
    assert cases > 5000
    assert_holds(load(tmp_path), 500)


def flipped(content, place, bit):
    return content[:place] + bytes([content[place] ^ 1 << (place + bit) % 8]) + content[place + 1 :]


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    path = save(tmp_path, 500)

    def refuse(file):
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(checkpoints.files, "sha256_of", refuse)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read \(Permission denied\)"):
        load(path)


def test_a_damaged_good_checkpoint_is_not_recommended(tmp_path):
    good, bad, path = (save(tmp_path, step, keep=3) for step in (300, 400, 500))
    for damaged in (bad, path):
        (damaged / "state.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"use {good}"):
        load(tmp_path)
