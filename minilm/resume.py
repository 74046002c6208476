"""resume=…: a run that goes on from its own checkpoint, in its own folder; and what it may change."""

import contextlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from minilm import checkpoint as checkpoints
from minilm.checkpoint import Checkpoint, run_folder
from minilm.config import Command, differences, overlay
from minilm.errors import ConfigError
from minilm.files import held
from minilm.finetune import SECTIONS

#: where texts lie; that they are the same ones is checked by their hash
MAY_MOVE = ("data.path", "data.sources")

#: what a resumed run may change; everything else makes another run
MAY_CHANGE = (
    "train",
    "optim",
    "schedule",
    "wandb",
    "tensorboard",
    "parallel",
    "device",
    "precision",
    "threads",
    "compile",
    "deterministic",
    "resume",
    "init_from",
    "out_dir",
)


def find_resumed(command: Command) -> Checkpoint | None:
    """The checkpoint to go on from: `resume=auto` looks in out_dir, and starts afresh where nothing was saved."""
    resume = command.config["resume"]
    if resume is None:
        return None
    if resume != "auto":
        folder = checkpoints.find(resume)
        if not (folder / checkpoints.STATE).exists():
            raise ConfigError(
                f"resume={resume}: {folder} has weights, and no {checkpoints.STATE} of a run to go on with; "
                f"init_from={resume} begins another run with them"
            )
        return _load(folder)
    if command.default_out_dir:
        raise ConfigError(
            "resume=auto looks for checkpoints in out_dir: name it, out_dir=…, or say resume=RUN_FOLDER"
        )
    try:
        found = checkpoints.find(command.out_dir)
    except ConfigError:
        return None
    return _load(found)


def _load(folder: Path) -> Checkpoint:
    """A checkpoint to go on from, where no other process is at work: it might take the files away meanwhile."""
    run = run_folder(folder)
    with alone_in(run) if (run / "metrics.jsonl").is_file() else contextlib.nullcontext():
        return checkpoints.load(folder)


def merge(saved: Checkpoint, command: Command) -> dict[str, Any]:
    """The saved run's configuration with what was said on this command line, if a resumed run may change it."""
    begun_from = saved.config.get("init_from")
    for section, now in command.config.items():
        if isinstance(now, dict) and not isinstance(saved.config.get(section, now), dict):
            raise ConfigError(
                f"checkpoint {saved.path}: config.yaml: {section} is no section, as a run saves it"
            )
    if "recipe" not in command.said:
        # with the keys that older runs knew nothing of
        merged = overlay(command.config | saved.config, command)
    elif begun_from is None:
        merged = command.config
    else:  # a recipe had no say in what came with the weights
        merged = overlay(command.config | {section: saved.config[section] for section in SECTIONS}, command)
    merged = rooted(merged | {"init_from": begun_from})
    for section in sorted(set(merged) | set(saved.config)):
        then, now = saved.config.get(section), merged.get(section)
        if then != now and section in saved.config and section not in MAY_CHANGE:
            for key, old, new in differences(section, then, now):
                if key not in MAY_MOVE:
                    raise ConfigError(
                        f"{key}={new}: the run to resume has {old}, and a resumed run cannot change it"
                    )
    return merged


def folder_of(saved: Checkpoint, command: Command) -> Path:
    """The folder of the run that a checkpoint belongs to, where it goes on."""
    run = run_folder(saved.path)
    if run == saved.path:
        raise ConfigError(f"resume={saved.path}: not in the checkpoints folder of a run, which could go on")
    named = Path(command.out_dir if command.config["resume"] == "auto" else command.config["resume"])
    if not saved.path.is_relative_to(named.expanduser().resolve()):
        raise ConfigError(f"{named}: its checkpoints lie elsewhere, in {run}: name that one if it is meant")
    if "out_dir" in command.said and command.out_dir.resolve() != run:
        raise ConfigError(f"out_dir={command.out_dir}: a resumed run goes on in its own folder, {run}")
    return run


def rooted(settings: dict[str, Any]) -> dict[str, Any]:
    """With the paths of texts absolute, so that a run can be gone on with from anywhere; a name of no file stays."""

    def absolute(data: dict[str, Any]) -> dict[str, Any]:
        path, sources = data.get("path"), data.get("sources")
        if isinstance(path, str) and os.path.exists(found := os.path.expanduser(path)):
            data = data | {"path": os.path.abspath(found)}
        return data | {"sources": [absolute(source) for source in sources]} if sources else data

    return settings | {"data": absolute(settings["data"])}


def alone_in(run: Path) -> AbstractContextManager[None]:
    """One process at a time trains in a run's folder: it holds the file of metrics."""
    return held(
        run / "metrics.jsonl", f"out_dir={run}: another process is training there; wait, or name another"
    )
