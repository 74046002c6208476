"""What a person typed wrong, in one line that says what would be right.

The YAML files of the chosen options declare every key there is. A key that none of them declares is refused,
wherever it came from: the command line, a `+key`, or a recipe.
"""

import difflib
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import MarkedYAMLError

from minilm.errors import ConfigError, one_line
from minilm.words import CONFIGS, groups

#: Hydra's launchers, by the extra that brings them
LAUNCHERS = {"joblib": "joblib", "submitit_local": "slurm", "submitit_slurm": "slurm"}

#: how long the other processes of torchrun leave a mistake, which all of them meet, to the first one to tell; torchrun
#: ends them as soon as that has ended
MAIN_SECONDS = 30

#: what composing raises for a person
TOLD = (HydraException, OmegaConfBaseException, MarkedYAMLError)


class JobFailed(ConfigError):
    """A job of a sweep was refused, and has said so."""


@contextmanager
def in_one_line(name: str, called: str) -> Iterator[None]:
    """A mistake of the user's ends the program with one line and status 2; a fault of ours shows its traceback.

    name: of the configuration. called: what the line begins with, the script's name.
    """
    try:
        yield
    except JobFailed:
        sys.exit(2)
    except (ConfigError, *TOLD) as error:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and os.environ.get("RANK", "0") != "0":
            time.sleep(MAIN_SECONDS)
        else:
            print(f"{called}: {one_line(explain(name, error))}", file=sys.stderr)
        sys.exit(2)
    except ValueError as error:
        if not _raised_in_hydra(error):
            raise
        print(f"{called}: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # a reader that has had enough, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or flushing at exit fails once more
        sys.exit(141)  # as a program that the signal of a broken pipe ends
    except KeyboardInterrupt:
        print(f"{called}: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


@contextmanager
def of_a_job(called: str, typed: list[str]) -> Iterator[None]:
    """An error ends the job of a sweep, and not the sweep; it is told at once, with what sets this job apart."""
    try:
        yield
    except Exception as error:
        own = " ".join(word for word in HydraConfig.get().overrides.task if word not in typed)
        about = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}, see the traceback"
        print(f"{called}: {own + ': ' if own else ''}{one_line(about)}", file=sys.stderr)
        if isinstance(error, ConfigError):
            raise JobFailed from None
        raise


@contextmanager
def warned_in_one_line(called: str) -> Iterator[None]:
    """A warning of minilm's own is a line as a mistake is; one of a library says where it comes from."""
    usual = warnings.formatwarning

    def one(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        own = Path(filename).is_relative_to(Path(__file__).parents[1])
        return f"{called}: {message}\n" if own else usual(message, category, filename, lineno, line)

    warnings.formatwarning = one
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _raised_in_hydra(error: Exception) -> bool:
    """Whether Hydra itself says so, of an option of its own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals["__name__"].startswith("hydra.")


def check_keys(name: str, config: DictConfig, choices: dict[str, str | None]) -> None:
    """ConfigError for a key that no file of these choices declares, and for one that they declare and is gone."""
    known, found = _known(name, choices), list(_leaves(config))
    for key in found:
        if key not in known:
            raise ConfigError(f"{key}: no such key; {_nearest(key, known, groups(name))}")
    if missing := [key for key in known if key not in found]:
        key = min(missing, key=lambda key: key.count("."))
        section = key.rpartition(".")[0]
        if section and not OmegaConf.is_dict(OmegaConf.select(config, section)):
            raise ConfigError(_is_section(section, key))
        raise ConfigError(f"{key} has been taken away, and is needed: say {key}=…")


def _known(name: str, choices: dict[str, str | None] | None = None) -> tuple[str, ...]:
    """The keys that the files of these choices declare: without recipe and without overrides."""
    skipped = ("hydra", "recipe")
    overrides = tuple(f"{g}={c}" for g, c in (choices or {}).items() if c and not g.startswith(skipped))
    folders = GlobalHydra.instance().config_loader().get_search_path().get_path()
    return _declared(name, overrides, tuple(folder.path for folder in folders))


@cache  # to compose takes a third of a second, and the jobs of a sweep differ in few choices
def _declared(name: str, overrides: tuple[str, ...], folders: tuple[str, ...]) -> tuple[str, ...]:
    """folders: where Hydra looks for the files, that of --config-dir included."""
    loader = GlobalHydra.instance().config_loader()
    config = loader.load_configuration(name, overrides=list(overrides), run_mode=RunMode.RUN)
    return tuple(_leaves(OmegaConf.create({key: config._get_node(key) for key in config if key != "hydra"})))


def _leaves(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, config):
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            yield from _leaves(node, f"{prefix}{key}.")
        yield f"{prefix}{key}"


def _is_section(section: str, key: str) -> str:
    return f"{section} is a section, no value: set one of its keys, such as {key}=…"


def _nearest(key: str, known: Sequence[str], groups: list[str]) -> str:
    """Which choice of its group has such a key, or 'did you mean …', or the keys there are at that place."""
    group, _, name = key.rpartition(".")
    files = sorted((CONFIGS / group).glob("*.yaml")) if group in groups else []
    having = [f"{group}={f.stem}" for f in files if f"\n{name}:" in f.read_text(encoding="utf-8")]
    if having:
        return f"only {' and '.join(having)} {'has' if len(having) == 1 else 'have'} it"
    known = [k for k in known if not k.endswith("_target_")]
    same_name = [k for k in known if k.rpartition(".")[2] == name]
    siblings = [k for k in known if k.rpartition(".")[0] == group]
    if group and siblings:
        names = {k.rpartition(".")[2]: k for k in siblings}
        close = [names[n] for n in difflib.get_close_matches(name, names, n=1)]
    else:
        close = difflib.get_close_matches(key, known, n=1)
    if close := same_name or close:
        return f"did you mean {close[0]}?"
    if siblings:
        return f"{group or 'the top level'} has {', '.join(k.rpartition('.')[2] for k in siblings)}"
    return f"there are {', '.join(k for k in known if '.' not in k)}"


def explain(name: str, error: Exception) -> str:
    """One line for a person out of what Hydra and OmegaConf say."""
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, MarkedYAMLError):
        return f"{error.context or ''} {error.problem} {error.problem_mark}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no value: say {error.full_key}=…"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: expected key=value"
    if ambiguous := re.match(r"Ambiguous value for argument '((.+?)=(.+))'", str(error)):
        said, key, value = ambiguous.groups()
        return f"{said}: several runs need -m, a list is {key}=[{value}], and text with commas '{key}=\"{value}\"'"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        if group == "hydra/launcher" and (extra := LAUNCHERS.get(choice)):
            return f"{group}={choice} is not installed: pip install -e '.[{extra}]'"
        options = list(error.options or [])
        close = difflib.get_close_matches(choice, options, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"{group}={choice}: {hint}expected one of {', '.join(options)}"
    key = getattr(error.__cause__, "full_key", None) or getattr(error, "full_key", None)
    if isinstance(error, ConfigCompositionException) and (
        found := re.search(r"override '([^']+)'", str(error))
    ):
        key = found[1]
        if not key.startswith("hydra"):
            running = GlobalHydra.instance().is_initialized()
            with nullcontext() if running else hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
                of = groups(name)
                known = list(dict.fromkeys([*_known(name), *of]))
            if inside := [k for k in known if k.startswith(f"{key}.")]:
                return _is_section(key, inside[0])
            return f"{key}: no such key; {_nearest(key, known, of)}"
    said = str(error.__cause__ or error).splitlines()[0]
    said = re.sub(r"^\w+ raised while resolving interpolation: (['\"]?)(.*)\1$", r"\2", said)
    return f"{key + ': ' if key else ''}{said}"
