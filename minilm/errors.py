"""The one exception for mistakes that a person can mend, and what its message is made of."""

import importlib
from typing import Any


class ConfigError(ValueError):
    """A wrong key, value, file or combination of them.

    The message is one line that names the key or file, the value found and what would be right.
    Scripts print it without a traceback and exit with status 2; a library user catches a ValueError.
    """


def one_line(text: object) -> str:
    """A text, or what an error says, with its line ends and runs of spaces as single spaces."""
    return " ".join(str(text).split())


def first_line(error: Exception) -> str:
    """The first line of what an error says; its type where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def installed(package: str, otherwise: str) -> Any:
    """A module of a package that may be missing; then a ConfigError that says `otherwise`."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(otherwise) from None
