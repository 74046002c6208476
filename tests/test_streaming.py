"""Laws of showing text while it is generated; Python's own codecs are the reference."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minilm.errors import ConfigError
from minilm.streaming import TextStream, write
from minilm.tokenizer import BPE, END_OF_TEXT, GPT2_PATTERN, Byte

TEXT = "🙂 日本 é"


class Pieces:
    """A stand-in for a tokenizer: token i is the i-th piece."""

    end_token = None

    def __init__(self, *pieces):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def decode_bytes(self, ids):
        return b"".join(self.pieces[i] for i in ids)


def stream_pieces(pieces, stop=()):
    """The shown pieces, the last of them from close, and whether a stop string was met."""
    stream = TextStream(Pieces(*pieces), stop)
    shown, met = [stream.push(i) for i in range(len(pieces))], stream.finished
    return [*shown, stream.close()], met


def cut(text, stops):
    """What is left of a text that is read a character at a time until it ends in a stop string."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[:end].removesuffix(stop), True
    return text, False


# Characters


def test_a_character_appears_whole_when_its_last_byte_arrives():
    stream = TextStream(Byte())
    assert [stream.push(b) for b in "🙂é".encode()] == ["", "", "", "🙂", "", "é"]
    assert stream.close() == ""


@given(st.binary(max_size=40))
def test_pieces_joined_are_the_whole_decoded_at_once(data):
    shown, _ = stream_pieces([bytes([b]) for b in data])
    assert "".join(shown) == data.decode(errors="replace")


@given(st.lists(st.one_of(st.binary(min_size=1, max_size=4), st.text(min_size=1, max_size=4))))
def test_pieces_joined_are_the_whole_however_it_is_cut(pieces):
    shown, _ = stream_pieces(pieces)
    assert "".join(shown) == Pieces(*pieces).decode_bytes(range(len(pieces))).decode(errors="replace")


def test_a_cut_inside_a_character_is_flushed_once_at_the_end():
    stream = TextStream(Byte())
    assert stream.push("🙂".encode()[0]) == ""
    assert [stream.close(), stream.close()] == ["\ufffd", ""]
    assert stream.finished


@pytest.mark.parametrize("invalid", [0xFF, 0x80, 0xF0])
def test_a_lone_invalid_byte_does_not_hold_up_the_stream(invalid):
    stream = TextStream(Byte())
    shown = [stream.push(b) for b in [invalid, *b"a" * 100]]
    assert "".join(shown) == "\ufffd" + "a" * 100
    assert shown[2:] == ["a"] * 99
    assert stream.close() == ""


def test_a_trained_tokenizer_streams_its_own_text():
    tokenizer = BPE.fit(TEXT * 3, vocab_size=262)
    stream = TextStream(tokenizer)
    assert "".join([*map(stream.push, tokenizer.encode(TEXT)), stream.close()]) == TEXT


# Stops


@pytest.mark.parametrize(
    ("pieces", "stop", "expected", "met"),
    [
        (["a", "\n", "\n", "b"], ["\n\n"], ["a", "", "", "", ""], "\n\n"),  # split over two tokens
        (["a", "b\n\nc"], ["\n\n"], ["a", "b", ""], "\n\n"),  # a token with the stop and more
        (["a\n", "b"], ["\n\n"], ["a", "\nb", ""], None),  # held back, then released
        (["a\n"], ["\n\n"], ["a", "\n"], None),  # held back to the end
        (["aab", "x"], ["aab"], ["", "", ""], "aab"),
        (["aa", "ab"], ["aab"], ["", "a", ""], "aab"),  # the held part starts anew
        (["one two"], ["two", "one"], ["", ""], "one"),  # the earliest in the text
        (["ab", "c"], ["abc", "bc"], ["", "", ""], "abc"),  # complete at once: the longest
        (["abcd"], ["bcd", "c"], ["ab", ""], "c"),  # the first complete
        (["ab", "c"], "abc", ["", "", ""], "abc"),  # one string alone is one stop
        (["é".encode()[:1], "é".encode()[1:]], ["é"], ["", "", ""], "é"),
        ([b"a\n\n" + "é".encode()[:1]], ["\n\n"], ["a", ""], "\n\n"),
    ],
)
def test_the_text_ends_before_the_first_stop_string(pieces, stop, expected, met):
    assert stream_pieces(pieces, stop) == (expected, met is not None)


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stopping_does_not_depend_on_how_the_text_is_cut_into_tokens(pieces, stops):
    text = "".join(pieces)
    for cutting in (pieces, list(text), [text]):
        shown, met = stream_pieces(cutting, stops)
        assert ("".join(shown), met) == cut(text, stops)


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_only_what_a_stop_string_may_claim_is_held_back(pieces, stops):
    stream, text, shown = TextStream(Pieces(*pieces), stops), "", ""
    for i, piece in enumerate(pieces):
        text, shown = text + piece, shown + stream.push(i)
        if stream.finished:
            break
        held = text.removeprefix(shown)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_the_end_token_ends_and_writes_nothing():
    tokenizer = BPE(GPT2_PATTERN, [bytes([b]) for b in range(256)], {END_OF_TEXT: 256})
    stream = TextStream(tokenizer, stop=["\n\n"])
    assert [stream.push(b) for b in b"a\n"] == ["a", ""]
    assert stream.push(256) == ""
    assert stream.finished
    assert stream.push(ord("b")) == ""
    assert [stream.close(), stream.close()] == ["\n", ""]


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [3]])
def test_an_empty_stop_string_is_refused(stop):
    with pytest.raises(ConfigError, match=r"^stop="):
        TextStream(Byte(), stop)


# The console


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("utf-8", "é 🙂\n"), ("cp1252", "é \\U0001f642\n"), ("ascii", "\\xe9 \\U0001f642\n")],
)
def test_a_console_that_lacks_a_character_shows_an_escape(encoding, expected):
    raw = io.BytesIO()
    console = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    write(console, "é 🙂\n")
    assert raw.getvalue().decode(encoding) == expected  # flushed too


def test_half_a_surrogate_pair_does_not_break_the_console():
    raw = io.BytesIO()
    console = io.TextIOWrapper(raw, encoding="utf-8")
    write(console, "a\udcff")
    assert raw.getvalue() == b"a\\udcff"


def test_text_is_written_as_it_is_where_there_is_no_encoding():
    out = io.StringIO()
    write(out, TEXT)
    assert out.getvalue() == TEXT
