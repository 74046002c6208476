"""Corpora of many documents, which never are in memory whole: folders of files, data sets of Hugging Face, mixtures.

A document goes to validation by a hash of its text, so it stays on its side whatever comes or goes beside it, and
copies of it are not on both. A text file of more than 2²⁰ characters goes by the first of its pieces (`readers`), which
is all that is in memory: a copy of it in a line of JSONL or a data set, hashed whole, may be on the other side. In the
tokens an end token stands after each.

Adding one is a class here with a `fingerprint`, a `size` and a `read`, and a file in configs/data/.
"""

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from minilm import shards
from minilm.console import bar, short
from minilm.data import Corpus, TokenData, Tokens, check_fraction, hash_of
from minilm.errors import ConfigError, first_line
from minilm.files import write_atomic
from minilm.readers import READERS, from_json, from_text, need, text_of
from minilm.shards import Parse, Piece, Shards
from minilm.tokenizer import Tokenizer, from_dict


@dataclass(frozen=True, kw_only=True)
class Documents(Corpus):
    """Texts of their own. val_fraction: the share of them that is for validation. document_mask: attention does not
    cross from one to another. workers: processes that tokenize, None for one a core."""

    documents: ClassVar[bool] = True

    val_fraction: float = 0.1
    document_mask: bool = False
    workers: int | None = None

    def __post_init__(self) -> None:
        check_fraction(self.val_fraction)
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"data.workers={self.workers}: a positive whole number, or null for one a core")

    @property
    def label(self) -> str:
        """What messages call it."""
        raise NotImplementedError

    @property
    def size(self) -> int | None:
        """What `read` counts to, None where that is not known."""
        raise NotImplementedError

    def fingerprint(self) -> list[Any]:
        """Plain JSON that changes whenever what `read` gives may have changed."""
        raise NotImplementedError

    def read(self) -> Iterator[Piece]:
        """All texts, in an order that does not change. One without characters is no document."""
        raise NotImplementedError

    @property
    def parse(self) -> Parse | None:
        """Makes text of a piece that is bytes, in the process that tokenizes it."""
        return None

    def texts(self) -> Iterator[str]:
        for piece in self.read():
            text = piece.text
            yield self.parse(text, piece.place) if self.parse and isinstance(text, bytes) else str(text)

    def fit(
        self, make: Callable[[Iterable[str]], Tokenizer], options: dict[str, Any], cache: Path
    ) -> Tokenizer:
        return fit_once(self, [self.fingerprint()], make, options, cache)

    def pieces(self) -> Iterator[Piece]:
        """As `read`, where all of a long document goes where its beginning belongs."""
        part = None
        for piece in self.read():
            if part is None and not piece.ends:
                part = shards.part_of(str(piece.text), self.val_fraction)
            yield piece._replace(part=part) if part else piece
            if piece.ends:
                part = None

    def prepare(self, tokenizer: Tokenizer, cache: Path) -> TokenData:
        if tokenizer.end_token is None:
            raise ConfigError(
                "tokenizer: it has no end token, and a corpus of documents separates them by one; train one for this "
                "corpus, or join the texts into one file for data=file"
            )
        facts = {
            "source": hash_of(self.fingerprint()),
            "tokenizer": tokenizer.fingerprint(),
            "end_token": tokenizer.end_token,
            "val_fraction": self.val_fraction,
        }
        folder = cache / hash_of(facts)
        before = shards.read(folder)
        size = self.size
        with bar("tokenizing") as show:
            manifest = shards.prepare(
                self.pieces,
                shards.Encoder(tokenizer, self.val_fraction, self.parse),
                folder,
                facts,
                workers=self.workers or cores(),
                progress=lambda done: show(done, size),
            )
        if before != manifest and hash_of(self.fingerprint()) != facts["source"]:
            (folder / shards.MANIFEST).unlink()
            raise ConfigError(f"{self.label}: it changed while it was read; run again when it is at rest")
        data = self._checked(manifest, folder, tokenizer)
        if before != manifest:
            print(told(manifest, folder), file=sys.stderr)
        return data

    def _checked(self, manifest: dict[str, Any], folder: Path, tokenizer: Tokenizer) -> TokenData:
        counts = {part: shards.total(manifest, part, "documents") for part in shards.PARTS}
        n = sum(counts.values())
        if not n:
            raise ConfigError(f"{self.label}: no text in it; name a source with documents")
        for part, what, cure in (
            ("train", "training", "smaller"),
            ("val", "validation", "larger"),
        ):
            if not counts[part] and (part == "train" or self.val_fraction):
                raise ConfigError(
                    f"data.val_fraction={self.val_fraction}: of the {n} documents of {self.label} none falls into "
                    f"{what}, which the hash of each decides; say a {cure} data.val_fraction, or give more documents"
                )
        train, val = (shards.open_part(folder, manifest, part) for part in shards.PARTS)
        return TokenData(
            train,
            val,
            shards.total(manifest, "val", "bytes"),
            None,
            hash_of([[shard[part]["sha256"] for part in shards.PARTS] for shard in manifest["shards"]]),
            end=tokenizer.end_token,
        )


@dataclass(frozen=True, kw_only=True)
class Folder(Documents):
    """Files below a folder, in the order of their names; or one file.

    A line of a .jsonl file is a document, a row of a .parquet file, and any other file whole. glob: patterns of the
    files, below `path`. text_column: the key of a line, or the column, that holds the text.
    """

    path: str
    glob: str | tuple[str, ...] = ("**/*.txt", "**/*.jsonl", "**/*.parquet")
    text_column: str = "text"

    @property
    def label(self) -> str:
        return f"data.path={self.path}"

    @property
    def files(self) -> list[Path]:
        root = Path(self.path).expanduser()
        try:
            if root.is_file():
                return [root]
            if not root.is_dir():
                raise ConfigError(f"{self.label}: there is no such folder")
            patterns = [self.glob] if isinstance(self.glob, str) else self.glob
            found = {file for pattern in patterns for file in root.glob(pattern) if file.is_file()}
        except (ValueError, NotImplementedError, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"data.glob={self.glob}: {error}") from None
        shown = {
            file.relative_to(root).as_posix(): file
            for file in found
            if not any(part.startswith(".") for part in file.relative_to(root).parts)
        }
        if not shown:
            raise ConfigError(f"{self.label}: no file in it that data.glob={list(patterns)} names")
        return [shown[name] for name in sorted(shown)]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(size for _, size, _ in self._stats())

    def fingerprint(self) -> list[Any]:
        return [self.text_column, *self._stats()]

    def _stats(self) -> list[list[Any]]:
        """Name, size and time of each file."""
        root = Path(self.path).expanduser()
        try:
            stats = [(file.relative_to(root).as_posix(), file.stat()) for file in self.files]
        except OSError as error:
            raise ConfigError(f"{self.label}: {error.filename} cannot be read ({error.strerror})") from None
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]

    def read(self) -> Iterator[Piece]:
        done = 0
        for file in self.files:
            reader = READERS.get(file.suffix.lower(), from_text)
            try:
                for piece in reader(file, self.text_column):
                    yield piece._replace(done=done + piece.done)
                done += file.stat().st_size
            except OSError as error:
                raise ConfigError(f"{file}: cannot be read ({error.strerror or error})") from None

    @property
    def parse(self) -> Parse:
        return partial(from_json, column=self.text_column)


@dataclass(frozen=True, kw_only=True)
class HuggingFace(Documents):
    """A data set of Hugging Face's hub, or a folder that `datasets` can open, streamed.

    path, name, split: as datasets.load_dataset has them; name is the configuration, where there are several.
    text_column: the column that holds the text.
    """

    path: str
    name: str | None = None
    split: str = "train"
    text_column: str = "text"

    @property
    def label(self) -> str:
        return f"data.path={self.path}"

    @cached_property
    def builder(self) -> Any:
        datasets = need("datasets", "data=hf")
        with self._in_one_line():
            return datasets.load_dataset_builder(self.path, self.name)

    @property
    def size(self) -> int | None:
        """Rows, where the data set says how many."""
        splits = self.builder.info.splits or {}
        return splits[self.split].num_examples if self.split in splits else None

    def fingerprint(self) -> list[Any]:
        with self._in_one_line():
            return [self.builder.hash, self.builder.config_id, self.split, self.text_column]

    def read(self) -> Iterator[Piece]:
        with self._in_one_line():
            for number, row in enumerate(self.builder.as_streaming_dataset(split=self.split), start=1):
                text = text_of(row, self.text_column, f"{self.label}, row {number} of {self.split},")
                yield Piece(text, True, number)

    @contextmanager
    def _in_one_line(self) -> Iterator[None]:
        """What the library raises, from whichever of its many formats, as a ConfigError."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.label}: {first_line(error)}") from error


@dataclass(frozen=True, kw_only=True)
class Mix(Corpus):
    """Several corpora at once. sources: of each the choice (`data: folder`) and its own keys. weights: how often each
    is drawn from, in proportion; None is as often as it is long. Validation is theirs, one after the other.
    make: a corpus of such a choice, and where it stands.
    """

    sources: tuple[dict[str, Any], ...]
    weights: tuple[float, ...] | None = None
    document_mask: bool = False
    make: Callable[[dict[str, Any], str], Corpus]

    def __post_init__(self) -> None:
        if len(self.sources) < 2:
            raise ConfigError(
                f"data.sources={list(self.sources)}: name two or more, [{{data: folder, path: …}}, …]"
            )
        weights = self.weights
        if weights is not None and (
            len(weights) != len(self.sources) or not all(0 < weight < math.inf for weight in weights)
        ):
            raise ConfigError(
                f"data.weights={list(weights)}: a positive number for each of {len(self.sources)} sources, or null"
            )
        for i, source in enumerate(self.corpora):
            if isinstance(source, Mix) or getattr(source, "document_mask", False):
                key = "data=mix" if isinstance(source, Mix) else "document_mask"
                raise ConfigError(
                    f"data.sources[{i}]: {key} is for all of a mixture, not for one of its sources"
                )

    @cached_property
    def corpora(self) -> list[Corpus]:
        return [self.make(source, f"data.sources[{i}]") for i, source in enumerate(self.sources)]

    @property
    def documents(self) -> bool:  # type: ignore[override]
        return any(corpus.documents for corpus in self.corpora)

    def texts(self) -> Iterator[str]:
        """One text of each in turn, as long as it has some."""
        running = [iter(corpus.texts()) for corpus in self.corpora]
        while running:
            for texts in list(running):
                try:
                    yield next(texts)
                except StopIteration:
                    running.remove(texts)

    def fit(
        self, make: Callable[[Iterable[str]], Tokenizer], options: dict[str, Any], cache: Path
    ) -> Tokenizer:
        facts = [
            c.fingerprint() if isinstance(c, Documents) else hash_of(list(c.texts())) for c in self.corpora
        ]
        return fit_once(self, facts, make, options, cache)

    def prepare(self, tokenizer: Tokenizer, cache: Path) -> TokenData:
        each = [corpus.prepare(tokenizer, cache) for corpus in self.corpora]
        weights = self.weights or [float(len(data.train)) for data in each]
        train, val = (
            Shards([array for data in each for array in arrays(getattr(data, part))]) for part in shards.PARTS
        )
        return TokenData(
            train,
            val,
            sum(data.val_bytes for data in each),
            None,
            hash_of([data.source for data in each]),
            mixed=tuple((len(data.train), weight) for data, weight in zip(each, weights, strict=True)),
            end=tokenizer.end_token if self.documents else None,
        )


def fit_once(
    corpus: Corpus,
    facts: list[Any],
    make: Callable[[Iterable[str]], Tokenizer],
    options: dict[str, Any],
    cache: Path,
) -> Tokenizer:
    """What `make` makes of the corpus's texts; kept in `cache`, if it had to read them, for the same facts."""
    path = cache / f"tokenizer-{hash_of([facts, options])}.json"
    if path.exists():
        try:
            return from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError):
            warnings.warn(f"{path}: damaged, and made anew", stacklevel=2)
    was_read = False

    def texts() -> Iterator[str]:
        nonlocal was_read
        was_read = True
        with bar("texts read for the tokenizer") as show:
            for number, text in enumerate(corpus.texts(), start=1):
                show(number, None)
                yield text

    made = make(texts())
    if was_read:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(made.to_dict()))
    return made


def told(manifest: dict[str, Any], folder: Path) -> str:
    """A line about what was prepared."""
    train, val = (shards.total(manifest, part, "tokens") for part in shards.PARTS)
    n = sum(shards.total(manifest, part, "documents") for part in shards.PARTS)
    return f"{n:,} documents are {short(train)} tokens to train on, {short(val)} for validation, in {folder}"


def arrays(tokens: Tokens) -> list[np.ndarray]:
    return tokens.arrays if isinstance(tokens, Shards) else [tokens]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
