"""Texts as bytes on a disk, tokens in a cache, and the order of windows."""

import hashlib
import http.client
import io
import pydoc_data.topics
import urllib.error
from dataclasses import dataclass

import numpy as np
import pytest
from conftest import TEXT
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm import data
from minilm.data import (
    Download,
    PyDoc,
    Tales,
    Text,
    TextFile,
    TokenData,
    Windows,
    permute,
    read_text,
    shares,
)
from minilm.errors import ConfigError
from minilm.tokenizer import BPE, Byte, Char

# ---- texts ----


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"hello\nworld\n", "hello\nworld\n"),
        (b"\xef\xbb\xbfhello\r\nworld\r\n", "hello\nworld\n"),
        (b"one\rtwo\r", "one\ntwo\n"),
        (b"mixed\r\n\r\rends\n", "mixed\n\n\nends\n"),
        ("caf\u00e9 日本 🙂".encode(), "caf\u00e9 日本 🙂"),
        (b"x", "x"),
        (b" \n\t \n", " \n\t \n"),
        ("in\ufeffside".encode(), "in\ufeffside"),
    ],
)
def test_a_text_file_is_utf8_without_mark_and_carriage_returns(tmp_path, raw, text):
    (tmp_path / "text.txt").write_bytes(raw)
    assert read_text(tmp_path / "text.txt", "data.path") == text


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "empty"),
        (b"caf\xe9", "not UTF-8 at byte 3 (0xe9)"),
        ("hello".encode("utf-16"), "UTF-16?"),
        ("hello".encode("utf-16-be"), "NUL"),
        (b"abc\0def", "NUL byte at character 3"),
        (b"\xff\xfe", "UTF-16?"),
        (b"trailing \xf0\x9f\x99", "not UTF-8 at byte 9"),
    ],
)
def test_what_is_no_text_is_refused_by_file_and_place(tmp_path, raw, says):
    path = tmp_path / "text.txt"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as refused:
        read_text(path, "data.path")
    assert str(path) in str(refused.value)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["missing.txt", ".", "a" * 300, "text.txt/below", "nul\0byte", "~nobody-here/x"]
)
def test_a_path_without_a_file_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(ConfigError, match="cannot be read"):
        TextFile(path=name).read()


def test_a_file_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", denied)  # a superuser may read everything
    with pytest.raises(ConfigError, match="Permission denied"):
        read_text(tmp_path / "text.txt", "data.path")


def test_a_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text.txt").write_text("hello")
    assert TextFile(path="~/text.txt").read() == "hello"


def test_pydoc_is_all_that_python_says_of_itself():
    text = PyDoc().read()
    assert all(topic.replace("\r", "\n") in text for topic in pydoc_data.topics.topics.values())
    assert len(text) > 200_000


def test_tales_are_written_once_and_read_back_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("minilm.data.ROOT", tmp_path)
    first = Tales(n_bytes=2000)
    text, floor = first.read(), first.floor(100)
    monkeypatch.setattr("minilm.tales.generate", lambda *_: pytest.fail("written again"))
    again = Tales(n_bytes=2000)
    assert again.read() == text
    assert again.floor(100) == floor
    with pytest.raises(pytest.fail.Exception, match="written again"):
        Tales(n_bytes=2000, seed=2).read()


@pytest.mark.parametrize("damage", ["a bit", "cut short", "empty"])
def test_damaged_tales_are_written_anew(tmp_path, monkeypatch, damage):
    monkeypatch.setattr("minilm.data.ROOT", tmp_path)
    first = Tales(n_bytes=2000)
    text = first.read()
    (path,) = tmp_path.rglob("*.npz")
    raw = path.read_bytes()
    middle = len(raw) // 2
    flipped = raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]
    path.write_bytes({"a bit": flipped, "cut short": raw[:-9], "empty": b""}[damage])
    again = Tales(n_bytes=2000)
    with pytest.warns(UserWarning, match="damaged, and made anew"):
        assert again.read() == text
    assert again.floor(0) == first.floor(0)
    assert Tales(n_bytes=2000).read() == text  # and now without a warning


def test_the_floor_of_the_tales_is_that_of_the_validation_text():
    corpus = Tales(n_bytes=2000)
    assert corpus.read() == corpus.made.text
    assert corpus.floor(0) == pytest.approx(corpus.made.nats.sum())
    assert corpus.floor(1000) == pytest.approx(corpus.made.nats[1000:].sum())


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, float("nan")])
def test_a_split_that_leaves_nothing_to_train_on_is_refused(fraction):
    with pytest.raises(ConfigError, match=r"data\.val_fraction"):
        TextFile(path="x", val_fraction=fraction)


# ---- downloads ----

RAW = b"To be, or not to be\n"


@pytest.fixture
def download(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "ROOT", tmp_path)
    sha256 = hashlib.sha256(RAW).hexdigest()
    return Download(url="https://example.org/play.txt", name="play.txt", sha256=sha256, n_bytes=len(RAW))


def serve(monkeypatch, answer):
    """The network answers with these bytes, or fails with this exception."""
    asked = []

    def urlopen(url, timeout):
        asked.append(url)
        if isinstance(answer, Exception):
            raise answer
        return io.BytesIO(answer)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    return asked


def test_a_text_is_downloaded_once(download, monkeypatch, tmp_path):
    asked = serve(monkeypatch, RAW)
    assert download.read() == download.read() == RAW.decode()
    assert asked == [download.url]
    assert [path.name for path in (tmp_path / "data" / "downloads").iterdir()] == ["play.txt"]


@pytest.mark.parametrize("answer", [RAW[:-1], RAW + b"more", b"<html>Please log in</html>", b"", RAW.upper()])
def test_a_wrong_answer_is_refused_and_not_kept(download, monkeypatch, tmp_path, answer):
    serve(monkeypatch, answer)
    with pytest.raises(ConfigError, match=r"play\.txt.*expected 20 bytes"):
        download.read()
    assert list(tmp_path.rglob("*.txt")) == []


@pytest.mark.parametrize(
    "failure",
    [
        urllib.error.URLError("no route to host"),
        urllib.error.HTTPError("https://example.org", 404, "Not Found", None, None),
        TimeoutError("timed out"),
        ConnectionResetError(104, "Connection reset by peer"),
        http.client.IncompleteRead(b"To be"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_without_a_network_the_message_names_the_address_and_the_place(
    download, monkeypatch, tmp_path, failure
):
    serve(monkeypatch, failure)
    with pytest.raises(ConfigError) as refused:
        download.read()
    assert download.url in str(refused.value)
    assert str(tmp_path / "data" / "downloads" / "play.txt") in str(refused.value)


def test_a_file_put_there_by_hand_is_read_without_a_network(download, monkeypatch, tmp_path):
    asked = serve(monkeypatch, urllib.error.URLError("offline"))
    path = tmp_path / "data" / "downloads" / "play.txt"
    path.parent.mkdir(parents=True)
    path.write_bytes(RAW)
    assert download.read() == RAW.decode()
    path.write_bytes(RAW[1:])
    with pytest.raises(ConfigError, match="remove it to fetch it anew"):
        download.read()
    assert asked == []


# ---- the token cache ----


class Counting(Char):
    """A tokenizer that counts how often it is asked for a text."""

    def encode_array(self, text):
        self.asked = getattr(self, "asked", 0) + 1
        return super().encode_array(text)


@dataclass(frozen=True, kw_only=True)
class Given(Text):
    given: str = TEXT

    def read(self):
        return self.given


def test_tokens_are_the_text_split_by_characters(tmp_path):
    for tokenizer in (Char.fit(TEXT), Byte(), BPE.fit(TEXT, vocab_size=300)):
        tokens = Given(val_fraction=0.25).prepare(tokenizer, tmp_path)
        cut = round(len(TEXT) * 0.75)
        assert tokenizer.decode(tokens.train) == TEXT[:cut]
        assert tokenizer.decode(tokens.val) == TEXT[cut:]
        assert tokens.val_bytes == len(TEXT[cut:].encode())


def test_tokens_are_memory_mapped_in_the_smallest_type_that_holds_the_vocabulary(tmp_path):
    class Wide(Byte):
        vocab_size = 70_000

    bpe = BPE.fit(TEXT, vocab_size=300)
    for tokenizer, dtype in [(Char.fit(TEXT), np.uint8), (bpe, np.uint16), (Wide(), np.uint32)]:
        tokens = Given().prepare(tokenizer, tmp_path)
        assert isinstance(tokens.train, np.memmap)
        assert tokens.train.dtype == tokens.val.dtype == dtype


def test_a_text_is_tokenized_once(tmp_path):
    tokenizer = Counting.fit(TEXT)
    first = Given().prepare(tokenizer, tmp_path)
    asked = tokenizer.asked
    again = Given().prepare(tokenizer, tmp_path)
    assert tokenizer.asked == asked
    assert np.array_equal(first.train, again.train)
    assert np.array_equal(first.val, again.val)


def test_another_text_tokenizer_or_split_has_tokens_of_its_own(tmp_path):
    some = TEXT[:1000]
    cases = [
        (Given(given=some), Char.fit(some)),
        (Given(given=some), Byte()),
        (Given(given=some), Char.fit(TEXT)),
        (Given(given=some, val_fraction=0.2), Byte()),
        (Given(given=some[:-1] + "?"), Byte()),
    ]
    for made, (text, tokenizer) in enumerate(cases, start=1):
        text.prepare(tokenizer, tmp_path)
        assert len(list(tmp_path.iterdir())) == made


@pytest.mark.parametrize("damage", ["no facts", "no facts, half the tokens", "no facts, no tokens"])
def test_a_cache_that_was_cut_short_is_made_anew(tmp_path, damage):
    whole = Given().prepare(Byte(), tmp_path)
    train = np.array(whole.train)
    (folder,) = tmp_path.iterdir()
    (folder / "facts.json").unlink()
    if "half" in damage:
        (folder / "train.bin").write_bytes(bytes(10))
    if "no tokens" in damage:
        (folder / "train.bin").unlink()
    assert np.array_equal(Given().prepare(Byte(), tmp_path).train, train)


@pytest.mark.parametrize("damage", ["a bit", "cut short", "another tokenizer's", "no facts at all"])
def test_a_damaged_cache_is_noticed_and_made_anew(tmp_path, damage):
    """Also where the tokens and facts of another tokenizer lie in the place of this one's."""
    whole = np.array(Given().prepare(Byte(), tmp_path).train)
    (folder,) = tmp_path.iterdir()
    raw = (folder / "train.bin").read_bytes()
    if damage == "a bit":
        (folder / "train.bin").write_bytes(raw[:99] + bytes([raw[99] ^ 1]) + raw[100:])
    elif damage == "cut short":
        (folder / "train.bin").write_bytes(raw[:-1])
    elif damage == "no facts at all":
        (folder / "facts.json").write_text("[" * 100_000)
    else:
        Given().prepare(Char.fit(TEXT), tmp_path)
        (other,) = set(tmp_path.iterdir()) - {folder}
        for file in other.iterdir():
            file.replace(folder / file.name)
    with pytest.warns(UserWarning, match="the cached tokens are damaged, and made anew"):
        again = Given().prepare(Byte(), tmp_path)
    assert np.array_equal(again.train, whole)
    assert np.array_equal(Given().prepare(Byte(), tmp_path).train, whole)  # and now without a warning


# ---- small texts ----

BLOCK = 32


@pytest.mark.parametrize("fraction", [0, 0.05, 0.5])
@pytest.mark.parametrize("length", [1, 20, BLOCK, BLOCK + 1, BLOCK + 2, 300, 1000])
def test_a_part_of_the_split_holds_a_window_and_its_targets_or_is_refused(tmp_path, length, fraction):
    tokens = Given(val_fraction=fraction, given=TEXT[:length]).prepare(Byte(), tmp_path)
    short = [
        (name, len(part))
        for name, part in (("training", tokens.train), ("validation", tokens.val))
        if len(part) <= BLOCK and not (name == "validation" and not len(part))
    ]
    if not short:
        tokens.check(BLOCK)
        assert Windows(tokens.train, BLOCK, seed=0).batch(0, 4).shape == (4, BLOCK + 1)
    else:
        name, count = short[0]
        with pytest.raises(ConfigError, match=f"the {name} text has {count} tokens, .*at least {BLOCK + 1}"):
            tokens.check(BLOCK)


def test_a_text_without_validation_part_is_no_mistake(tmp_path):
    tokens = Given(val_fraction=0).prepare(Byte(), tmp_path)
    tokens.check(BLOCK)
    assert len(tokens.train) == len(TEXT.encode())
    assert len(tokens.val) == 0


def test_bits_per_byte_weigh_a_text_by_its_bytes():
    tokens = TokenData(np.zeros(1), np.zeros(50), val_bytes=200, floor=None)
    assert tokens.bits_per_byte(np.log(2)) == pytest.approx(50 / 200)  # a bit a token, a token four bytes


# ---- windows ----


def windows(count, block_size=4, seed=0):
    return Windows(np.arange(count + block_size), block_size, seed)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 97, 1000, 4097])
def test_each_epoch_visits_each_window_once(count):
    order = windows(count).starts(0, 3 * count).reshape(3, count)
    assert (np.sort(order) == np.arange(count)).all()
    if count > 10:
        assert not (order[0] == order[1]).all()
        assert not (order[0] == windows(count, seed=1).starts(0, count)).all()


@pytest.mark.parametrize("length", [5, 6, 7, 100])
def test_n_tokens_hold_n_minus_block_size_windows_and_the_last_token_is_a_target(length):
    order = Windows(np.arange(length), block_size=4, seed=0)
    assert order.counts.tolist() == [length - 4]
    rows = order.batch(0, length - 4)
    assert (np.diff(rows) == 1).all()
    assert sorted(rows[:, 0]) == list(range(length - 4))
    assert rows[:, -1].max() == length - 1


@settings(deadline=None)
@given(
    st.integers(1, 300),
    st.integers(0, 2**63 - 1),
    st.integers(0, 500),
    st.lists(st.integers(1, 9), max_size=9),
)
def test_the_order_depends_on_the_seed_and_the_place_alone(count, seed, first, sizes):
    whole = windows(count, seed=seed).starts(first, sum(sizes) or 1)
    parts, at = [], first
    for size in sizes:
        parts.append(windows(count, seed=seed).starts(at, size))
        at += size
    assert not parts or (np.concatenate(parts) == whole).all()


@given(st.integers(1, 2000), st.tuples(st.integers(0, 2**64), st.integers(0, 2**40)))
def test_a_permutation_is_one(n, key):
    assert (np.sort(permute(np.arange(n), n, key)) == np.arange(n)).all()


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9), st.integers(9, 5000))
def test_shares_are_the_nearest_whole_numbers_that_sum_up(weights, total):
    found = shares(weights, total)
    assert found.sum() == total
    assert (found >= 1).all()
    exact = np.array(weights) / sum(weights) * total
    assert (np.abs(found - exact)[exact >= len(weights)] < len(weights)).all()


def test_a_permutation_is_no_nearly_sorted_one():
    """The mean distance of two neighbours is that of two random places, n / 3."""
    n = 10_000
    order = permute(np.arange(n), n, (0, 0))
    assert abs(np.abs(np.diff(order)).mean() / (n / 3) - 1) < 0.05
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.05
