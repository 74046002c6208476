"""What a word on the command line means: `key=value` as a person types it, and as Hydra reads it."""

import os
import re
from pathlib import Path
from typing import NoReturn

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from minilm.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

#: keys whose value is taken as it was typed, with its commas, numbers and spaces, unless it is quoted or a [list]
TEXTS = ("prompt", "stop", "train.sample_prompt")

#: keys whose value is text though it may look like a number: `study.name=12`
NAMES = (
    *(
        "data.path",
        "tokenizer.path",
        "out_dir",
        "resume",
        "init_from",
        "checkpoint",
        "prompt_file",
        "path",
        "out",
    ),
    *("wandb.project", "wandb.name", "wandb.group", "study.name", "study.question"),
)


def in_utf8(argument: str) -> str:
    """The argument, also where Python holds its bytes as escapes, for want of a locale that knows them."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        key = argument.partition("=")[0]
        if key not in TEXTS:  # a path: it could not be opened either
            raise ConfigError(f"{argument}: not in the characters of this locale; set PYTHONUTF8=1") from None
        try:
            return os.fsencode(argument).decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{argument}: not UTF-8") from None
    return argument


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)


def in_order(arguments: list[str]) -> list[str]:
    """The arguments as argparse can read them: it wants all of key=value in one row, `a=1 -m b=1,2` has two."""
    parser = get_args_parser()
    parser.error = lambda message: _refuse(f"{message}; --help lists what there is")  # type: ignore[method-assign]
    known, rest = parser.parse_known_args(arguments)
    for option, value in (("--config-name", known.config_name), ("--config-path", known.config_path)):
        if value is not None:
            raise ConfigError(
                f"{option}={value}: a script has its own; --config-dir=FOLDER adds choices to its groups"
            )
    for argument in rest:
        if argument.startswith("-"):
            key = argument.lstrip("-").partition("=")[0]
            raise ConfigError(f"{argument}: no such option; to set a key say it without dashes, {key}=…")
    said = known.overrides + rest
    return [argument for argument in arguments if argument not in said] + said if rest else arguments


def is_for_others(name: str, argument: str) -> bool:
    section = key_of(argument).partition(".")[0].partition("/")[0]
    own = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    return "=" in argument and section not in [*own, *groups(name), "hydra"] and argument[0] != "-"


def groups(name: str) -> list[str]:
    """The groups that configs/NAME.yaml and those that it starts from choose of."""
    entries = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))["defaults"]
    found = []
    for entry in entries:
        if isinstance(entry, dict):
            found += [group for group in entry if " " not in group]  # `override hydra/…` is no choice
        elif entry != "_self_":
            found += groups(entry)
    return found


def key_of(word: str) -> str:
    """The key or group that a word such as `optim.lr=0.1` or `+recipe=x` sets."""
    return re.split(r"[=@]", word.lstrip("+~"))[0]


def as_typed(argument: str) -> str:
    """key=value with the value in Hydra's quotes, where Hydra would not read it as the text that it is."""
    key, equals, value = argument.partition("=")
    if not equals or key.startswith("-") or (key in TEXTS and value == "null"):
        return argument
    if key not in TEXTS or value[:1] in ("[", "'", '"'):
        try:
            read = OverridesParser.create().parse_override(argument)
            if read.is_sweep_override():
                return argument
            plain = read.value()
            number = isinstance(plain, int | float) and not isinstance(plain, bool)
            choice = (CONFIGS / key).is_dir() and not isinstance(plain, str | list)  # mask=null is not there
            if not choice and not (number and key in NAMES):
                return argument
        except HydraException:  # an apostrophe, an é, a ~
            pass
    return as_text(key, value) if key in TEXTS else _quoted(key, value)


def as_text(key: str, value: str) -> str:
    """key='value', which Hydra reads as that very text, whatever stands in it."""
    return _quoted(key, re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", value))  # no interpolation


def _quoted(key: str, value: str) -> str:
    value = re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + found[2].replace("'", r"\'"), value)
    return f"{key}='{value}'"


def choices(word: str) -> list[str]:
    """`key=[a,b]` or `key=a,b` as the words key=a and key=b. Raises ConfigError for any other."""
    key, _, value = word.partition("=")
    try:
        plain = value[1:-1] if value[:1] == "[" and value[-1:] == "]" else value
        read = OverridesParser.create().parse_override(f"{key}={plain}")
        if key and read.is_discrete_sweep():
            return [f"{key}={choice}" for choice in read.sweep_string_iterator()]
    except HydraException:
        pass
    raise ConfigError(f"{word}: expected a key with two or more values, {key or 'KEY'}=[A,B]")
