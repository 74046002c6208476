"""Documents in, tokens on a disk out: tokenized by several processes, in files that are mapped and never read whole.

    FOLDER/00000.train.bin  00000.val.bin  00001.train.bin …    uint8, uint16 or uint32, the smallest that will do
    FOLDER/manifest.json                                        what they were made of, and the sha256 of each

A shard is whole or absent. Which text is in which shard depends on the texts alone, so a preparation that was stopped,
by whatever means, goes on behind its last whole shard, and leaves the same bytes as one that never stopped.
"""

import hashlib
import json
import mmap
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from minilm.errors import ConfigError
from minilm.files import sha256_of, write_atomic
from minilm.tokenizer import Tokenizer, dtype_for, from_dict

MANIFEST = "manifest.json"
PARTS = ("train", "val")
SHARD = 1 << 26  # tokens from which on a shard is closed
BATCH = 1 << 18  # characters that a process is given at a time
FEW = 4  # batches that are not worth the start of processes


class Piece(NamedTuple):
    """A document, or a part of a long one; as text, or as bytes that whoever tokenizes it is to parse.

    ends: no more of the document follows. done: how much of the source is read with it. place: what messages call it.
    part: 'train' or 'val', None where the text decides.
    """

    text: str | bytes
    ends: bool
    done: int
    place: str = ""
    part: str | None = None


class Encoded(NamedTuple):
    """A part's share of some pieces."""

    tokens: np.ndarray
    documents: int
    bytes: int


Parse = Callable[[bytes, str], str]  # (a piece's bytes, its place) -> its text, '' for none


class Encoder:
    """Pieces to tokens: what each process does. val_fraction: the share of texts that is for validation."""

    def __init__(self, tokenizer: Tokenizer, val_fraction: float, parse: Parse | None = None) -> None:
        self.tokenizer, self.val_fraction, self.parse = tokenizer, val_fraction, parse
        self.dtype = dtype_for(tokenizer.vocab_size)
        self.end = np.array([tokenizer.end_token], self.dtype)

    def __call__(self, lot: Iterable[tuple]) -> dict[str, Encoded]:
        runs: dict[str, list[np.ndarray]] = {part: [self.end[:0]] for part in PARTS}
        documents, size = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
        for text, ends, _, place, part in lot:
            if isinstance(text, bytes):
                assert self.parse is not None
                text = self.parse(text, place)
            if text:
                part = part or part_of(text, self.val_fraction)
                runs[part] += [self.tokenizer.encode_array(text), self.end[:ends]]
                documents[part] += ends
                size[part] += len(text.encode())
        return {part: Encoded(np.concatenate(runs[part]), documents[part], size[part]) for part in PARTS}


def part_of(text: str, val_fraction: float) -> str:
    """'val' for a share of all texts, of which a hash is the measure."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return "val" if int.from_bytes(digest) < val_fraction * 2**64 else "train"


# ---- reading ----


class Shards:
    """Several arrays of tokens as one, of which only what is asked for is in memory: (N,), by place, slice or array.

    Pages that were read are given back at once; the system's cache may keep them.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = [array for array in arrays if len(array)]
        self.dtype = self.arrays[0].dtype if self.arrays else np.dtype(np.uint8)
        self.ends = np.cumsum([len(array) for array in self.arrays], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.arrays else 0

    def __getitem__(self, index: Any) -> np.ndarray:
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        index = np.asarray(index)
        if ((index < 0) | (index >= len(self))).any():
            raise IndexError(f"{len(self)} tokens have none at {index.min()} … {index.max()}")
        which = np.searchsorted(self.ends, index, side="right")
        found = np.empty(index.shape, self.dtype)
        for i in np.unique(which):
            here, array = which == i, self.arrays[i]
            found[here] = array[index[here] - (self.ends[i] - len(array))]
            if isinstance(array.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                array.base.madvise(mmap.MADV_DONTNEED)  # or all of the corpus were resident after an epoch
        return found


def open_part(folder: Path, manifest: dict[str, Any], part: str) -> Shards:
    """The tokens of 'train' or 'val', mapped."""
    dtype, shards = np.dtype(manifest["dtype"]), manifest["shards"]
    paths = [path_of(folder, i, part) for i, shard in enumerate(shards) if shard[part]["tokens"]]
    return Shards([np.memmap(path, dtype, mode="r") for path in paths])


def total(manifest: dict[str, Any], part: str, what: str) -> int:
    """Sum over the shards of 'tokens', 'documents' or 'bytes' of text."""
    return sum(shard[part][what] for shard in manifest["shards"])


# ---- writing ----


def prepare(
    pieces: Callable[[], Iterable[Piece]],
    encoder: Encoder,
    folder: Path,
    facts: dict[str, Any],
    *,
    workers: int,
    shard_tokens: int = SHARD,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Any]:
    """Tokenize all pieces into shards in `folder`, an end token after each document; the manifest when it is whole.

    pieces: gives them from the beginning, the same ones each time. facts: plain JSON, goes into the manifest. workers:
    processes that encode. progress: called with the pieces' `done`. Shards that are there already are kept, if they
    are what the manifest says. Raises ConfigError where a text has no tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest, dtype = read(folder), encoder.dtype.name
    if manifest is None or manifest["dtype"] != dtype:
        if (folder / MANIFEST).exists():
            warnings.warn(f"{folder / MANIFEST}: damaged, and made anew with its tokens", stacklevel=2)
        manifest = {**facts, "dtype": dtype, "whole": False, "shards": []}
    if manifest["whole"] and _sound(folder, manifest):
        return manifest
    manifest["whole"] = False
    shards = manifest["shards"] = list(_kept(folder, manifest["shards"]))
    rest = islice(pieces(), sum(shard["pieces"] for shard in shards), None)
    open_shard, n_pieces = _new_shard(), 0
    for batch, encoded in tokenized(encoder, batches(rest), workers):
        for part, own in encoded.items():
            open_shard[part].append(own)
        n_pieces += len(batch)
        progress(batch[-1].done)
        if sum(len(own.tokens) for part in open_shard.values() for own in part) >= shard_tokens:
            _close(folder, manifest, open_shard, n_pieces)
            open_shard, n_pieces = _new_shard(), 0
    if n_pieces:
        _close(folder, manifest, open_shard, n_pieces)
    manifest["whole"] = True
    _write(folder, manifest)
    return manifest


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in the lots that are tokenized together."""
    batch: list[Piece] = []
    held = 0
    for piece in pieces:
        batch.append(piece)
        held += len(piece.text)
        if held >= BATCH:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def tokenized(
    encoder: Encoder, lots: Iterable[list[Piece]], workers: int
) -> Iterator[tuple[list[Piece], dict[str, Encoded]]]:
    """Each lot with its tokens by part, in order; by other processes unless there is little to do."""
    lots = iter(lots)
    first = list(islice(lots, FEW))
    if workers == 1 or len(first) < FEW:
        for lot in chain(first, lots):
            yield lot, encoder(lot)
        return
    given = encoder.tokenizer.to_dict(), encoder.val_fraction, encoder.parse
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=given
    )
    waiting: deque = deque()
    try:
        for lot in chain(first, lots):
            waiting.append((lot, pool.submit(_encode, [tuple(piece) for piece in lot])))
            if len(waiting) > 2 * workers:
                lot, future = waiting.popleft()
                yield lot, future.result()
        for lot, future in waiting:
            yield lot, future.result()
    except BrokenProcessPool:
        raise ConfigError(
            "data: a process that tokenizes was ended from outside, likely for want of memory; the same command goes "
            "on behind the last whole shard, data.workers=1 takes least memory"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder  # of a process that tokenizes


def _begin(tokenizer: dict[str, Any], val_fraction: float, parse: Parse | None) -> None:
    global _encoder
    _encoder = Encoder(from_dict(tokenizer), val_fraction, parse)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that reads
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _encode(lot: list[tuple]) -> dict[str, Encoded]:  # plain tuples travel faster
    return _encoder(lot)


def _end_with_parent() -> None:
    """However the process ends that reads: nobody is left to tokenize for."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


# ---- files ----


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest, None where there is none or it is damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    sound = (
        isinstance(manifest, dict)
        and isinstance(manifest.get("whole"), bool)
        and manifest.get("dtype") in ("uint8", "uint16", "uint32")
        and isinstance(manifest.get("shards"), list)
        and all(map(_is_entry, manifest["shards"]))
    )
    return manifest if sound else None


def _is_entry(entry: Any) -> bool:
    """Whether this has all that a manifest says of a shard."""

    def holds(value: Any, *counts: str) -> bool:
        return isinstance(value, dict) and all(type(n := value.get(key)) is int and n >= 0 for key in counts)

    return holds(entry, "pieces") and all(
        holds(part := entry.get(name), "tokens", "documents", "bytes") and isinstance(part.get("sha256"), str)
        for name in PARTS
    )


def path_of(folder: Path, number: int, part: str) -> Path:
    return folder / f"{number:05d}.{part}.bin"


def _new_shard() -> dict[str, list[Encoded]]:
    return {part: [] for part in PARTS}


def _close(folder: Path, manifest: dict[str, Any], shard: dict[str, list[Encoded]], n_pieces: int) -> None:
    """Write a shard, and then that it is there."""
    entry: dict[str, Any] = {"pieces": n_pieces}
    for part, runs in shard.items():
        digest, path = hashlib.sha256(), path_of(folder, len(manifest["shards"]), part)

        def pour(file: BinaryIO, runs: list[Encoded] = runs, digest: Any = digest) -> None:
            for run in runs:
                file.write(run.tokens.data)
                digest.update(run.tokens)

        write_atomic(path, pour)
        entry[part] = {
            "tokens": sum(len(run.tokens) for run in runs),
            "documents": sum(run.documents for run in runs),
            "bytes": sum(run.bytes for run in runs),
            "sha256": digest.hexdigest(),
        }
    manifest["shards"].append(entry)
    _write(folder, manifest)


def _write(folder: Path, manifest: dict[str, Any]) -> None:
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


def _kept(folder: Path, shards: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The shards up to the first that is not what it was when it was written."""
    for i, shard in enumerate(shards):
        for part in PARTS:
            path = path_of(folder, i, part)
            if not path.exists() or sha256_of(path) != shard[part]["sha256"]:
                return
        yield shard


def _sound(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether every file is there, at its full length."""
    size = np.dtype(manifest["dtype"]).itemsize
    return all(
        path.exists() and path.stat().st_size == shard[part]["tokens"] * size
        for i, shard in enumerate(manifest["shards"])
        for part in PARTS
        for path in [path_of(folder, i, part)]
    )
