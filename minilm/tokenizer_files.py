"""Tokenizers in the formats of others: tokenizer.json (the `tokenizers` library, transformers) and tiktoken's ranks.

    tokenizer.json                     to_json(tokenizer), from_json(text)
    ranks.tiktoken, encoding.json      to_tiktoken(tokenizer), from_tiktoken(folder)

Ids are the same on both sides, for every text. A special token is never made from text: who wants one adds its id.
"""

import base64
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from minilm.errors import ConfigError
from minilm.tokenizer import (
    BPE,
    END_OF_TEXT,
    Byte,
    Char,
    Pretrained,
    Tokenizer,
    byte_alphabet,
    from_dict,
    need,
)

ANY = r"[\s\S]"  # a character, whatever it is
RANKS, ENCODING = "ranks.tiktoken", "encoding.json"


# ---- tokenizer.json ----


def to_json(tokenizer: Tokenizer) -> str:
    """The text of a tokenizer.json that gives the same ids."""
    if isinstance(tokenizer, Pretrained):
        return tokenizer.definition
    hf = need("tokenizers")
    if isinstance(tokenizer, Char):
        vocab = {char: i for i, char in enumerate(tokenizer.chars)}
        made = hf.Tokenizer(hf.models.WordLevel(vocab, unk_token=""))
        made.pre_tokenizer = hf.pre_tokenizers.Split(hf.Regex(ANY), behavior="isolated")
        made.decoder = hf.decoders.Fuse()
        return _with_specials(made, ends(tokenizer))
    ranks, specials, split = [bytes([b]) for b in range(256)], ends(tokenizer), []
    if isinstance(tokenizer, BPE):
        ranks, specials = tokenizer.ranks, tokenizer.specials
        split = [hf.pre_tokenizers.Split(hf.Regex(atomic(tokenizer.pattern)), behavior="isolated")]
    char = {byte: char for char, byte in byte_alphabet().items()}
    pieces = ["".join(char[b] for b in token) for token in ranks]
    vocab = {piece: i for i, piece in enumerate(pieces)} | specials
    if len(vocab) < len(pieces) + len(specials):
        name = next(name for name in specials if name in pieces)
        raise ConfigError(
            f"tokenizer=bpe: {name!r} is a special token and an ordinary one, too: no tokenizer.json"
        )
    # whole pieces of a pattern are looked up before they are merged, as tiktoken does
    made = hf.Tokenizer(hf.models.BPE(vocab, merges(pieces), ignore_merges=bool(split)))
    to_bytes = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = hf.pre_tokenizers.Sequence([*split, to_bytes])
    made.decoder = hf.decoders.ByteLevel()
    for name, i in specials.items():
        if made.encode(name).ids == [i]:
            raise ConfigError(f"tokenizer=bpe: its pattern takes {name!r} in a text whole: no tokenizer.json")
    return _with_specials(made, specials)


def ends(tokenizer: Tokenizer) -> dict[str, int]:
    """The end token's name and id, where there is one."""
    return {} if tokenizer.end_token is None else {END_OF_TEXT: tokenizer.end_token}


def _with_specials(made: Any, names: Iterable[str]) -> str:
    made.add_special_tokens([need("tokenizers").AddedToken(name, normalized=False) for name in names])
    return made.to_str(pretty=True)


def merges(pieces: list[str]) -> list[tuple[str, str]]:
    """Every pair of pieces that make a third, by its rank: tiktoken merges whatever pair has the lowest."""
    rank = {piece: i for i, piece in enumerate(pieces)}
    found = []
    for piece in pieces:
        cuts = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
        known = [(a, b) for a, b in cuts if a in rank and b in rank]
        found += sorted(known, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return found


def atomic(pattern: str) -> str:
    r"""The pattern for the library's engine, to which `x{1,3}+` is a repeated `x{1,3}`: here `(?>x{1,3})`."""
    return re.sub(r"(\\p\{\w+\}|\[[^]]*\]|\\?.)(\{\d+,\d*\})\+", r"(?>\1\2)", pattern)


def from_json(text: str, vocab_size: int | None = None, end_token: int | None = None) -> Tokenizer:
    """The tokenizer of a tokenizer.json: of our own kinds where one of them gives just this file, else `Pretrained`.

    vocab_size, end_token: the model's, where the file comes with one. Raises ConfigError for a file that is neither.
    """
    own = _recognise(text)
    return own if own and vocab_size in (None, own.vocab_size) else Pretrained(text, vocab_size, end_token)


def from_vocabulary(vocab: Path, merged: Path) -> str:
    """The tokenizer.json of GPT-2's two older files, vocab.json and merges.txt."""
    hf = need("tokenizers")
    try:
        made = hf.Tokenizer(hf.models.BPE.from_file(str(vocab), str(merged)))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{vocab}, {merged}: no byte pairs in GPT-2's format ({error})") from None
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = hf.decoders.ByteLevel()
    if made.token_to_id(END_OF_TEXT) is not None:
        made.add_special_tokens([END_OF_TEXT])
    return made.to_str()


def _recognise(text: str) -> Tokenizer | None:
    try:
        data = json.loads(text)
        model, vocab = data["model"], data["model"]["vocab"]
        pieces = sorted(vocab, key=vocab.__getitem__)
        specials = {token["content"]: token["id"] for token in data["added_tokens"]}
        own: Tokenizer
        if model["type"] == "WordLevel":
            own = Char("".join(pieces), bool(specials))
        else:
            byte = byte_alphabet()
            ranks = [bytes(byte[c] for c in piece) for piece in pieces if piece not in specials]
            parts = data["pre_tokenizer"]["pretokenizers"]
            own = (
                BPE(parts[0]["pattern"]["Regex"], ranks, specials)
                if len(parts) == 2
                else Byte(bool(specials))
            )
        return own if json.loads(to_json(own)) == data else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, ConfigError):
        return None


# ---- tiktoken ----


def to_tiktoken(tokenizer: Tokenizer) -> dict[str, str]:
    """The files of a byte pair encoding, by name: `ranks.tiktoken`, as tiktoken.load reads it, and `encoding.json`, the
    other arguments of tiktoken.Encoding. Raises ConfigError for another kind of tokenizer."""
    if not isinstance(tokenizer, BPE):
        kind = tokenizer.to_dict()["kind"]
        raise ConfigError(f"to=tiktoken: this model's tokenizer is {kind}; byte pairs alone have ranks")
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokenizer.ranks)]
    about = {"name": "minilm", "pat_str": tokenizer.pattern, "special_tokens": tokenizer.specials}
    return {RANKS: "".join(lines), ENCODING: json.dumps(about, indent=1, ensure_ascii=False) + "\n"}


def from_tiktoken(folder: Path) -> BPE:
    """The tokenizer of such a folder. Raises ConfigError naming what is missing or damaged."""
    about, ranks = read(folder / ENCODING), []
    for number, line in enumerate(read(folder / RANKS).splitlines()):
        token, _, rank = line.partition(" ")
        if rank != str(number):
            raise ConfigError(
                f"{folder / RANKS}: line {number + 1} has rank {rank or 'none'}, expected {number}"
            )
        ranks.append(token)
    try:
        given = json.loads(about)
        data = {
            "kind": "bpe",
            "pattern": given["pat_str"],
            "ranks": ranks,
            "specials": given["special_tokens"],
        }
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ConfigError(f"{folder / ENCODING}: expected pat_str and special_tokens, as JSON") from None
    made = from_dict(data)
    assert isinstance(made, BPE)
    return made


# ---- tokenizer=file ----


class TokenizerFile(Tokenizer):
    """One that is there: a tokenizer.json (a checkpoint's, too), its folder, or one of tiktoken's two files."""

    @classmethod
    def fit(cls, texts: str | Iterable[str], path: str) -> Self:
        """The tokenizer at `path`; the texts play no part. Raises ConfigError naming the path."""
        place = Path(path).expanduser()
        try:
            if place.name in (RANKS, ENCODING):
                place = place.parent
            if (place / RANKS).is_file():
                return from_tiktoken(place)  # type: ignore[return-value]
            file = place / "tokenizer.json" if place.is_dir() else place
            definition = read(file)
            own = '"kind"' in definition[:10]  # a checkpoint of ours
            return from_dict(json.loads(definition)) if own else from_json(definition)  # type: ignore[return-value]
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~nobody, nested too deeply
            raise ConfigError(f"tokenizer.path={path}: {error}") from None


def read(file: Path) -> str:
    """The text of a file. Raises ConfigError naming it."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"{file} cannot be read ({reason})") from None
