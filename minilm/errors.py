"""The one exception for mistakes that a person can mend."""


class ConfigError(ValueError):
    """A wrong key, value, file or combination of them.

    The message is one line that names the key or file, the value found and what would be right.
    Scripts print it without a traceback and exit with status 2; a library user catches a ValueError.
    """
