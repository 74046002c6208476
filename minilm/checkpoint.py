"""Checkpoints: whole or absent, verified when read, and read without running any code.

    RUN/checkpoints/step_00000500/    model.safetensors  config.yaml  tokenizer.json  state.pt  checksums.json
    RUN/checkpoints/last, best        symlinks to the newest and to the best of these folders

A save builds its folder under a hidden name, waits for the disk, and only then gives it its name; whatever
interrupts it, `last` leads to a whole checkpoint at every moment. One process at a time saves into a run.
"""

import json
import os
import shutil
import time
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch
import yaml
from torch import Tensor, nn

from minilm import files, tensors
from minilm.errors import ConfigError, one_line

WEIGHTS, CONFIG, TOKENIZER, STATE = FILES = ("model.safetensors", "config.yaml", "tokenizer.json", "state.pt")
SUMS = "checksums.json"  # the size and sha256 of each of FILES
POINTERS = ("last", "best")
HIDDEN = ".tmp-"  # begins the name of what is not yet, or no longer, a checkpoint
WRAPPERS = {"_orig_mod", "module"}  # parts of a name that torch.compile and data-parallel wrappers add

# What a safe loader gives back: exact types, since a str may also be an enum and a dict a DictConfig.
PLAIN: set[type] = {dict, list, str, int, float, bool, type(None)}
PLAIN_OR_TENSOR = PLAIN | {tuple, OrderedDict, Tensor, nn.Parameter}

# No file of ours comes near: what is larger was made to fill the memory or the stack of who reads it.
MAX_CONFIG_BYTES = 1 << 20
MAX_DEPTH = 100


@dataclass
class Checkpoint:
    path: Path
    step: int
    config: dict[str, Any]
    tokenizer: dict[str, Any]
    weights: dict[str, Tensor]  # on the CPU, under clean names, tied ones included
    state: dict[str, Any]  # on the CPU; empty if it was not asked for


# ---- writing ----


def save(
    run: Path | str,
    step: int,
    *,
    weights: Mapping[str, Tensor],
    state: dict[str, Any],
    config: dict[str, Any],
    tokenizer: dict[str, Any],
    best: bool = False,
    keep: int = 2,
) -> Path:
    """Save a checkpoint in a run's folder, move `last` (and `best`) to it, and return its own folder.

    `weights` is a state_dict, of a compiled or wrapped model too. `state` holds tensors and plain values,
    `config` and `tokenizer` plain values alone: anything else is a TypeError that says where it lies.
    An earlier checkpoint of the same step is replaced. The newest `keep` stay, and those that `last` and
    `best` lead to. On any error (a full disk's OSError, Ctrl-C) the earlier ones stay as they were.
    """
    if keep < 1:
        raise ConfigError(f"keep={keep}: a run keeps 1 checkpoint or more")
    check_plain(state, "state", PLAIN_OR_TENSOR)
    check_plain(config, "config")
    check_plain(tokenizer, "tokenizer")
    held, tied = untie(clean_keys(weights))
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    dtypes = {name: tensor.dtype for name, tensor in held.items()}
    about = weights_header(step, tied)
    contents: dict[str, files.Content] = {
        WEIGHTS: lambda file: tensors.write(file, shapes, held.__getitem__, about, dtypes=dtypes),
        CONFIG: yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        TOKENIZER: json.dumps(tokenizer, ensure_ascii=False),
        STATE: lambda file: write_state(state, file),
    }

    folder = Path(run) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step_{step:08d}"
    new = folder / (HIDDEN + final.name)
    try:
        settle(folder)
        new.mkdir()
        write_parts(new, contents)
        make_newest(new)
        files.sync(new)
        if final.exists():
            point(folder / "last", new)  # from here on the new one counts,
            settle(folder)  # and its name follows
        else:
            os.rename(new, final)
            files.sync(folder)
            point(folder / "last", final)
        if best:
            point(folder / "best", final)
        prune(folder, keep)
        settle(folder)
    except BaseException:
        settle(folder)
        raise
    return final


def weights_header(step: int, tied: Mapping[str, str]) -> dict[str, str]:
    """What the header of model.safetensors says besides the tensors. tied: a name left out -> the name it shares."""
    return {"format": "pt", "step": str(step), "tied": json.dumps(dict(tied))}


def write_parts(folder: Path, contents: Mapping[str, files.Content]) -> None:
    """Write the files of a checkpoint into a folder, and their checksums."""
    sums = {}
    for name, content in contents.items():
        files.write_synced(folder / name, content)
        sums[name] = {"size": (folder / name).stat().st_size, "sha256": files.sha256_of(folder / name)}
    files.write_synced(folder / SUMS, json.dumps(sums, indent=1))


def clean_keys(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights without the `_orig_mod.` and `module.` of wrappers, wherever they stand in a name."""
    clean: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        *parents, own = name.split(".")
        short = ".".join([part for part in parents if part not in WRAPPERS] + [own])
        if short in clean:
            raise ConfigError(f"weights: {name!r} and another are both {short!r} without wrappers' prefixes")
        clean[short] = tensor
    return clean


def untie(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, tied ones once only; and for each name left out, the name that holds its tensor."""
    held: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple, str] = {}
    for name, tensor in weights.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            tied[name] = seen[place]
        else:
            seen[place] = name
            held[name] = tensor
    return held, tied


def write_state(state: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        if error.__context__ is not None:  # a full disk or Ctrl-C, behind a complaint of torch's own
            raise error.__context__ from None
        raise


def check_plain(value: Any, where: str, kinds: set[type] = PLAIN) -> None:
    """TypeError naming the place of the first value that a safe loader would refuse or change."""
    if type(value) not in kinds:
        found = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(
            f"{where} is a {found}: a checkpoint holds {' '.join(sorted(k.__name__ for k in kinds))}"
        )
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str and (kinds is PLAIN or type(key) is not int):
                raise TypeError(f"{where} has the key {key!r}, which is not a string")
            check_plain(item, f"{where}[{key!r}]", kinds)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_plain(item, f"{where}[{index}]", kinds)


def point(link: Path, checkpoint: Path) -> None:
    """Make `link` lead to a checkpoint beside it, in one step and for good."""
    new = link.with_name(HIDDEN + link.name)
    os.symlink(checkpoint.name, new, target_is_directory=True)
    os.replace(new, link)
    files.sync(link.parent)


def pointed(folder: Path) -> dict[Path, str]:
    """Where `last` and `best` lead."""
    links = [folder / name for name in POINTERS]
    return {link: os.readlink(link) for link in links if link.is_symlink()}


def settle(folder: Path) -> None:
    """Remove what a save that was cut short has left; a replacement that had begun is finished."""
    hidden = list(folder.glob(HIDDEN + "*"))
    held = set(pointed(folder).values())
    for path in hidden:
        if path.name not in held:
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
    for path in hidden:
        if path.name in held:
            replace(path)
            settle(folder)


def replace(new: Path) -> None:
    """Give `new`, which `last` leads to, the name of the checkpoint it replaces.

    A symlink does not follow a rename: to leave `last` no moment in which it leads nowhere, a twin made of
    hard links takes the name while `last` still holds `new`. If this is cut short, it is simply done again.
    """
    final = new.with_name(new.name.removeprefix(HIDDEN))
    twin = shutil.copytree(new, new.with_name(new.name + "-twin"), copy_function=link_or_copy)
    files.sync(twin)
    links = [link for link, name in pointed(new.parent).items() if name in (new.name, final.name)]
    for link in links:
        point(link, new)
    if final.exists():
        hide(final)
    os.rename(twin, final)
    files.sync(final.parent)
    for link in links:
        point(link, final)


def link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, destination)
        files.sync(destination)


def hide(checkpoint: Path) -> None:
    """Take a checkpoint away in one step, for `settle` to remove: none is ever seen half removed."""
    os.rename(checkpoint, checkpoint.with_name(f"{HIDDEN}old-{checkpoint.name}"))


def prune(folder: Path, keep: int) -> None:
    held = set(pointed(folder).values())
    for checkpoint in by_age(folder)[keep:]:
        if checkpoint.name not in held:
            hide(checkpoint)


def make_newest(new: Path) -> None:
    """Give a folder a time after that of every checkpoint beside it, though the clock may have gone back."""
    stamp = max([time.time_ns(), *(path.lstat().st_mtime_ns + 1 for path in new.parent.glob("step_*"))])
    os.utime(new, ns=(stamp, stamp))


def by_age(folder: Path) -> list[Path]:
    """A folder's checkpoints, the last saved first: a run may have gone back to a lower step."""
    return sorted(folder.glob("step_*"), key=lambda path: (path.lstat().st_mtime_ns, path.name), reverse=True)


# ---- reading ----


def load(path: Path | str, *, state: bool = True) -> Checkpoint:
    """Read the checkpoint that `find` finds, after verifying the size and sha256 of each file.

    With `state=False` weights, config and tokenizer only: enough to generate, and state.pt may be absent.
    ConfigError names the file that is missing or damaged, and a whole checkpoint beside it if there is one.
    """
    folder = find(path)
    names = [name for name in FILES if state or name != STATE]
    if problem := damage(folder, names):
        others = [other for other in by_age(folder.parent) if other != folder]
        good = next((other for other in others if not damage(other, names)), None)
        cure = (
            f"use {good}" if good else "no other checkpoint beside it is whole; copy it again or train anew"
        )
        raise ConfigError(f"checkpoint {folder}: {problem}: {cure}")
    parts: dict[str, Any] = {STATE: {}}
    for name in names:
        try:
            parts[name] = read(folder / name)
        except Exception as error:  # whatever a parser makes of a file from elsewhere
            deep = isinstance(error, RecursionError)
            reason = "it is nested too deeply" if deep else one_line(error)[:200]
            raise ConfigError(f"checkpoint {folder}: {name} is not what minilm writes: {reason}") from error
    step, weights = parts[WEIGHTS]["step"], parts[WEIGHTS]["weights"]
    return Checkpoint(folder, step, parts[CONFIG], parts[TOKENIZER], weights, parts[STATE])


def find(path: Path | str) -> Path:
    """The folder of the checkpoint that a run, its `checkpoints` folder or a checkpoint itself stands for.

    A run stands for its `last` checkpoint; for the one saved last if that link is lost. Else ConfigError; also where
    a name in a `checkpoints` folder leads out of it, as no link of ours does.
    """
    try:
        start = Path(path).expanduser()
        for candidate in (start, start / "last", start / "checkpoints" / "last"):
            if is_checkpoint(candidate):
                return beside(candidate)
        for candidate in by_age(start) + by_age(start / "checkpoints"):
            if is_checkpoint(candidate):
                return beside(candidate)
        if start.is_dir():
            problem = f"it holds no {WEIGHTS}, last, checkpoints/last or checkpoints/step_*"
        else:
            problem = "this is a file" if start.exists() else "there is no such folder"
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a name too long, ~nobody, no permission
        problem = getattr(error, "strerror", None) or str(error)
    raise ConfigError(f"no checkpoint at {path}: {problem}; name the folder of a run, such as runs/latest")


def beside(checkpoint: Path) -> Path:
    """The folder itself that `checkpoint`, perhaps a link, is. ConfigError for a link out of a `checkpoints` folder."""
    folder = checkpoint.resolve()
    if checkpoint.parent.name == "checkpoints" and folder.parent != checkpoint.parent.resolve():
        raise ConfigError(f"{checkpoint} leads out of its folder, to {folder}: name that one if it is meant")
    return folder


def run_folder(checkpoint: Path) -> Path:
    """The run that a checkpoint's folder belongs to; one that was copied elsewhere stands for itself."""
    return checkpoint.parents[1] if checkpoint.parent.name == "checkpoints" else checkpoint


def is_checkpoint(folder: Path) -> bool:
    """Also for a damaged one, so that `load` can say what is wrong with it."""
    return any((folder / name).is_file() for name in (WEIGHTS, STATE, SUMS))


def damage(folder: Path, names: Iterable[str]) -> str | None:
    """What is wrong with the files of a checkpoint, or None."""
    name = SUMS
    try:
        sums = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        wanted = {name: (sums[name]["size"], sums[name]["sha256"]) for name in names}
        for name, (size, sha256) in wanted.items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} is damaged ({file.stat().st_size} bytes; {SUMS} says {size})"
            if files.sha256_of(file) != sha256:
                return f"{name} is damaged (its sha256 is not what {SUMS} says)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except (ValueError, LookupError, TypeError, RecursionError):
        absent = next((name for name in names if not (folder / name).is_file()), None)
        return f"{absent} is missing" if absent else f"{SUMS} is damaged"
    return None


def read(file: Path) -> dict[str, Any]:
    """One file of a checkpoint, by loaders that only ever build plain values and tensors."""
    size = file.stat().st_size
    if file.name == WEIGHTS:
        return read_weights(file)
    if file.name == STATE:
        with zipfile.ZipFile(file) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > size:
                raise ValueError("it would unpack to more than it is")
        value = torch.load(file, map_location="cpu", weights_only=True)
    elif file.name == TOKENIZER:
        value = json.loads(file.read_text(encoding="utf-8"))
    elif size > MAX_CONFIG_BYTES:
        raise ValueError(f"it is {size} bytes long, a configuration at most {MAX_CONFIG_BYTES}")
    else:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not a mapping")
    check_size(value, size)
    check_plain(value, "it", PLAIN_OR_TENSOR if file.name == STATE else PLAIN)
    return value


def check_size(value: Any, most: int) -> None:
    """ValueError for a value that takes more than the `most` bytes that it was read from, or is nested too deeply.

    In a few bytes a list may name another one many times, which names a third, and a tensor may claim any shape.
    """
    todo, size = [(value, 0)], 0
    while todo:
        item, depth = todo.pop()
        if isinstance(item, Tensor):
            if item.layout != torch.strided or item.is_meta or item.nbytes > item.untyped_storage().nbytes():
                raise ValueError(f"a tensor of shape {list(item.shape)} has no such numbers")
            size += item.nbytes
        elif isinstance(item, dict | list | tuple):
            size += len(item)
        if size > most:
            raise ValueError("it stands for more than it holds")
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        if isinstance(item, dict | list | tuple):
            todo += [(inner, depth + 1) for inner in (item.values() if isinstance(item, dict) else item)]


def read_weights(file: Path) -> dict[str, Any]:
    with safetensors.safe_open(file, framework="pt", device="cpu") as opened:
        about = opened.metadata() or {}
        weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    if not {"step", "tied"} <= about.keys():
        raise ValueError("its header names no step")
    weights |= {alias: weights[name] for alias, name in json.loads(about["tied"]).items()}
    return {"step": int(about["step"]), "weights": clean_keys(weights)}
