"""From a configuration (plain dicts) to objects. A section names its class in `_target_`; its other keys are that
constructor's keywords, checked against its annotations before anything runs.

Only classes of minilm of the kind that a section calls for are ever built, so the configuration in a stranger's
checkpoint can choose among our classes and do nothing else.
"""

import difflib
import importlib
import inspect
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import yaml
from pydantic import ConfigDict, Field, ValidationError, create_model

from minilm import checkpoint as checkpoints
from minilm import tokenizer as tokenizers
from minilm.attention.layer import Attention
from minilm.attention.masks import Mask
from minilm.attention.positions import Position
from minilm.checkpoint import Checkpoint
from minilm.data import ROOT, Corpus
from minilm.errors import ConfigError, one_line
from minilm.model import GPT, GPTConfig
from minilm.tokenizer import Tokenizer

T = TypeVar("T")
CHOICES = ROOT / "configs" / "data"

#: of a file or folder
Name = Annotated[str, Field(min_length=1)]

#: numbers are finite: no key means anything by infinity or NaN, and null is what switches one off
STRICT = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)


def construct(
    config: dict[str, Any], section: str, kind: type[T], *, method: str | None = None, **given: Any
) -> T:
    """The object that `config[section]` describes, of class `kind` or below.

    method: a class method to call instead of the class itself. given: what the code knows rather than the person
    (a width, a mask); each is passed on where the constructor takes it.
    """
    options = dict(config[section])
    cls = _class(options.pop("_target_", None), f"{section}._target_", kind)
    call = getattr(cls, method) if method else cls
    takes = inspect.signature(call).parameters
    given = {name: value for name, value in given.items() if name in takes}
    return call(**check(call, options, section, exclude=given.keys()), **given)


def check(call: Callable, options: dict[str, Any], section: str, exclude: Any = ()) -> dict[str, Any]:
    """`options`, checked by name and type against the signature of `call`; ConfigError for the first that is off."""
    prefix = f"{section}." if section else ""
    hints = typing.get_type_hints(call.__init__ if inspect.isclass(call) else call, include_extras=True)
    parameters = {
        name: p
        for name, p in inspect.signature(call).parameters.items()
        if name in hints and name not in exclude
    }
    for name in options:
        if name not in parameters:
            close = difflib.get_close_matches(name, parameters, n=1)
            hint = (
                f"did you mean {prefix}{close[0]}?"
                if close
                else f"it takes {', '.join(parameters) or 'none'}"
            )
            raise ConfigError(f"{prefix}{name}: no such key here; {hint}")
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind.name.endswith(("ONLY", "OR_KEYWORD"))
        if needed and name not in options:
            raise ConfigError(f"{prefix}{name} has no value: expected {_wanted(hints[name])}")
    fields: dict[str, Any] = {name: (hints[name], ...) for name in options}
    schema = create_model("Options", __config__=STRICT, **fields)
    try:
        # strict as JSON is: "3" is no number and 1 no truth, but a list may be a tuple and 1 a float
        checked = schema.model_validate_json(json.dumps(options), strict=True)
    except ValidationError as error:
        found = error.errors()
        name = str(found[0]["loc"][0])
        value = options[name] if isinstance(options[name], str) else json.dumps(options[name])
        wanted = _wanted(hints[name])
        if any(e["type"] == "finite_number" for e in found):
            wanted = wanted.replace("a number", "a finite number")
        raise ConfigError(f"{prefix}{name}={value}: expected {wanted}") from None
    return {name: getattr(checked, name) for name in options}


def _wanted(hint: Any) -> str:
    """A type in the words of a person."""
    if hint == Name:
        return "the name of a file or folder"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    parts = [_wanted(part) for part in typing.get_args(hint) if part is not ...]
    if typing.get_origin(hint) is tuple and ... not in typing.get_args(hint):
        return f"[{', '.join(parts)}]"
    if typing.get_origin(hint) is dict:
        return f"{{{parts[0]}: {parts[1]}, …}}"
    if typing.get_origin(hint) in (list, tuple):
        return f"[{parts[0]}, …]"
    return " or ".join(parts) or words.get(hint, str(hint))


def _class(path: Any, key: str, kind: type) -> type:
    """The class at a dotted path, if it is one of ours and of the right kind."""
    module, _, name = str(path).rpartition(".")
    found = None
    if module.startswith("minilm."):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            found = None
    if not (inspect.isclass(found) and issubclass(found, kind) and found.__module__ == module):
        raise ConfigError(f"{key}={path}: expected a {kind.__name__} of minilm, by its module and name")
    return found


def build_corpus(config: dict[str, Any]) -> Corpus:
    """The corpus of the section data. Nothing is read yet."""

    def source(options: dict[str, Any], place: str) -> Corpus:
        """One of several: a choice of configs/data, and those of its keys that are said."""
        said = dict(options)
        choice, files = said.pop("data", None), {file.stem: file for file in CHOICES.glob("*.yaml")}
        if choice not in files:
            raise ConfigError(f"{place}: data={choice}: expected one of {', '.join(sorted(files))}")
        declared = yaml.safe_load(files[choice].read_text(encoding="utf-8"))
        if missing := [key for key, value in declared.items() if value == "???" and key not in said]:
            raise ConfigError(f"{place}.{missing[0]} has no value: say {{data: {choice}, {missing[0]}: …}}")
        return construct({place: declared | said}, place, Corpus, make=source)

    return construct(config, "data", Corpus, make=source)


def build_model(config: dict[str, Any], vocab_size: int, end_token: int | None = None) -> GPT:
    """A model with fresh weights from the sections model, attention, mask and position; end_token keeps its attention
    within documents where the section data says document_mask."""
    shape = GPTConfig(
        vocab_size=vocab_size, **check(GPTConfig, config["model"], "model", exclude=("vocab_size",))
    )
    mask = construct(config, "mask", Mask)
    position = construct(
        config,
        "position",
        Position,
        n_embd=shape.n_embd,
        n_head=shape.n_head,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
    )

    def attention() -> Attention:
        return construct(
            config,
            "attention",
            Attention,
            n_embd=shape.n_embd,
            n_head=shape.n_head,
            n_kv_head=shape.n_kv_head,
            bias=shape.bias,
            mask=mask,
            position=position,
        )

    end_token = end_token if keeps_apart(config) else None
    return GPT(shape, position=position, attention=attention, end_token=end_token)


def keeps_apart(config: dict[str, Any]) -> bool:
    """Whether the model is to keep attention within a document."""
    data = config.get("data")
    return isinstance(data, dict) and data.get("document_mask", False)


def outline(saved: Checkpoint, tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> GPT:
    """The model of a checkpoint without its numbers, on the meta device. ConfigError where the weights do not fit.

    config: what stands in the place of the checkpoint's own. Takes no memory, whatever the configuration asks for.
    """
    config, n = config or saved.config, len(saved.weights)
    model = sketch(config, tokenizer.vocab_size, n, saved.path, end_token=tokenizer.end_token)
    check_weights(model, saved)
    return model


def sketch(
    config: dict[str, Any], vocab_size: int, tensors: int, source: Path, *, end_token: int | None = None
) -> GPT:
    """The model of a configuration from anywhere, `source`, on the meta device: without numbers or memory for them.

    tensors: how many there are for it, which no layer can do without.
    """
    for section in ("model", "attention", "mask", "position"):
        if not isinstance(config.get(section), dict):
            raise ConfigError(f"{source}: config.yaml has no section {section!r}")
    n_layer = config["model"].get("n_layer")
    if isinstance(n_layer, int) and n_layer > tensors:
        raise ConfigError(f"{source}: {n_layer} layers, and {tensors} tensors for them")
    try:
        with torch.device("meta"):
            return build_model(config, vocab_size, end_token)
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes that no tensor can have
        raise ConfigError(f"{source}: its configuration makes no model ({one_line(error):.200})") from error


def restore(path: str | Path, device: torch.device) -> tuple[GPT, Tokenizer, Checkpoint]:
    """The model of a checkpoint or run folder, ready to use on `device`, and its tokenizer."""
    saved = checkpoints.load(path, state=False)
    tokenizer = tokenizers.from_dict(saved.tokenizer)
    model = outline(saved, tokenizer)
    model.load_state_dict(saved.weights, assign=True)  # no second copy in memory
    model.tie()
    return model.float().to(device).eval(), tokenizer, saved


def load_weights(model: GPT, saved: Checkpoint) -> None:
    """Every weight of the checkpoint into the model, and none left over on either side; else a ConfigError."""
    check_weights(model, saved)
    model.load_state_dict(saved.weights)


def check_weights(model: GPT, saved: Checkpoint) -> None:
    expected = model.state_dict()
    off = sorted(set(expected) ^ set(saved.weights)) or [
        name
        for name, weight in expected.items()
        if weight.shape != saved.weights[name].shape or not saved.weights[name].is_floating_point()
    ]
    if off:
        raise ConfigError(f"{saved.path}: the weights do not fit the configuration, first at {off[0]}")
