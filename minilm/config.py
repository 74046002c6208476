"""The command line: Hydra composes configs/ as `words` say, and `mistakes` get one line. Imports no torch."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from minilm import mistakes
from minilm.errors import ConfigError, one_line
from minilm.words import CONFIGS, as_text, as_typed, in_order, in_utf8, is_for_others, key_of


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
                    with mistakes.of_a_job(called(), typed):
                        main(asked_for(config))
                except mistakes.JobFailed:
                    refused.append(config)
                    if os.getpid() != here:  # a launcher's worker, from which only an error comes back
                        raise
            else:
                with mistakes.in_one_line(name, called()):
                    main(asked_for(config))

        def asked_for(config: DictConfig) -> Command:
            return replace(command(name, config), others=tuple(others))

        def run() -> None:
            os.environ["HYDRA_FULL_ERROR"] = (
                "1"  # exceptions come here as they are, not as Hydra's own summary
            )
            with mistakes.in_one_line(name, called()), mistakes.warned_in_one_line(called()):
                arguments = in_order([in_utf8(argument) for argument in sys.argv[1:]])
                others[:] = [a for a in arguments if for_others and is_for_others(name, a)]
                sys.argv[1:] = [as_typed(argument) for argument in arguments if argument not in others]
                typed[:] = sys.argv[1:]
                with ExitStack() as aside:
                    if not keeps and get_args_parser().parse_args().multirun:
                        folder = aside.enter_context(tempfile.TemporaryDirectory())
                        sys.argv.append(as_text("hydra.sweep.dir", folder))
                    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(job)()
                if refused:
                    raise mistakes.JobFailed

        return run

    return decorate


def command(name: str, config: DictConfig) -> Command:
    """What the job that Hydra is running was asked for."""
    job = HydraConfig.get()
    mistakes.check_keys(name, config, dict(job.runtime.choices))
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
        mistakes.check_keys(name, own, dict(config.hydra.runtime.choices))
        return OmegaConf.to_container(own, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except mistakes.TOLD as error:
        raise ConfigError(one_line(mistakes.explain(name, error))) from None
