"""Documents from where they lie: which there are, on which side of the split, and what is refused."""

import hashlib
import json
import os
import re
import sys

import numpy as np
import pytest
from conftest import TEXT

from minilm import readers, sources
from minilm.build import build_corpus
from minilm.data import ROUND, Windows
from minilm.errors import ConfigError
from minilm.readers import from_text, last_word_end
from minilm.sources import Folder, HuggingFace
from minilm.tokenizer import BPE, Byte, Char, Pretrained

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TEXTS = [TEXT[i : i + 120] for i in range(0, 3600, 120)]


@pytest.fixture
def folder(tmp_path):
    """Thirty documents in four files of three kinds."""
    place = tmp_path / "texts"
    (place / "sub").mkdir(parents=True)
    (place / "a.txt").write_text(TEXTS[0], encoding="utf-8")
    rows = "\n\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS[1:15]))
    (place / "b.jsonl").write_text(rows, encoding="utf-8")
    pq.write_table(pa.table({"text": TEXTS[15:29], "n": range(14)}), place / "c.parquet", row_group_size=5)
    (place / "sub" / "d.txt").write_bytes(b"\xef\xbb\xbf" + TEXTS[29].replace("\n", "\r\n").encode())
    return place


def documents(corpus):
    whole, held = [], ""
    for piece in corpus.read():
        held += corpus.parse(piece.text, piece.place) if isinstance(piece.text, bytes) else piece.text
        if piece.ends:
            whole, held = [*whole, held], ""
    return whole


def is_for_validation(text, share):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64 < share


# ---- folders ----


def test_a_file_a_line_and_a_row_are_documents(folder):
    assert documents(Folder(path=str(folder))) == TEXTS


def test_files_are_chosen_by_patterns_and_others_are_text(folder):
    (folder / "notes.md").write_text("# Notes\n")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.txt").write_text("not this")
    assert len(documents(Folder(path=str(folder)))) == 30
    assert documents(Folder(path=str(folder), glob="*.md")) == ["# Notes\n"]
    assert documents(Folder(path=str(folder), glob=("*.txt", "sub/*"))) == [TEXTS[0], TEXTS[29]]
    assert documents(Folder(path=str(folder / "b.jsonl"))) == TEXTS[1:15]


def test_another_column_may_hold_the_text_and_null_is_no_document(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"body": "one\\r\\n"}\n{"body": null}\n{"body": ""}\n{"body": "two"}\n'
    )
    corpus = Folder(path=str(tmp_path), text_column="body", val_fraction=0)
    data = corpus.prepare(Byte(end=True), tmp_path / "cache")
    assert data.train[:].tolist() == [*b"one\n", 256, *b"two", 256]


@pytest.mark.parametrize("text", [TEXT, " ".join(TEXT.split())], ids=["lines", "one line"])
@pytest.mark.parametrize("size", [1, 7, 300, 1000])
def test_a_long_text_in_pieces_has_the_tokens_of_the_whole(tmp_path, monkeypatch, size, text):
    monkeypatch.setattr(readers, "LONG", size)
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    read = list(from_text(tmp_path / "long.txt", ""))
    assert "".join(piece.text for piece in read) == text
    assert [piece.ends for piece in read] == [False] * (len(read) - 1) + [True]
    assert read[-1].done == len(text.encode())
    bpe = BPE.fit(text, vocab_size=300)
    if size >= 300:  # a line end or a space behind a word is always near
        assert len(read) > 3
        assert [i for piece in read for i in bpe.encode(piece.text)] == bpe.encode(text)


def test_a_text_is_cut_behind_a_word():
    assert last_word_end("one\ntwo.\nthree\n\nfour") == len("one\ntwo.\nthree")
    assert last_word_end("one two. three  four") == len("one two. three")
    assert last_word_end("one\ntwo three four") == len("one")
    assert last_word_end("noline") == len("noline")
    assert last_word_end("\n.\n . ") == len("\n.\n . ")


@pytest.mark.parametrize("share", [0, 0.3, 0.9])
def test_a_document_goes_to_validation_whole_by_a_hash_of_its_text(folder, tmp_path, share):
    tokenizer = Byte(end=True)
    data = Folder(path=str(folder), val_fraction=share).prepare(tokenizer, tmp_path / "cache")
    for tokens, side in ((data.train, False), (data.val, True)):
        own = [text for text in TEXTS if is_for_validation(text, share) == side]
        expected = [i for text in own for i in [*text.encode(), 256]]
        assert tokens[:].tolist() == expected
    assert data.val_bytes == sum(len(t.encode()) for t in TEXTS if is_for_validation(t, share))
    assert data.end == 256


def test_tokens_are_made_once_and_again_when_something_changed(folder, tmp_path, monkeypatch, capsys):
    def prepared(tokenizer=Byte(end=True), **options):  # noqa: B008
        return Folder(path=str(folder), **options).prepare(tokenizer, tmp_path / "cache")

    first = prepared()
    assert "30 documents are" in capsys.readouterr().err
    monkeypatch.setattr(sources, "from_text", lambda *_: pytest.fail("read again"))
    assert prepared().source == first.source
    assert capsys.readouterr().err == ""
    monkeypatch.undo()
    assert prepared(val_fraction=0.5).source != first.source
    assert prepared(Char.fit(TEXT, end=True)).source != first.source
    (folder / "e.txt").write_text("one more")
    assert prepared().source != first.source


def test_a_folder_that_changes_while_it_is_read_is_refused(folder, tmp_path, monkeypatch):
    plain = Folder.read

    def touched(self):
        yield from plain(self)
        (folder / "a.txt").write_text("another")

    monkeypatch.setattr(Folder, "read", touched)
    with pytest.raises(ConfigError, match="changed while it was read"):
        Folder(path=str(folder)).prepare(Byte(end=True), tmp_path / "cache")


def test_a_tokenizer_is_fitted_once_to_texts_one_by_one(folder, tmp_path, monkeypatch):
    corpus = Folder(path=str(folder))

    def make(texts):
        return Char.fit(texts, end=True)

    first = corpus.fit(make, {"kind": "char"}, tmp_path)
    assert first.chars == "".join(sorted(set("".join(TEXTS))))
    monkeypatch.setattr(Folder, "read", lambda self: pytest.fail("read again"))
    assert corpus.fit(make, {"kind": "char"}, tmp_path).fingerprint() == first.fingerprint()
    assert corpus.fit(lambda texts: Byte.fit(texts, end=True), {"kind": "byte"}, tmp_path).vocab_size == 257


@pytest.mark.parametrize("damage", ["cut short", "another object", "no object", "nested", "no UTF-8"])
def test_a_damaged_tokenizer_is_noticed_and_fitted_anew(folder, tmp_path, damage):
    def fit():
        return Folder(path=str(folder)).fit(
            lambda texts: BPE.fit(texts, 300), {"kind": "bpe"}, tmp_path / "cache"
        )

    first = fit()
    (kept,) = (tmp_path / "cache").iterdir()
    whole = kept.read_bytes()
    contents = {
        "cut short": whole[:100],
        "another object": b"{}",
        "no object": b"1",
        "nested": b"[" * 100_000,
    }
    kept.write_bytes(contents.get(damage, b"\xff"))
    with pytest.warns(UserWarning, match="damaged, and made anew"):
        assert fit().fingerprint() == first.fingerprint()
    assert kept.read_bytes() == whole


def test_byte_pairs_of_many_texts_are_those_of_one():
    lines = TEXT.splitlines(keepends=True)
    paragraphs = [line for line in lines if line.strip()]
    assert BPE.fit(iter(paragraphs), 300).vocab_size == 300


# ---- Hugging Face ----


@pytest.fixture
def hub(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    place = tmp_path / "dataset"
    place.mkdir()
    for split, texts in (("train", TEXTS[:20]), ("test", TEXTS[20:])):
        rows = [json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts)]
        (place / f"{split}.jsonl").write_text("".join(rows), encoding="utf-8")
    return place


def test_a_data_set_is_streamed(hub, tmp_path):
    assert documents(HuggingFace(path=str(hub))) == TEXTS[:20]
    assert documents(HuggingFace(path=str(hub), split="test")) == TEXTS[20:]
    corpus = HuggingFace(path=str(hub), val_fraction=0.3)
    data = corpus.prepare(Byte(end=True), tmp_path / "cache")
    own = [text for text in TEXTS[:20] if not is_for_validation(text, 0.3)]
    assert data.train[:].tolist() == [i for text in own for i in [*text.encode(), 256]]
    before = corpus.fingerprint()
    os.utime(hub / "train.jsonl", (1, 1))
    assert HuggingFace(path=str(hub)).fingerprint() != before


def test_what_a_data_set_lacks_is_refused_in_one_line(hub):
    for options, says in (
        ({"split": "tests"}, "Bad split: tests"),
        ({"name": "english"}, "'english' not found"),
        (
            {"text_column": "body"},
            "data.text_column=body: .*row 1 of train, has no such column; it has text, n",
        ),
        ({"text_column": "n"}, "data.text_column=n: .*row 1 of train, has 0, expected text"),
    ):
        with pytest.raises(ConfigError, match=says) as refused:
            documents(HuggingFace(path=str(hub), **options))
        assert "\n" not in str(refused.value)
        assert options.keys() & {"text_column"} or f"data.path={hub}" in str(refused.value)


def test_without_the_extra_the_message_names_it(folder, monkeypatch):
    for package in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=re.escape("pip install -e '.[data]'")):
        HuggingFace(path="x").fingerprint()
    with pytest.raises(ConfigError, match=r"c\.parquet needs the package pyarrow"):
        documents(Folder(path=str(folder)))


# ---- mistakes ----

WRONG = {
    "latin.txt": (b"caf\xe9", "latin.txt: not UTF-8 at byte 3; convert"),
    "cut.txt": (b"caf\xc3", "cut.txt: not UTF-8 at byte 3; convert"),
    "binary.txt": (b"a\0b", "binary.txt: holds a NUL byte"),
    "bad.jsonl": (b'{"text": "a"}\n{"text": \n', "bad.jsonl: line 2 is no JSON"),
    "latin.jsonl": (b'{"text": "caf\xe9"}\n', "latin.jsonl: line 1 is no JSON in UTF-8"),
    "list.jsonl": (b"[1]\n", "list.jsonl: line 1 is no object"),
    "other.jsonl": (
        b'{"body": "a", "n": 1}\n',
        "text_column=text: .*line 1 has no such column; it has body, n",
    ),
    "number.jsonl": (b'{"text": 3}\n', "line 1 has 3, expected text"),
    "bad.parquet": (b"PAR1 and no more", "bad.parquet: no whole Parquet file"),
    "empty.txt": (b"", "no text in it"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    raw, says = WRONG[name]
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ConfigError, match=says) as refused:
        Folder(path=str(tmp_path), glob="*").prepare(Byte(end=True), tmp_path / ".cache")
    assert "\n" not in str(refused.value)


def test_where_a_bad_byte_stands_is_told_far_into_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONG", 10)
    (tmp_path / "a.txt").write_bytes("aé".encode() * 1000 + b"\xff" + b"b" * 100)
    with pytest.raises(ConfigError, match="not UTF-8 at byte 3000;"):
        list(from_text(tmp_path / "a.txt", ""))


def test_a_column_that_a_parquet_file_lacks_is_named(folder):
    with pytest.raises(
        ConfigError, match=r"text_column=body: .*c\.parquet has no such column; it has text, n"
    ):
        documents(Folder(path=str(folder / "c.parquet"), text_column="body"))


def test_folders_without_documents_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        documents(Folder(path=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"no file in it that data\.glob="):
        documents(Folder(path=str(tmp_path)))
    for pattern in ("", "/etc/*"):
        with pytest.raises(ConfigError, match=r"data\.glob="):
            documents(Folder(path=str(tmp_path), glob=pattern))


def test_a_side_without_documents_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    for share, side, cure in ((1e-9, "validation", "larger"), (1 - 1e-9, "training", "smaller")):
        with pytest.raises(ConfigError, match=f"of the 1 documents .* none falls into {side}.*a {cure}"):
            Folder(path=str(tmp_path), val_fraction=share).prepare(Byte(end=True), tmp_path / ".cache")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"val_fraction": 1}, "data.val_fraction=1"),
        ({"workers": 0}, "data.workers=0: a positive whole number"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_read(options, says):
    with pytest.raises(ConfigError, match=says):
        Folder(path="nowhere", **options)


def test_a_tokenizer_without_an_end_token_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="it has no end token"):
        Folder(path=str(folder)).prepare(Byte(), tmp_path)


# ---- mixtures ----


def mix(*entries, **options):
    target = {"_target_": "minilm.sources.Mix", "sources": list(entries), **options}
    return build_corpus({"data": target})


@pytest.fixture
def two(folder, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.jsonl").write_text(
        "".join(json.dumps({"text": "xyz" * 40}) + "\n" for _ in range(3))
    )
    return {"data": "folder", "path": str(folder)}, {
        "data": "folder",
        "path": str(tmp_path / "other"),
        "val_fraction": 0.0,
    }


def test_sources_are_drawn_from_as_their_weights_say(two, tmp_path):
    data = mix(*two, weights=[3, 1]).prepare(Byte(end=True), tmp_path / "cache")
    lengths = [n for n, _ in data.mixed]
    assert sum(lengths) == len(data.train)
    windows = Windows(data.train, 16, seed=1, mixed=data.mixed)
    starts = windows.starts(0, 2 * ROUND)
    second = starts >= lengths[0]
    assert second[:ROUND].sum() == second[ROUND:].sum() == ROUND // 4
    assert abs(second[:1000].mean() - 0.25) < 0.05  # and not only in the long run
    assert (starts[~second] <= lengths[0] - 17).all()  # no window lies in two sources
    assert (starts[second] <= sum(lengths) - 17).all()
    for own, begin, n in (
        (starts[~second], 0, lengths[0] - 16),
        (starts[second], lengths[0], lengths[1] - 16),
    ):
        for epoch in range(len(own) // n):  # each visits its windows once an epoch
            assert sorted(own[epoch * n : (epoch + 1) * n] - begin) == list(range(n))
    assert np.array_equal(windows.batch(0, 3), data.train[starts[:3, None] + np.arange(17)])


def test_the_order_of_a_mixture_is_a_function_of_seed_and_place(two, tmp_path):
    data = mix(*two, weights=[1, 2]).prepare(Byte(end=True), tmp_path / "cache")

    def windows(seed=5):
        return Windows(data.train, 16, seed, data.mixed)

    first = ROUND - 20
    whole = windows().starts(first, 40)
    parts = [windows().starts(first + at, 8) for at in range(0, 40, 8)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(windows(6).starts(first, 40), whole)


def test_without_weights_each_is_drawn_from_as_often_as_it_is_long(two, tmp_path):
    data = mix(*two).prepare(Byte(end=True), tmp_path / "cache")
    assert [weight for _, weight in data.mixed] == [n for n, _ in data.mixed]


def test_validation_is_that_of_all_and_any_corpus_may_be_one_of_them(two, tmp_path):
    (tmp_path / "plain.txt").write_text(TEXT)
    third = {"data": "file", "path": str(tmp_path / "plain.txt"), "val_fraction": 0.5}
    corpus = mix(*two, third, weights=[1, 1, 1])
    assert corpus.documents
    assert set("".join(corpus.texts())) == set(TEXT) | set("".join(TEXTS)) | set("xyz")
    each = [source.prepare(Byte(end=True), tmp_path / "cache") for source in corpus.corpora]
    data = corpus.prepare(Byte(end=True), tmp_path / "cache")
    assert data.val[:].tolist() == [i for one in each for i in one.val[:].tolist()]
    assert data.val_bytes == sum(one.val_bytes for one in each)


def test_a_source_that_is_too_short_is_named(two, tmp_path):
    data = mix(*two, weights=[1, 1]).prepare(Byte(end=True), tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"training text of data\.sources\[1\] has 363 tokens"):
        data.check(400)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weights": [1]}, r"data\.weights=\[1\.0\]: a positive number for each of 2"),
        ({"weights": [1, 0]}, r"data\.weights=\[1\.0, 0\.0\]"),
        ({"weights": [1, -1]}, r"data\.weights="),
        ({"sources": [{"data": "folder", "path": "x"}]}, "name two or more"),
        ({"sources": [{"data": "folder"}, {"data": "tales"}]}, r"data\.sources\[0\]\.path has no value"),
        ({"sources": [{"data": "folders", "path": "x"}, {"data": "tales"}]}, r"sources\[0\]: data=folders: expected"),
        ({"sources": [{"path": "x"}, {"data": "tales"}]}, r"sources\[0\]: data=None: expected one of file"),
        ({"sources": [{"data": "tales"}, {"data": "folder", "path": "x", "globb": "y"}]}, "did you mean .*glob"),
        ({"sources": [{"data": "tales"}, {"data": "mix", "sources": [{"data": "tales"}] * 2}]}, "data=mix is for all"),
        (
            {"sources": [{"data": "tales"}, {"data": "folder", "path": "x", "document_mask": True}]},
            "document_mask is for all",
        ),
    ],
)  # fmt: skip
def test_a_mixture_that_cannot_be_is_refused_before_anything_is_read(change, says):
    options = {"sources": [{"data": "folder", "path": "x"}, {"data": "tales"}], "weights": None} | change
    sources_ = options.pop("sources")
    with pytest.raises(ConfigError, match=says):
        mix(*sources_, **options)


def test_a_pretrained_tokenizer_may_have_an_end_token(folder, tmp_path):
    from minilm.tokenizer_files import to_json

    theirs = Pretrained(to_json(BPE.fit(TEXT, 300)), end_token=299)
    data = Folder(path=str(folder)).prepare(theirs, tmp_path / "cache")
    assert (data.train[:] == 299).sum() > 20
