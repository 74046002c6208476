"""Text in, batches out: corpora, the split, the token cache, and the order in which windows are visited.

Adding a corpus is a small class here (a `Text` with a `read` that returns it, or in `sources` a `Documents` with a
`read` that yields them) and one file in configs/data/.
"""

import hashlib
import http.client
import json
import os
import pydoc_data.topics
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from minilm import tales
from minilm.errors import ConfigError
from minilm.files import sha256_of, write_atomic
from minilm.shards import Shards
from minilm.tokenizer import Tokenizer, dtype_for

Tokens = np.ndarray | Shards  # (N,), on a disk

ROOT = Path(__file__).resolve().parents[1]
ROUND = 1 << 14  # windows over which the shares of mixed sources are exact


class Corpus:
    """What a model is trained on and measured by; its constructor's keywords are its file in configs/data/."""

    #: texts of their own, which the tokenizer's end token separates
    documents: ClassVar[bool] = False

    def fit(
        self, make: Callable[[Iterable[str]], Tokenizer], options: dict[str, Any], cache: Path
    ) -> Tokenizer:
        """The tokenizer that `make` makes of the corpus's texts. options: what it was asked to be."""
        return make(self.texts())

    def texts(self) -> Iterable[str]:
        raise NotImplementedError

    def prepare(self, tokenizer: Tokenizer, cache: Path) -> "TokenData":
        """The tokens, made now or by an earlier run in the folder `cache`. Raises ConfigError for what has none."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Text(Corpus):
    """A single text and its split: the last `val_fraction` of its characters is for validation."""

    val_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_fraction(self.val_fraction)

    @cached_property
    def text(self) -> str:
        return self.read()

    def read(self) -> str:
        raise NotImplementedError

    def texts(self) -> Iterable[str]:
        yield self.text

    def prepare(self, tokenizer: Tokenizer, cache: Path) -> "TokenData":
        """The split is by characters, so that every tokenizer is measured on the same validation text."""
        text = self.text
        cut = round(len(text) * (1 - self.val_fraction))
        parts = {"train": text[:cut], "val": text[cut:]}
        dtype = dtype_for(tokenizer.vocab_size)
        facts: dict[str, Any] = {
            "source": hashlib.sha256(text.encode()).hexdigest(),
            "tokenizer": tokenizer.fingerprint(),
            "dtype": dtype.name,
            "cut": cut,
        }
        folder = cache / hash_of(facts)
        if not _holds(folder, facts):
            if (folder / "facts.json").exists():
                warnings.warn(f"{folder}: the cached tokens are damaged, and made anew", stacklevel=2)
            folder.mkdir(parents=True, exist_ok=True)
            for name, part in parts.items():
                write_atomic(folder / f"{name}.bin", tokenizer.encode_array(part).astype(dtype).tobytes())
            # last: it says that the rest is whole
            write_atomic(folder / "facts.json", json.dumps(facts | {"sha256": _sums(folder)}, indent=1))
        train, val = (_map(folder / f"{name}.bin", dtype) for name in parts)
        nats = self.floor(cut)
        floor = nats / len(val) if nats is not None and len(val) else None
        return TokenData(train, val, len(parts["val"].encode()), floor, facts["source"])

    def floor(self, start: int) -> float | None:
        """Total information in nats of the characters from `start` on, where the source is known."""
        return None


def check_fraction(val_fraction: float) -> None:
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"data.val_fraction={val_fraction}: a share from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class Tales(Text):
    """The embedded corpus: tiny stories from a grammar of our own, whose entropy is known (data/tales/)."""

    seed: int = 1337
    n_bytes: int = 1_000_000

    @cached_property
    def made(self) -> tales.Tales:
        """Written once, and read back while grammar and code stay what they are: to write it takes a second."""
        sources = [Path(tales.__file__), *sorted(tales.FOLDER.glob("*.yaml"))]
        facts = repr((self.seed, self.n_bytes, *map(sha256_of, sources)))
        path = ROOT / "data" / "cache" / f"tales-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.npz"
        if path.exists():
            try:
                with np.load(path) as saved:
                    return tales.Tales(saved["text"].tobytes().decode(), saved["nats"])
            except Exception:  # whatever zip, its packing and numpy make of a damaged file
                warnings.warn(f"{path}: damaged, and made anew", stacklevel=2)
        made = tales.generate(self.seed, self.n_bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = np.frombuffer(made.text.encode(), np.uint8)
        write_atomic(path, lambda file: np.savez_compressed(file, text=text, nats=made.nats))
        return made

    def read(self) -> str:
        return self.made.text

    def floor(self, start: int) -> float:
        return float(self.made.nats[start:].sum())


@dataclass(frozen=True, kw_only=True)
class TextFile(Text):
    """Any UTF-8 text file."""

    path: str

    def read(self) -> str:
        return read_text(self.path, key="data.path")


@dataclass(frozen=True, kw_only=True)
class Download(Text):
    """A text fetched once, kept under data/downloads/, and checked against its size and hash."""

    url: str
    name: str
    sha256: str
    n_bytes: int

    def read(self) -> str:
        path = ROOT / "data" / "downloads" / self.name
        if not path.exists():
            self._fetch(path)
        self._check(path.read_bytes(), f"{path}", "remove it to fetch it anew")
        return read_text(path, key="data")

    def _check(self, raw: bytes, source: str, cure: str) -> None:
        if len(raw) != self.n_bytes or hashlib.sha256(raw).hexdigest() != self.sha256:
            raise ConfigError(
                f"{source}: {len(raw)} bytes with another hash, expected {self.n_bytes} bytes with sha256 "
                f"{self.sha256}; {cure}"
            )

    def _fetch(self, path: Path) -> None:
        by_hand = f"put the file by hand at {path}, or use data=file data.path=YOUR_FILE"
        try:
            with urllib.request.urlopen(self.url, timeout=20) as response:
                raw = response.read(self.n_bytes + 1)
            self._check(raw, self.url, by_hand)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, raw)
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"{self.name} could not be fetched from {self.url} ({error}): {by_hand}"
            ) from None


@dataclass(frozen=True, kw_only=True)
class PyDoc(Text):
    """The language reference that ships with Python, as its help() prints it; it differs a little by version."""

    def read(self) -> str:
        topics = pydoc_data.topics.topics
        return normalise_newlines("\n\n".join(topics[name] for name in sorted(topics)))


def normalise_newlines(text: str) -> str:
    """CRLF and CR become LF, in corpora and prompts alike."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_text(path: Path | str, key: str) -> str:
    """A UTF-8 file as text: a byte order mark is dropped, line ends become LF. `key` names the source in errors."""
    if not str(path):
        raise ConfigError(f"{key} is empty: name a text file")
    path = Path(os.path.expanduser(path))
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = " (UTF-16?)" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise ConfigError(
            f"{key}={path}: not UTF-8 at byte {error.start} (0x{raw[error.start]:02x}){hint}; convert it to UTF-8"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigError(
            f"{key}={path}: cannot be read ({getattr(error, 'strerror', error)}); name a text file"
        ) from None
    if not text:
        raise ConfigError(f"{key}={path}: the file is empty; name one with text")
    if "\0" in text:
        raise ConfigError(
            f"{key}={path}: holds a NUL byte at character {text.index(chr(0))}; not a text file"
        )
    return normalise_newlines(text)


@dataclass(frozen=True)
class TokenData:
    """The tokens of a corpus, memory-mapped, and what its validation text weighs.

    val_bytes: UTF-8 bytes of the validation text, for bits per byte. floor: the entropy of the validation text
    in nats per token, where its source is known. source: sha256 of the text, or of its tokens. mixed: (tokens,
    weight) of each source, where `train` is several, one after the other. end: the token between documents, if any.
    """

    train: Tokens
    val: Tokens
    val_bytes: int
    floor: float | None
    source: str = ""
    mixed: tuple[tuple[int, float], ...] = ()
    end: int | None = None

    def bits_per_byte(self, loss: float) -> float:
        """Nats per token -> bits per byte, comparable across tokenizers."""
        return float(loss / np.log(2) * len(self.val) / max(self.val_bytes, 1))

    def check(self, block_size: int) -> None:
        """ConfigError where a part of the split is shorter than one window and its targets."""
        each = [(f"training text of data.sources[{i}]", n) for i, (n, _) in enumerate(self.mixed)]
        each = each or [("training text", len(self.train))]
        for name, count in (*each, ("validation text", len(self.val))):
            if 0 < count <= block_size or (name != "validation text" and not count):
                raise ConfigError(
                    f"data: the {name} has {count} tokens, model.block_size={block_size} needs at least "
                    f"{block_size + 1}: give more text, a smaller model.block_size or another data.val_fraction"
                )


def hash_of(facts: Any) -> str:
    """A name for what was made of these facts, plain JSON."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _holds(cache: Path, facts: dict[str, Any]) -> bool:
    """Whether a folder holds the tokens of these facts, undamaged."""
    try:
        kept = json.loads((cache / "facts.json").read_text(encoding="utf-8"))
        return kept == facts | {"sha256": _sums(cache)}
    except (OSError, ValueError, RecursionError):
        return False


def _sums(cache: Path) -> dict[str, str]:
    return {name: sha256_of(cache / f"{name}.bin") for name in ("train", "val")}


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


class Windows:
    """The training windows in the order of training, a pure function of (seed, index).

    N tokens hold N − block_size windows of block_size inputs and as many targets. Each epoch visits each window
    once, in an order of its own, so a resumed run needs to know nothing but how many it has seen.

    mixed: (tokens, weight) of each source, if there are several. Of every 16384 windows a source gives its share, to
    the nearest whole number and at least one, at places drawn anew each time; its own windows follow one another in
    epochs of its own.
    """

    def __init__(
        self, tokens: Tokens, block_size: int, seed: int, mixed: Sequence[tuple[int, float]] = ()
    ) -> None:
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        lengths = np.array([n for n, _ in mixed] or [len(tokens)])
        self.counts = lengths - block_size
        self.begins = np.cumsum(lengths) - lengths
        self.places = shares([weight for _, weight in mixed], ROUND) if mixed else None
        self._latest: tuple[int, Any] = (-1, None)  # the round that was asked for last

    def starts(self, first: int, n: int) -> np.ndarray:
        """Offsets of windows number first … first + n − 1 since the beginning of training, (n,) int64."""
        source, number = self._drawn(np.arange(first, first + n))
        epoch, place = np.divmod(number, self.counts[source])
        found = np.empty(n, np.int64)
        for s, e in sorted({*zip(source.tolist(), epoch.tolist(), strict=True)}):
            here = (source == s) & (epoch == e)
            found[here] = self.begins[s] + permute(place[here], int(self.counts[s]), self._key(s, e))
        return found

    def batch(self, first: int, n: int) -> np.ndarray:
        """Windows first … first + n − 1 with their last target, (n, block_size + 1) int64."""
        rows = self.starts(first, n)[:, None] + np.arange(self.block_size + 1)
        return self.tokens[rows].astype(np.int64)

    def _drawn(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which source each window is of, and its number among all of that source, (n,) each."""
        if self.places is None:
            return np.zeros_like(index), index
        turn, place = np.divmod(index, ROUND)
        source, number = np.empty_like(index), np.empty_like(index)
        for t in np.unique(turn).tolist():
            order, rank = self._round(t)
            here = turn == t
            source[here], number[here] = order[place[here]], rank[place[here]]
        return source, turn * self.places[source] + number

    def _round(self, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the windows of a round, (ROUND,) each: the source, and how many of the same source are before it."""
        assert self.places is not None
        if self._latest[0] != turn:
            drawn = permute(np.arange(ROUND), ROUND, (self.seed, turn, 0, 1))
            source, rank = np.searchsorted(np.cumsum(self.places), drawn, side="right"), np.empty_like(drawn)
            for s in range(len(self.counts)):
                rank[source == s] = np.arange((source == s).sum())
            self._latest = turn, (source, rank)
        return self._latest[1]

    def _key(self, source: int, epoch: int) -> tuple[int, ...]:
        return (self.seed, epoch) if self.places is None else (self.seed, epoch, source, 2)


def shares(weights: Sequence[float], total: int) -> np.ndarray:
    """Whole numbers nearest to what the weights say of `total`, each 1 at least, which sum to it, (n,) int64."""
    exact = np.array(weights) / np.sum(weights) * total
    found = np.maximum(np.floor(exact), 1).astype(np.int64)
    while left := total - int(found.sum()):
        sign = 1 if left > 0 else -1
        may = found > 1 if sign < 0 else np.ones_like(found, dtype=bool)
        found[np.argmax(np.where(may, sign * (exact - found), -np.inf))] += sign
    return found


def permute(place: np.ndarray, n: int, key: tuple[int, ...]) -> np.ndarray:
    """Where a keyed shuffle of range(n) puts the numbers `place`, without a table of n entries.

    A Feistel network over the next even power of two, walked until the value falls below n (Black & Rogaway
    2002, "Ciphers with arbitrary finite domains").
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    rounds = np.random.SeedSequence(key).generate_state(6, np.uint64)

    def encrypt(x: np.ndarray) -> np.ndarray:
        left, right = x >> np.uint64(half), x & low
        for k in rounds:
            mixed = (right ^ k) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & low)
        return (left << np.uint64(half)) | right

    x = encrypt(place.astype(np.uint64))
    while (outside := x >= n).any():
        x[outside] = encrypt(x[outside])
    return x.astype(np.int64)
