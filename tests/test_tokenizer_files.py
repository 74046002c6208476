"""Tokenizers in the formats of others: the libraries that own the formats say whether the ids are the same."""

import json
import random

import pytest
import tiktoken
import tokenizers
from conftest import TEXT
from tiktoken.load import load_tiktoken_bpe

from minilm.errors import ConfigError
from minilm.tokenizer import BPE, Byte, Char, Pretrained, from_dict
from minilm.tokenizer_files import (
    TokenizerFile,
    atomic,
    from_json,
    from_tiktoken,
    from_vocabulary,
    to_json,
    to_tiktoken,
)

LETTERS = "ab aab\n\t 0123456789'sTHE éü日🙂\u00a0\u0301_-."
RANDOM = random.Random(0)
PROBES = [
    *(
        "",
        "Hello 12345 it's  \n\n x é 日本 🙂\r\n\t ab",
        "<|endoftext|>",
        "<|endoftext|> hi 3.14159265",
        TEXT,
        "a" * 19,
        "  " * 50 + "x",
    ),
    *("".join(RANDOM.choices(LETTERS, k=RANDOM.randrange(1, 60))) for _ in range(200)),
]
TRAINED = BPE.fit(TEXT * 4, 500)


def published(name, monkeypatch):
    """One of tiktoken's encodings with our few ranks in place of its many: the pattern alone, without a network."""
    from tiktoken_ext import openai_public

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *args, **options: {})
    pattern = getattr(openai_public, name)()["pat_str"]
    return BPE(pattern, TRAINED.ranks, {"<|endoftext|>": 510, "<|fim|>": 505})


@pytest.fixture(params=["char", "char, end", "byte", "byte, end", "bpe", "cl100k_base", "o200k_base"])
def tokenizer(request, monkeypatch):
    simple = {
        "char": lambda: Char.fit("".join(PROBES)),
        "char, end": lambda: Char.fit("".join(PROBES), end=True),
        "byte": Byte,
        "byte, end": lambda: Byte(end=True),
        "bpe": lambda: TRAINED,
    }
    return simple[request.param]() if request.param in simple else published(request.param, monkeypatch)


# ---- tokenizer.json ----


def test_the_tokenizers_library_gives_the_same_ids_and_text(tokenizer):
    theirs = tokenizers.Tokenizer.from_str(to_json(tokenizer))
    theirs.encode_special_tokens = True
    for text in PROBES:
        ids = tokenizer.encode(text)
        assert theirs.encode(text).ids == ids
        assert theirs.decode(ids, skip_special_tokens=False) == text
    assert theirs.get_vocab_size() <= tokenizer.vocab_size


def test_what_was_written_is_read_back_as_what_it_was(tokenizer):
    back = from_json(to_json(tokenizer))
    assert type(back) is type(tokenizer)
    assert (back.vocab_size, back.end_token) == (tokenizer.vocab_size, tokenizer.end_token)
    assert all(back.encode(text) == tokenizer.encode(text) for text in PROBES)


def test_a_unknown_character_is_refused_as_here():
    theirs = tokenizers.Tokenizer.from_str(to_json(Char("abc")))
    assert theirs.encode("cab").ids == [2, 0, 1]
    with pytest.raises(Exception, match="UNK"):
        theirs.encode("abd")


@pytest.mark.parametrize(
    ("pattern", "rewritten"),
    [
        (r"\p{N}{1,3}+| ", r"(?>\p{N}{1,3})| "),
        (r"[^\s]{2,}+x", r"(?>[^\s]{2,})x"),
        (r"\p{L}++a{3}", r"\p{L}++a{3}"),
    ],
)
def test_a_possessive_count_is_not_left_to_be_a_repetition(pattern, rewritten):
    assert atomic(pattern) == rewritten == atomic(rewritten)


def test_a_special_token_that_is_an_ordinary_one_too_is_refused():
    letters = b"<|endoftext|>"
    ranks = [*TRAINED.ranks[:256], *(letters[:n] for n in range(2, len(letters) + 1))]
    twice = BPE(TRAINED.pattern, ranks, {"<|endoftext|>": len(ranks)})
    with pytest.raises(ConfigError, match=r"'<\|endoftext\|>' is a special token and an ordinary one, too"):
        to_json(twice)


def test_a_pattern_that_takes_a_special_tokens_name_whole_is_refused():
    """The library would look the piece up, and find the special token where there is only text."""
    with pytest.raises(ConfigError, match=r"its pattern takes '<\|endoftext\|>' in a text whole"):
        to_json(BPE(r"\S+|\s+", TRAINED.ranks, {"<|endoftext|>": 500}))


# ---- of others ----


def sentencepiece():
    """A tokenizer.json like Llama 2's: spaces as ▁, unknown bytes one by one, a beginning-of-text token."""
    vocab = {"<s>": 0, "</s>": 1} | {f"<0x{b:02X}>": 2 + b for b in range(256)}
    for piece in ("▁", "a", "b", "c", "▁a", "ab", "▁ab", "é"):
        vocab[piece] = len(vocab)
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [("▁", "a"), ("a", "b"), ("▁a", "b")], byte_fallback=True, fuse_unk=True)
    )
    part = tokenizers.normalizers
    made.normalizer = part.Sequence([part.Prepend("▁"), part.Replace(" ", "▁")])
    part = tokenizers.decoders
    made.decoder = part.Sequence(
        [part.Replace("▁", " "), part.ByteFallback(), part.Fuse(), part.Strip(" ", 1, 0)]
    )
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made.add_special_tokens(["<s>", "</s>"])
    return made


def gpt2_like(folder):
    """GPT-2's two older files, with a merge that its vocabulary reaches in one way alone."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {piece: i for i, piece in enumerate([*sorted(alphabet), "ab", "abc", "Ġa", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\na b\nab c\nĠ a\n")
    return from_vocabulary(folder / "vocab.json", folder / "merges.txt")


def test_a_sentencepiece_like_file_is_run_as_it_is():
    theirs = sentencepiece()
    ours = from_json(theirs.to_str(), end_token=1)
    assert isinstance(ours, Pretrained)
    for text in ("ab ab", "a  b", "cab é", "日 x\n", "</s> a", ""):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids or "</s>" in text
        assert ours.decode(ours.encode(text)) == text
    assert 1 not in ours.encode("</s> a")
    assert (ours.end_token, list(ours.prompt_start)) == (1, [0])
    assert ours.decode_bytes(ours.encode("日 ab")) == " 日 ab".encode()
    assert ours.decode_bytes([1]) == b"</s>"


def test_gpt2s_older_files_and_ids_beyond_the_file(tmp_path):
    definition = gpt2_like(tmp_path)
    ours = from_json(definition, vocab_size=300, end_token=259)
    assert isinstance(ours, Pretrained)
    assert [ours.decode([i]) for i in ours.encode("abc abé")] == ["abc", " ", "ab", "\ufffd", "\ufffd"]
    assert (ours.vocab_size, ours.decode([299]), ours.prompt_start) == (300, "", [])
    again = from_dict(json.loads(json.dumps(ours.to_dict())))
    assert again.to_dict() == ours.to_dict()
    assert again.encode(TEXT) == ours.encode(TEXT)
    with pytest.raises(IndexError):
        ours.decode([300])


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("{}", "the tokenizers library cannot read it"),
        ("no JSON", "the tokenizers library cannot read it"),
        (
            tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).to_str(),
            "decoder missing: expected",
        ),
    ],
    ids=["empty", "torn", "decoder"],
)
def test_a_file_that_is_none_is_refused(definition, message):
    with pytest.raises(ConfigError, match=message):
        from_json(definition)


# ---- tiktoken ----


@pytest.fixture
def folder(tmp_path):
    for name, content in to_tiktoken(TRAINED).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path


def test_tiktoken_loads_the_ranks_and_gives_the_same_ids(folder):
    about = json.loads((folder / "encoding.json").read_text())
    theirs = tiktoken.Encoding(**about, mergeable_ranks=load_tiktoken_bpe(str(folder / "ranks.tiktoken")))
    assert all(theirs.encode_ordinary(text) == TRAINED.encode(text) for text in PROBES)
    assert theirs.n_vocab == TRAINED.vocab_size
    assert theirs.eot_token == TRAINED.end_token


def test_the_ranks_are_read_back(folder):
    assert from_tiktoken(folder).to_dict() == TRAINED.to_dict()


def test_only_byte_pairs_have_ranks():
    with pytest.raises(ConfigError, match="this model's tokenizer is char; byte pairs alone have ranks"):
        to_tiktoken(Char("abc"))


# ---- tokenizer=file ----


def test_a_file_or_folder_of_any_of_these_formats_is_a_tokenizer_to_train_with(folder, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "tokenizer.json").write_text(to_json(TRAINED), encoding="utf-8")
    (tmp_path / "ours.json").write_text(json.dumps(TRAINED.to_dict()), encoding="utf-8")
    files = (folder / "ranks.tiktoken", tmp_path / "hf" / "tokenizer.json", tmp_path / "ours.json")
    for path in (folder, tmp_path / "hf", *files):
        assert TokenizerFile.fit("", str(path)).to_dict() == TRAINED.to_dict()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "encoding.json").unlink(), r"encoding.json cannot be read \(No such file"),
        (
            lambda f: (f / "encoding.json").write_text("{}"),
            "encoding.json: expected pat_str and special_tokens",
        ),
        (
            lambda f: (f / "ranks.tiktoken").write_text("YQ== 1\n"),
            "ranks.tiktoken: line 1 has rank 1, expected 0",
        ),
        (lambda f: (f / "ranks.tiktoken").write_bytes(b"\xff"), "ranks.tiktoken cannot be read .not UTF-8"),
        (lambda f: (f / "ranks.tiktoken").unlink(), "tokenizer.json cannot be read"),
    ],
    ids=["no encoding", "empty encoding", "ranks", "bytes", "no ranks"],
)
def test_what_is_wrong_with_the_files_is_named(folder, damage, message):
    damage(folder)
    with pytest.raises(ConfigError, match=rf"^tokenizer.path=.*{message}"):
        TokenizerFile.fit("", str(folder))
