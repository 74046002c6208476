"""init_from=…: a run that starts from the weights of another run, or of an imported model, instead of fresh ones."""

from dataclasses import replace
from typing import Any

from minilm import checkpoint as checkpoints
from minilm import tokenizer as tokenizers
from minilm.checkpoint import Checkpoint
from minilm.config import Command, differences, overlay
from minilm.errors import ConfigError

#: what comes with the weights
SECTIONS = ("model", "attention", "mask", "position", "tokenizer")

#: what may be said otherwise all the same: no weight depends on it
MAY_DIFFER = (
    "model.block_size",
    "model.dropout",
    "model.ngram_dropout",
    "attention.dropout",
    "attention.backend",
    "mask",
    "position.base",
)
TABLE = "position.table.weight"  # learned positions, one a row


def start_from(command: Command) -> tuple[dict[str, Any], Checkpoint | None]:
    """The configuration of a new run, and the checkpoint that init_from names: None where it is not set, or where
    resume=auto goes on with a run that has begun, so that one command line serves for every start of a job.

    The sections that shape the model are the checkpoint's, with what was said on the command line itself: a recipe
    says nothing of them. Another context is a matter of positions: a table of learned ones is cut, and does not grow;
    all others are as good at any length. Raises ConfigError for whatever the weights do not fit.
    """
    path, resume = command.config["init_from"], command.config["resume"]
    if path is None or (resume == "auto" and _has_begun(command)):
        return command.config, None
    return _begin(command)


def _begin(command: Command) -> tuple[dict[str, Any], Checkpoint]:
    path, resume = command.config["init_from"], command.config["resume"]
    if resume not in (None, "auto"):
        raise ConfigError(
            f"resume={resume} and init_from={path}: a resumed run goes on from its own checkpoint, init_from begins "
            "another run; say one of them, or resume=auto, which begins where there is nothing to go on with"
        )
    saved = checkpoints.load(path, state=False)
    theirs = {section: saved.config.get(section) for section in SECTIONS}
    for section, value in theirs.items():
        if not isinstance(value, dict):
            raise ConfigError(f"init_from={path}: config.yaml has no section {section}")
    settings = overlay(command.config | theirs, command)
    for section in SECTIONS:
        for key, old, new in differences(section, theirs[section], settings[section]):
            said = key in command.said or section == "mask"
            if not (said and key.startswith(MAY_DIFFER)):
                raise ConfigError(
                    f"{key}={new}: {path} has {old}, and its weights fit nothing else; leave it out"
                )
    return settings | {"init_from": str(saved.path)}, _fit(saved, settings["model"]["block_size"])


def _has_begun(command: Command) -> bool:
    """Whether resume=auto has a checkpoint to go on from."""
    if command.default_out_dir:  # which is a new folder
        return False
    try:
        checkpoints.find(command.out_dir)
    except ConfigError:
        return False
    return True


def _fit(saved: Checkpoint, block_size: int) -> Checkpoint:
    """The checkpoint with learned positions, if it has them, for a context of block_size."""
    table = saved.weights.get(TABLE)
    if table is None or not isinstance(block_size, int) or block_size < 1:  # what is no size is refused later
        return saved
    if block_size > len(table):
        raise ConfigError(
            f"model.block_size={block_size}: {saved.path} has learned positions for {len(table)} tokens, which can be "
            "cut, but do not grow"
        )
    return replace(saved, weights=saved.weights | {TABLE: table[:block_size]})


def with_vocab_size(command: Command) -> dict[str, Any]:
    """The configuration of a new run, as `start_from` has it, with the size of the tokenizer that comes with the
    weights.
    """
    if command.config["init_from"] is None:
        return command.config
    settings, saved = _begin(command)
    if settings["vocab_size"] is not None:
        return settings
    return settings | {"vocab_size": tokenizers.from_dict(saved.tokenizer).vocab_size}
