"""Memory and disk that the machine does not give: one line that says what to lower, and what is left."""

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from minilm.errors import ConfigError, one_line

OUT_OF_MEMORY = (
    r"can't allocate memory|not enough memory|out of memory"  # the CPU's and mps's allocators say so
)

#: what a disk may refuse to a program that is right: it is full, closed to us or broken
REFUSALS = {
    getattr(errno, name, None)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "EIO", "ESTALE")
}


@contextmanager
def machine_trouble(memory: str, left: Callable[[], str] = str) -> Iterator[None]:
    """Makes one line of memory or disk that the machine does not give: a ConfigError.

    memory: what takes how much of it, and what to lower. left: called for what is left of the work, to go on with.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = one_line(error)
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not re.search(OUT_OF_MEMORY, text):
            raise
        wanted = re.search(r"(?i)(tried|unable) to allocate [\d.]+ \w+", text)
        said = f"out of memory ({wanted[0][0].lower()}{wanted[0][1:]})" if wanted else "out of memory"
        raise ConfigError("; ".join(filter(None, [f"{said} with {memory}", left()]))) from error
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        said = f"{error.filename or 'the disk'}: {error.strerror}"
        raise ConfigError("; ".join(filter(None, [said, left()]))) from error
