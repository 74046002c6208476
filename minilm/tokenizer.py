"""Text to token ids and back: characters, bytes, byte pairs trained here, published encodings.

A tokenizer is fitted to a text once and then travels with the checkpoint as plain JSON:

    tokenizer = BPE.fit(text, vocab_size=1024)
    same = from_dict(tokenizer.to_dict())

Texts may come one by one, and are never all in memory. A corpus of many documents separates them by an end token:
bpe and the published encodings have <|endoftext|>, char and byte get one (`end`) as their last id.
"""

import base64
import hashlib
import json
import os
import re
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from minilm.errors import ConfigError, installed

T = TypeVar("T")

END_OF_TEXT = "<|endoftext|>"

# How GPT-2 splits a text into the pieces within which bytes are merged (Radford et al. 2019).
GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

# Where the published encodings lie.
PUBLISHER = "https://openaipublic.blob.core.windows.net/"
PUBLISHED = {
    "gpt2": ["gpt-2/encodings/main/vocab.bpe", "gpt-2/encodings/main/encoder.json"],
    "cl100k_base": ["encodings/cl100k_base.tiktoken"],
    "o200k_base": ["encodings/o200k_base.tiktoken"],
}

ENOUGH = 1 << 26  # characters that byte pairs are learned from; of a longer corpus its beginning
MAX_VOCAB_SIZE = 1 << 22  # a damaged file must not fill the memory with unused ids


def byte_alphabet() -> dict[str, int]:
    """The printable character that GPT-2's vocabulary files write for each byte.

    Printable bytes stand for themselves, the others follow from U+0100 in order (GPT-2's bytes_to_unicode).
    """
    plain = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


def dtype_for(vocab_size: int) -> np.dtype:
    """The smallest unsigned type that holds every id in [0, vocab_size): uint8, uint16 or uint32."""
    return np.min_scalar_type(vocab_size - 1)


class Tokenizer(ABC):
    """A list of byte strings, one a token; the id of a token is its place in that list."""

    end_token: int | None = None  # id of the end-of-text token, None where the kind has none
    prompt_start: Sequence[
        int
    ] = ()  # ids that stand before every prompt: a beginning-of-text token, mostly none

    def __init__(self, tokens: list[bytes]):
        self._tokens = tokens

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    @classmethod
    @abstractmethod
    def fit(cls, texts: str | Iterable[str], *args: Any, **options: Any) -> Self:
        """The tokenizer for a text, or for many: all of it, validation too, or some of it may have no id."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text, special tokens being plain text in it. ConfigError for what has no id."""

    def encode_array(self, text: str) -> np.ndarray:
        """The same ids as an array (N,) of `dtype_for(vocab_size)`, for long texts."""
        return np.array(self.encode(text), dtype=dtype_for(self.vocab_size))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of some ids, which may end inside a character. Raises IndexError for an id outside."""
        if len(ids) and min(ids) < 0:
            raise IndexError(f"token id {min(ids)} is below 0")
        return b"".join(self._tokens[i] for i in ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, with U+FFFD for what is no UTF-8."""
        return self.decode_bytes(ids).decode(errors="replace")

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """All that `from_dict` needs, as plain JSON."""

    def fingerprint(self) -> str:
        """sha256 of the canonical JSON: the same for the same tokenizer on every machine."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


class Char(Tokenizer):
    """One token a character, sorted by code point. end: an end token besides, the last id."""

    def __init__(self, chars: str, end: bool = False):
        distinct = len(set(chars))
        if not chars or distinct < len(chars):
            raise ConfigError(
                f"tokenizer=char: {len(chars)} characters, {distinct} distinct; must be some, each once"
            )
        super().__init__([*map(_utf8, chars), *([END_OF_TEXT.encode()] if end else [])])
        self.chars, self.end_token = chars, len(chars) if end else None
        # code point -> id, -1 for none; the last place stands for all code points above
        self._ids = np.full(max(map(ord, chars)) + 2, -1, dtype=np.int32)
        self._ids[[ord(c) for c in chars]] = np.arange(len(chars))

    @classmethod
    def fit(cls, texts: str | Iterable[str], *, end: bool = False) -> Self:
        seen = np.zeros(sys.maxunicode + 1, dtype=bool)
        for text in one_by_one(texts):
            _utf8(text)
            seen[code_points(text)] = True
        return cls("".join(map(chr, np.flatnonzero(seen))), end)

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        ids = self._ids[np.minimum(code_points(text), len(self._ids) - 1)]
        if (ids < 0).any():
            unseen = [c for c in dict.fromkeys(text) if c not in self.chars]
            more = f" and {len(unseen) - 5} more" if len(unseen) > 5 else ""
            raise ConfigError(
                f"tokenizer=char: {', '.join(map(_show, unseen[:5]))}{more} not among the {len(self.chars)} "
                "characters that it was made from; leave out, or train with tokenizer=byte or tokenizer=bpe"
            )
        return ids.astype(dtype_for(self.vocab_size))

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "char", "chars": self.chars} | ({} if self.end_token is None else {"end": True})


class Byte(Tokenizer):
    """One token a byte of UTF-8: 256 ids, any text, nothing to fit. end: an end token besides, 256."""

    def __init__(self, end: bool = False) -> None:
        super().__init__([*(bytes([b]) for b in range(256)), *([END_OF_TEXT.encode()] if end else [])])
        self.end_token = 256 if end else None

    @classmethod
    def fit(cls, texts: str | Iterable[str], *, end: bool = False) -> Self:
        return cls(end)

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8).astype(dtype_for(self.vocab_size), copy=False)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "byte"} | ({} if self.end_token is None else {"end": True})


class BPE(Tokenizer):
    """Byte pair encoding (Sennrich et al. 2016) over bytes, as in GPT-2; run by `tiktoken`.

    pattern   regular expression that splits a text into pieces; no token crosses their borders
    ranks     the tokens' bytes in order of id, which is the order of merging; every single byte among them
    specials  text -> id of tokens that no text encodes to; ids above the ranks; a gap decodes to ''
    """

    def __init__(self, pattern: str, ranks: Sequence[bytes], specials: Mapping[str, int]):
        ids = {token: rank for rank, token in enumerate(ranks)}
        lacking = sum(bytes([b]) not in ids for b in range(256))
        if lacking or len(ids) < len(ranks) or b"" in ids:
            raise ConfigError(
                f"tokenizer=bpe: {len(ranks)} ranks, {len(ids)} distinct, {lacking} single bytes missing; "
                "must be all 256 bytes and distinct merges, none empty"
            )
        legal = range(len(ranks), MAX_VOCAB_SIZE)
        if not (
            all(isinstance(name, str) and name for name in specials)
            and all(type(i) is int and i in legal for i in specials.values())
            and len(set(specials.values())) == len(specials)
        ):
            raise ConfigError(
                f"tokenizer=bpe: specials={specials!r:.200} must map names to distinct ids "
                f"from {legal.start} to {legal.stop - 1}"
            )
        vocab_size = 1 + max(specials.values(), default=len(ranks) - 1)
        names = {i: _utf8(name) for name, i in specials.items()}
        super().__init__([*ranks, *(names.get(i, b"") for i in range(len(ranks), vocab_size))])
        self.end_token = specials.get(END_OF_TEXT)
        self.pattern, self.ranks, self.specials = pattern, list(ranks), dict(specials)
        tiktoken = need("tiktoken")
        try:
            self._encoding = tiktoken.Encoding(
                "minilm", pat_str=pattern, mergeable_ranks=ids, special_tokens=self.specials
            )
        except ValueError as error:
            raise ConfigError(f"tokenizer=bpe: {pattern=} is no regular expression: {error}") from error
        probe = "Don't drop 42 signs:\r\n\t  é 日本 🙂 \n\n"
        # tiktoken skips in silence what the pattern does not match
        if self.decode(self.encode(probe)) != probe:
            raise ConfigError(f"tokenizer=bpe: {pattern=} loses part of a text; must match every character")

    @classmethod
    def fit(cls, texts: str | Iterable[str], vocab_size: int = 1024) -> Self:
        """Train on a text, or on the first 2²⁶ characters of many. `vocab_size` counts the 256 bytes, the merges and
        `<|endoftext|>`, the last id.

        Only pairs that occur twice are merged, and the same text gives the same tokens. A size that the text
        cannot fill is an error, not a smaller vocabulary: who compares two sizes must get two sizes.
        """
        if type(vocab_size) is not int or not 257 <= vocab_size <= MAX_VOCAB_SIZE:
            raise ConfigError(
                f"tokenizer.vocab_size={vocab_size!r} must be a whole number from 257 (all bytes and "
                f"{END_OF_TEXT}) to {MAX_VOCAB_SIZE}"
            )
        hf = need("tokenizers")
        split = hf.pre_tokenizers.Split(hf.Regex(GPT2_PATTERN), behavior="isolated")
        to_bytes = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        trained = hf.Tokenizer(hf.models.BPE())
        trained.pre_tokenizer = hf.pre_tokenizers.Sequence([split, to_bytes])
        trainer = hf.trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            min_frequency=2,
            initial_alphabet=to_bytes.alphabet(),
            show_progress=False,
        )
        read = 0

        def pieces() -> Iterable[str]:
            nonlocal read
            for text in one_by_one(texts):
                _utf8(text)
                read += len(text)
                # No piece crosses from a letter or sign to a new line, so that the cut changes nothing; whole, a
                # text would take a hundred times its size in memory.
                yield from re.split(r"(?<=\S)(?=\n)", text)
                if read >= ENOUGH:
                    return

        trained.train_from_iterator(pieces(), trainer)
        ids = trained.get_vocab()
        if len(ids) + 1 < vocab_size:
            raise ConfigError(
                f"tokenizer.vocab_size={vocab_size}: the pairs that this text of {read} characters "
                f"repeats give {len(ids) + 1} tokens; set tokenizer.vocab_size={len(ids) + 1} or less"
            )
        byte = byte_alphabet()
        ranks = [bytes(byte[c] for c in token) for token in sorted(ids, key=ids.__getitem__)]
        return cls(GPT2_PATTERN, ranks, {END_OF_TEXT: len(ranks)})

    def encode(self, text: str) -> list[int]:
        return self._run(self._encoding.encode_ordinary, text)

    def encode_array(self, text: str) -> np.ndarray:
        return self._run(self._as_array, text).astype(dtype_for(self.vocab_size))

    def _as_array(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(
            text, disallowed_special=()
        )  # no special token is made from text

    def _run(self, encode: Callable[[str], T], text: str) -> T:
        _utf8(text)  # tiktoken would replace in silence
        try:
            return encode(text)
        except BaseException as error:  # a panic in Rust is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise ConfigError(
                f"tokenizer=bpe: pattern={self.pattern!r} fails on this text of {len(text)} characters; "
                "shorten its runs of white space, or use tokenizer=byte"
            ) from None

    def to_dict(self) -> dict[str, Any]:
        ranks = [base64.b64encode(token).decode() for token in self.ranks]
        return {"kind": "bpe", "pattern": self.pattern, "ranks": ranks, "specials": self.specials}


class Tiktoken(BPE):
    """A published encoding: byte pairs that are fetched on first use instead of trained.

    From then on it is a BPE like any other: a checkpoint holds it whole and needs no network.
    """

    @classmethod
    def fit(cls, texts: str | Iterable[str], name: str = "gpt2") -> Self:  # type: ignore[override]
        """The encoding gpt2, cl100k_base or o200k_base; the texts play no part."""
        if name not in PUBLISHED:
            raise ConfigError(f"tokenizer.name={name!r} must be one of {', '.join(PUBLISHED)}")
        tiktoken, requests = need("tiktoken"), need("requests")
        # tiktoken's rules: the folder, and in it each file under the sha1 of its address
        folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
        if folder is None:
            folder = os.path.join(tempfile.gettempdir(), "data-gym-cache")
        urls = [PUBLISHER + file for file in PUBLISHED[name]]
        files = [hashlib.sha1(url.encode()).hexdigest() for url in urls]
        try:
            if not all(Path(folder, file).exists() for file in files):
                # tiktoken itself would wait for ever where a firewall swallows its request
                requests.head(urls[0], timeout=10).raise_for_status()
            encoding = tiktoken.get_encoding(name)
        except (OSError, ValueError) as error:
            wanted = " and ".join(f"{url} as {file}" for url, file in zip(urls, files, strict=True))
            raise ConfigError(
                f"tokenizer.name={name} is not cached here, and fetching it failed ({type(error).__name__}): "
                f"put {wanted} into the folder of TIKTOKEN_CACHE_DIR (now {folder or 'empty: no cache'})"
            ) from error
        ids = encoding._mergeable_ranks
        ranks = sorted(ids, key=ids.__getitem__)
        assert [ids[token] for token in ranks] == list(range(len(ranks)))
        return cls(encoding._pat_str, ranks, encoding._special_tokens)


class Pretrained(Tokenizer):
    """A tokenizer.json of others, run by `tokenizers`: byte-level (GPT-2, Llama 3) or SentencePiece-like (Llama 2).

    definition: the file's text. vocab_size: the model's, which may be larger than the file's: ids above decode to ''.
    end_token: id of the end-of-text token.
    """

    def __init__(self, definition: str, vocab_size: int | None = None, end_token: int | None = None):
        try:
            inner = need("tokenizers").Tokenizer.from_str(definition)
            known = json.loads(definition)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"tokenizer.json: the tokenizers library cannot read it: {error}") from None
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # they are plain text in a text
        ids = inner.get_vocab(with_added_tokens=True)
        size = 1 + max(ids.values(), default=-1)
        vocab_size = size if vocab_size is None else vocab_size
        if not 0 < size <= vocab_size <= MAX_VOCAB_SIZE:
            raise ConfigError(f"tokenizer.json: ids up to {size - 1}, but the model knows {vocab_size}")
        if end_token is not None and not 0 <= end_token < vocab_size:
            raise ConfigError(f"tokenizer.json: end token {end_token} is none of {vocab_size} ids")
        names = {i: token.content for i, token in inner.get_added_tokens_decoder().items()}
        spell = _speller(known.get("decoder"))
        tokens = [b""] * vocab_size
        for piece, i in ids.items():
            tokens[i] = _utf8(names[i]) if i in names else spell(piece)
        super().__init__(tokens)
        self.definition, self.end_token, self._inner = definition, end_token, inner
        plain, whole = self.encode("a"), inner.encode("a").ids
        self.prompt_start = whole[: whole.index(plain[0])] if plain and plain[0] in whole else []

    @classmethod
    def fit(cls, texts: str | Iterable[str]) -> Self:
        raise ConfigError(
            "tokenizer: a pretrained one comes with its model; say init_from=…, or tokenizer=file"
        )

    def encode(self, text: str) -> list[int]:
        _utf8(text)
        try:
            return self._inner.encode(text, add_special_tokens=False).ids
        except Exception as error:  # an unknown character where there is no token for it
            raise ConfigError(f"tokenizer: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        self.decode_bytes(ids)  # an id outside raises
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "pretrained",
            "definition": self.definition,
            "vocab_size": self.vocab_size,
            "end_token": self.end_token,
        }


def _speller(decoder: Any) -> Callable[[str], bytes]:
    """From a piece of the vocabulary to its bytes, as the file's decoder would have it."""
    parts = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = {part.get("type") for part in parts if isinstance(part, dict)}
    alphabet = byte_alphabet()
    if "ByteLevel" in kinds:
        return lambda piece: b"".join(bytes([alphabet[c]]) if c in alphabet else _utf8(c) for c in piece)
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return lambda piece: (
            bytes.fromhex(piece[3:5])
            if re.fullmatch("<0x[0-9A-F]{2}>", piece)
            else _utf8(piece.replace("\u2581", " "))
        )
    if kinds == {"Fuse"}:
        return _utf8
    raise ConfigError(
        f"tokenizer.json: decoder {', '.join(map(str, kinds)) or 'missing'}: expected a byte-level one, as GPT-2's, "
        "or a SentencePiece-like one, as Llama's"
    )


def from_dict(data: Any) -> Tokenizer:
    """The tokenizer that `to_dict` described. Data from anywhere: checked, never run. Raises ConfigError."""
    match data:
        case {"kind": "char", "chars": str(chars)} if len(data) == 2:
            return Char(chars)
        case {"kind": "char", "chars": str(chars), "end": True} if len(data) == 3:
            return Char(chars, end=True)
        case {"kind": "byte"} if len(data) == 1:
            return Byte()
        case {"kind": "byte", "end": True} if len(data) == 2:
            return Byte(end=True)
        case {"kind": "bpe", "pattern": str(p), "ranks": list(codes), "specials": dict(ids)} if (
            len(data) == 4
        ):
            try:
                ranks = [base64.b64decode(code, validate=True) for code in codes]
            except (TypeError, ValueError) as error:
                raise ConfigError(f"tokenizer data: ranks must be texts in base64: {error}") from error
            return BPE(p, ranks, ids)
        case {
            "kind": "pretrained",
            "definition": str(definition),
            "vocab_size": int(size),
            "end_token": int() | None as end,
        } if len(data) == 4:
            return Pretrained(definition, size, end)
    raise ConfigError(
        f"tokenizer data: {data!r:.200} must be exactly kind=char with chars (str), kind=byte (end=true on either), "
        "kind=bpe with pattern (str), ranks (list) and specials (dict), or kind=pretrained with definition (str), "
        "vocab_size and end_token"
    )


def one_by_one(texts: str | Iterable[str]) -> Iterable[str]:
    """A text alone, or each of several."""
    return (texts,) if isinstance(texts, str) else texts


def code_points(text: str) -> np.ndarray:
    """(N,) uint32"""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"text: {_show(text[error.start])} at place {error.start} is no character, likely a byte that "
            "was not UTF-8; give the text in UTF-8"
        ) from error


def _show(char: str) -> str:
    return f"{char!r} (U+{ord(char):04X})"


def need(package: str) -> Any:
    return installed(
        package,
        f"tokenizer needs the package {package}: pip install {package}, or use tokenizer=char or byte",
    )
