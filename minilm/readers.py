"""Files to pieces of text: one kind of file is one function here, and an entry in READERS."""

import codecs
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from minilm.data import normalise_newlines
from minilm.errors import ConfigError, first_line, installed
from minilm.shards import Piece

LONG = 1 << 20  # characters from which on a text file is tokenized in pieces


def from_text(path: Path, column: str) -> Iterator[Piece]:
    """A text file as one document: a byte order mark is dropped, line ends become LF. A long one comes in pieces, cut
    between a word and the line end or space behind it, which no pattern that splits a text into words joins. Where
    there is neither (a script without spaces, in a line of LONG characters) it is cut where it stands, and the tokens
    beside the cut may be others than those of the whole."""
    try:
        with open(path, encoding="utf-8-sig", newline=None) as file:
            held, more = "", file.read(LONG)
            while more:
                held, more = held + more, file.read(LONG)
                cut = len(held) if not more else last_word_end(held)
                if "\0" in held[:cut]:
                    raise ConfigError(f"{path}: holds a NUL byte; not a text file")
                yield Piece(held[:cut], not more, os.lseek(file.fileno(), 0, os.SEEK_CUR))
                held = held[cut:]
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 at byte {first_bad_byte(path)}; convert it to UTF-8") from None


def last_word_end(text: str) -> int:
    """Where the last word (its last character is a letter or a digit) stands before a line end; if none does, before a
    space; if none does, the whole length."""
    for behind in "\n ":
        end = text.rfind(behind)
        while end > 0 and not text[end - 1].isalnum():
            end = text.rfind(behind, 0, end)
        if end > 0:
            return end
    return len(text)


def first_bad_byte(path: Path) -> int:
    """The place in a file of the first byte that is not UTF-8."""
    decoder, begins = codecs.getincrementaldecoder("utf-8")(), 0
    with open(path, "rb") as file:
        while block := file.read(LONG):
            held = len(decoder.getstate()[0])
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                return begins - held + error.start
            begins += len(block)
    return begins - len(decoder.getstate()[0])  # it ends inside a character


def from_lines(path: Path, column: str) -> Iterator[Piece]:
    """A JSONL file: an object a line, which is parsed where it is tokenized."""
    done = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            done += len(line)
            if not line.isspace():
                yield Piece(line, True, done, f"{path}: line {number}")


def from_json(line: bytes, place: str, column: str) -> str:
    """The text in a line of a JSONL file."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is no JSON in UTF-8 ({error})") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{place} is no object with keys")
    return text_of(row, column, place)


def from_parquet(path: Path, column: str) -> Iterator[Piece]:
    """A Parquet file, some rows at a time."""
    pyarrow, parquet = need("pyarrow", f"{path}"), need("pyarrow.parquet", f"{path}")
    try:
        file = parquet.ParquetFile(path)
        names, rows, size = file.schema_arrow.names, file.metadata.num_rows, path.stat().st_size
        if column not in names:
            raise ConfigError(no_column(column, f"{path}", names))
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=[column]):
            for text in batch.column(0).to_pylist():
                number += 1
                yield Piece(
                    text_of({column: text}, column, f"{path}: row {number}"), True, size * number // rows
                )
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: no whole Parquet file ({first_line(error)})") from None


READERS: dict[str, Callable[[Path, str], Iterator[Piece]]] = {".jsonl": from_lines, ".parquet": from_parquet}


def text_of(row: dict[str, Any], column: str, where: str) -> str:
    """A row's text, '' for null."""
    if column not in row:
        raise ConfigError(no_column(column, where, row))
    text = row[column]
    if not isinstance(text, str | None):
        raise ConfigError(f"data.text_column={column}: {where} has {text!r:.40}, expected text")
    return normalise_newlines(text or "")


def no_column(column: str, where: str, names: Iterable[str]) -> str:
    return f"data.text_column={column}: {where} has no such column; it has {', '.join(names) or 'none'}"


def need(package: str, what: str) -> Any:
    name = package.partition(".")[0]
    return installed(package, f"{what} needs the package {name}: pip install -e '.[data]'")
