"""Text in, batches out: corpora, the split, the token cache, and the order in which windows are visited.

Adding a corpus is a small class here (a `read` that returns text) and one file in configs/data/.
"""

import hashlib
import http.client
import json
import os
import pydoc_data.topics
import urllib.request
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minilm import tales
from minilm.errors import ConfigError
from minilm.files import sha256_of, write_atomic
from minilm.tokenizer import Tokenizer, dtype_for

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text and its split: the last `val_fraction` of its characters is for validation."""

    val_fraction: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise ConfigError(f"data.val_fraction={self.val_fraction}: a share from 0 to below 1")

    def read(self) -> str:
        raise NotImplementedError

    def floor(self, start: int) -> float | None:
        """Total information in nats of the characters from `start` on, where the source is known."""
        return None


@dataclass(frozen=True, kw_only=True)
class Tales(Corpus):
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
class TextFile(Corpus):
    """Any UTF-8 text file."""

    path: str

    def read(self) -> str:
        return read_text(self.path, key="data.path")


@dataclass(frozen=True, kw_only=True)
class Download(Corpus):
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
class PyDoc(Corpus):
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
    in nats per token, where its source is known. source: sha256 of the text.
    """

    train: np.ndarray
    val: np.ndarray
    val_bytes: int
    floor: float | None
    source: str = ""

    def bits_per_byte(self, loss: float) -> float:
        """Nats per token -> bits per byte, comparable across tokenizers."""
        return float(loss / np.log(2) * len(self.val) / max(self.val_bytes, 1))

    def check(self, block_size: int) -> None:
        """ConfigError where a part of the split is shorter than one window and its targets."""
        for name, tokens in (("training", self.train), ("validation", self.val)):
            if 0 < len(tokens) <= block_size or (name == "training" and not len(tokens)):
                raise ConfigError(
                    f"data: the {name} text has {len(tokens)} tokens, model.block_size={block_size} needs at least "
                    f"{block_size + 1}: give more text, a smaller model.block_size or another data.val_fraction"
                )


def prepare(corpus: Corpus, text: str, tokenizer: Tokenizer, cache: Path) -> TokenData:
    """Tokenize a corpus, or map the tokens that an earlier run left in `cache` under the same fingerprint.

    The split is by characters, so that every tokenizer is measured on the same validation text.
    """
    cut = round(len(text) * (1 - corpus.val_fraction))
    parts = {"train": text[:cut], "val": text[cut:]}
    dtype = dtype_for(tokenizer.vocab_size)
    facts: dict[str, Any] = {
        "source": hashlib.sha256(text.encode()).hexdigest(),
        "tokenizer": tokenizer.fingerprint(),
        "dtype": dtype.name,
        "cut": cut,
    }
    folder = cache / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    if not _holds(folder, facts):
        if (folder / "facts.json").exists():
            warnings.warn(f"{folder}: the cached tokens are damaged, and made anew", stacklevel=2)
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            write_atomic(folder / f"{name}.bin", tokenizer.encode_array(part).astype(dtype).tobytes())
        # last: it says that the rest is whole
        write_atomic(folder / "facts.json", json.dumps(facts | {"sha256": _sums(folder)}, indent=1))
    train, val = (_map(folder / f"{name}.bin", dtype) for name in parts)
    nats = corpus.floor(cut)
    floor = nats / len(val) if nats is not None and len(val) else None
    return TokenData(train, val, len(parts["val"].encode()), floor, facts["source"])


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
    once, in an order of its own, so a resumed run needs to know nothing but its step.
    """

    def __init__(self, tokens: np.ndarray, block_size: int, seed: int) -> None:
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.count = len(tokens) - block_size

    def starts(self, first: int, n: int) -> np.ndarray:
        """Offsets of windows number first … first + n − 1 since the beginning of training, (n,) int64."""
        index = np.arange(first, first + n)
        epoch, place = np.divmod(index, self.count)
        return np.concatenate(
            [permute(place[epoch == e], self.count, (self.seed, int(e))) for e in np.unique(epoch)]
        )

    def batch(self, first: int, n: int) -> np.ndarray:
        """Windows first … first + n − 1 with their last target, (n, block_size + 1) int64."""
        rows = self.starts(first, n)[:, None] + np.arange(self.block_size + 1)
        return self.tokens[rows].astype(np.int64)


def permute(place: np.ndarray, n: int, key: tuple[int, int]) -> np.ndarray:
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
