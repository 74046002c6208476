"""The command line: Hydra composes configs/, mistakes get one line. Knows Hydra (as lab/jobs.py does), and no torch.

The YAML files of the chosen options declare every key there is. A key that none of them declares is refused,
wherever it came from: the command line, a `+key`, or a recipe.
"""

import difflib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
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

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

#: Hydra's launchers, by the extra that brings them
LAUNCHERS = {"joblib": "joblib", "submitit_local": "slurm", "submitit_slurm": "slurm"}

#: how long the other processes of torchrun leave a mistake, which all of them meet, to the first one to tell; torchrun
#: ends them as soon as that has ended
MAIN_SECONDS = 30

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


@dataclass(frozen=True)
class Command:
    """What a person asked for.

    config: the composed configuration as plain dicts, lists, strings and numbers. said: the dotted keys and groups
    set on the command line; `recipe` among them stands for any key. out_dir: where this job writes. sweep: the folder
    of a sweep, if this is one of its jobs. others: the words that are for another script.
    """

    config: dict[str, Any]
    said: list[str]
    out_dir: Path
    default_out_dir: bool
    sweep: Path | None = None
    others: tuple[str, ...] = ()


class JobFailed(ConfigError):
    """A job of a sweep was refused, and has said so."""


def script(
    name: str, *, for_others: bool = False, keeps: bool = True
) -> Callable[[Callable[[Command], None]], Callable[[], None]]:
    """Makes a function of a `Command` into the main program of configs/NAME.yaml.

    for_others: words whose key that file does not have are no mistakes but go into `Command.others`. keeps: what it
    makes lies in out_dir, of which each job of a sweep has its own; the sweep of a script that keeps nothing there
    leaves no folder.
    """

    def decorate(main: Callable[[Command], None]) -> Callable[[], None]:
        others: list[str] = []
        typed: list[str] = []
        refused: list[DictConfig] = []
        here = os.getpid()

        def called() -> str:
            return Path(sys.argv[0]).stem

        def job(config: DictConfig) -> None:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                try:
                    with mistakes_of_a_job(called(), typed):
                        main(asked_for(config))
                except JobFailed:
                    refused.append(config)
                    if os.getpid() != here:  # a launcher's worker, from which only an error comes back
                        raise
            else:
                with mistakes_in_one_line(name, called()):
                    main(asked_for(config))

        def asked_for(config: DictConfig) -> Command:
            return replace(command(name, config), others=tuple(others))

        def run() -> None:
            os.environ["HYDRA_FULL_ERROR"] = (
                "1"  # exceptions come here as they are, not as Hydra's own summary
            )
            with mistakes_in_one_line(name, called()):
                arguments = _in_order([_in_utf8(argument) for argument in sys.argv[1:]])
                others[:] = [a for a in arguments if for_others and _is_for_others(name, a)]
                sys.argv[1:] = [as_typed(argument) for argument in arguments if argument not in others]
                typed[:] = sys.argv[1:]
                with ExitStack() as aside:
                    if not keeps and get_args_parser().parse_args().multirun:
                        folder = aside.enter_context(tempfile.TemporaryDirectory())
                        sys.argv.append(as_text("hydra.sweep.dir", folder))
                    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(job)()
                if refused:
                    raise JobFailed

        return run

    return decorate


@contextmanager
def mistakes_in_one_line(name: str, called: str) -> Iterator[None]:
    """A mistake of the user's ends the program with one line and status 2; a fault of ours shows its traceback.

    name: of the configuration. called: what the line begins with, the script's name.
    """
    try:
        yield
    except JobFailed:
        sys.exit(2)
    except (ConfigError, HydraException, OmegaConfBaseException, MarkedYAMLError) as error:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and os.environ.get("RANK", "0") != "0":
            time.sleep(MAIN_SECONDS)
        else:
            print(f"{called}: {one_line(_explain(name, error))}", file=sys.stderr)
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
def mistakes_of_a_job(called: str, typed: list[str]) -> Iterator[None]:
    """An error ends the job of a sweep, and not the sweep; it is told at once, with what sets this job apart."""
    try:
        yield
    except Exception as error:
        own = " ".join(word for word in HydraConfig.get().overrides.task if word not in typed)
        about = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}, see the traceback"
        print(f"{called}: {own + ': ' if own else ''}{' '.join(about.split())}", file=sys.stderr)
        if isinstance(error, ConfigError):
            raise JobFailed from None
        raise


def _raised_in_hydra(error: Exception) -> bool:
    """Whether Hydra itself says so, of an option of its own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals["__name__"].startswith("hydra.")


def _in_utf8(argument: str) -> str:
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


def _in_order(arguments: list[str]) -> list[str]:
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


def _is_for_others(name: str, argument: str) -> bool:
    section = key_of(argument).partition(".")[0].partition("/")[0]
    own = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    return "=" in argument and section not in [*own, *_groups(name), "hydra"] and argument[0] != "-"


def _groups(name: str) -> list[str]:
    """The groups that configs/NAME.yaml and those that it starts from choose of."""
    entries = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))["defaults"]
    found = []
    for entry in entries:
        if isinstance(entry, dict):
            found += [group for group in entry if " " not in group]  # `override hydra/…` is no choice
        elif entry != "_self_":
            found += _groups(entry)
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


def command(name: str, config: DictConfig) -> Command:
    """What the job that Hydra is running was asked for."""
    job = HydraConfig.get()
    _check_keys(name, config, dict(job.runtime.choices))
    plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    said = [key_of(override) for override in job.overrides.task]
    sweeping = job.mode == RunMode.MULTIRUN
    out_dir = job.runtime.output_dir if sweeping else os.path.expanduser(str(plain.get("out_dir", ".")))
    sweep = Path(job.sweep.dir) if sweeping else None
    return Command(plain, said, Path(out_dir), "out_dir" not in said and not sweeping, sweep)


def overlay(config: dict[str, Any], command: Command) -> dict[str, Any]:
    """Another configuration with what was said on the command line."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for said in command.said:
        section, _, key = said.partition(".")
        if key and isinstance(merged.get(section), dict) and "." not in key:
            merged[section][key] = command.config[section][key]
        elif section in command.config:
            merged[section] = command.config[section]
    return merged


def differences(key: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value in a, value in b) wherever two configurations differ below `key`."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted(a.keys() | b.keys()):  # _target_ comes first
            yield from differences(f"{key}.{name}", a.get(name), b.get(name))
    elif a != b:
        yield key, a, b


def compose(name: str, words: list[str]) -> dict[str, Any]:
    """The configuration that scripts/NAME.py makes of `words`, plain; for use within a script. Raises ConfigError."""
    loader = GlobalHydra.instance().config_loader()
    try:
        config = loader.load_configuration(
            name, overrides=[as_typed(word) for word in words], run_mode=RunMode.RUN
        )
        own = OmegaConf.create({key: config._get_node(key) for key in config if key != "hydra"})
        _check_keys(name, own, dict(config.hydra.runtime.choices))
        return OmegaConf.to_container(own, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException, MarkedYAMLError) as error:
        raise ConfigError(one_line(_explain(name, error))) from None


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


def _check_keys(name: str, config: DictConfig, choices: dict[str, str | None]) -> None:
    known, found = _known(name, choices), list(_leaves(config))
    for key in found:
        if key not in known:
            raise ConfigError(f"{key}: no such key; {_nearest(key, known, _groups(name))}")
    if missing := [key for key in known if key not in found]:
        key = min(missing, key=lambda key: key.count("."))
        section = key.rpartition(".")[0]
        if section and not OmegaConf.is_dict(OmegaConf.select(config, section)):
            raise ConfigError(_is_section(section, key))
        raise ConfigError(f"{key} has been taken away, and is needed: say {key}=…")


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
        return f"{group or 'the top level'} has {', '.join(siblings)}"
    return f"there are {', '.join(k for k in known if '.' not in k)}"


def _explain(name: str, error: Exception) -> str:
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
                groups = _groups(name)
                known = list(dict.fromkeys([*_known(name), *groups]))
            if inside := [k for k in known if k.startswith(f"{key}.")]:
                return _is_section(key, inside[0])
            return f"{key}: no such key; {_nearest(key, known, groups)}"
    cause = error.__cause__ or error
    return f"{key + ': ' if key else ''}{str(cause).splitlines()[0]}"
