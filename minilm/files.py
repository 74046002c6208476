"""Files written whole or not at all, and by one process at a time."""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from minilm.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Content = bytes | str | Callable[[BinaryIO], object]


def write_atomic(path: Path | str, data: Content) -> None:
    """Put `data` at `path`: text (as UTF-8), bytes, or a function that writes to an open binary file.

    A reader, or a machine that loses power, sees the old file or the new one, never a part. On any error
    (a full disk's OSError, Ctrl-C) the old file stays and nothing else is left behind.
    """
    path = Path(path)
    temporary = _unfinished(path)
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _unfinished(path: Path) -> Path:
    """A name beside `path` that no other process uses, for what is to be there."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def clear_unfinished(folder: Path) -> None:
    """Remove what writes to files of a folder left that were killed in the middle; for who is alone in it."""
    for path in folder.glob(".*.tmp-*-*"):
        path.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """A folder to write into, which gets its name `path` when the block ends, and is gone if it fails.

    ConfigError where `path` holds something already.
    """
    path = Path(path).expanduser()
    temporary = _unfinished(path)
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"out={path} is there already: name a new folder")
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"out={path}: cannot be made ({error.strerror})") from None
    try:
        yield temporary
        sync(temporary)
        if path.is_dir():
            path.rmdir()  # it is empty, and not every system renames over it
        os.rename(temporary, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_synced(path: Path | str, data: Content) -> None:
    """Write `data` to `path` and wait until the disk holds it; its name is safe once its folder is synced too."""
    with named(path), open(path, "wb") as file:
        if callable(data):
            data(file)
        else:
            file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def named(path: Path | str) -> Iterator[None]:
    """An error of the disk within says of which file it is, as one of a write does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync(path: Path | str) -> None:
    """Wait until the disk holds a file's content, or which names a folder holds."""
    path = Path(path)
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders, and needs no such call
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems know no fsync of a folder
            raise
    finally:
        os.close(descriptor)


def open_own(path: Path | str) -> BinaryIO:
    """Open a file to append to. ConfigError where that is forbidden, or it is a link: what is written would land
    somewhere else."""
    try:
        if Path(path).is_symlink():
            raise ConfigError(
                f"{path} is a link, to {os.readlink(path)}: remove it, a run writes files of its own"
            )
        return open(path, "ab")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


@contextmanager
def held(path: Path | str, busy: str) -> Iterator[None]:
    """Hold a file, made if it is not there, against other processes. ConfigError(busy) where one of them holds it.

    The kernel lets go of it when the process ends, however it ends. Where there are no such locks (on Windows, on
    some network disks) nothing is held and nobody is refused.
    """
    with open_own(path) as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(busy) from None
            except OSError:  # this file system has no locks
                pass
        yield


def sha256_of(path: Path | str) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
