"""init_from=…: a run that starts from the weights of another run, or of an imported model, instead of fresh ones."""

from dataclasses import replace
from typing import Any

from minilm import checkpoint as checkpoints
from minilm import tokenizer as tokenizers
from minilm.checkpoint import Checkpoint
from minilm.config import Command, differences, overlay
from minilm.errors import ConfigError

#: what comes with the weights
SECTIONS = ("model", "embedding", "attention", "mask", "position", "tokenizer")

#: what may be said otherwise all the same: no weight depends on it
MAY_CHANGE = (
    "model.block_size",
    "model.dropout",
    "embedding.dropout",
    "attention.dropout",
    "attention.backend",
    "mask",
    "position.base",
)
TABLE = "position.table.weight"  # learned positions, one a row


def start_from(command: Command) -> tuple[dict[str, Any], Checkpoint | None]:
    """The configuration of a new run, and the checkpoint that init_from names, None where it is not set.

    The sections that shape the model are the checkpoint's, with what was said on the command line. Another context is
    a matter of positions: a table of learned ones is cut, and does not grow; all others are as good at any length.
    Raises ConfigError for whatever the weights do not fit.
    """
    path = command.config["init_from"]
    if path is None:
        return command.config, None
    if command.config["resume"] is not None:
        raise ConfigError(
            f"resume={command.config['resume']} and init_from={path}: a resumed run goes on from its own checkpoint, "
            "init_from begins another run; say one of them"
        )
    saved = checkpoints.load(path, state=False)
    theirs = {section: saved.config.get(section) for section in SECTIONS}
    for section, value in theirs.items():
        if not isinstance(value, dict):
            raise ConfigError(f"init_from={path}: config.yaml has no section {section}")
    settings = command.config if "recipe" in command.said else overlay(command.config | theirs, command)
    for section in SECTIONS:
        for key, old, new in differences(section, theirs[section], settings[section]):
            said = key in command.said or "recipe" in command.said or section == "mask"
            if not (said and key.startswith(MAY_CHANGE)):
                raise ConfigError(
                    f"{key}={new}: {path} has {old}, and its weights fit nothing else; leave it out"
                )
    return settings | {"init_from": str(saved.path)}, _fit(saved, settings["model"]["block_size"])


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
    """The configuration as `start_from` has it, with the size of the tokenizer that comes with the weights."""
    settings, saved = start_from(command)
    if saved is None or settings["vocab_size"] is not None:
        return settings
    return settings | {"vocab_size": tokenizers.from_dict(saved.tokenizer).vocab_size}
