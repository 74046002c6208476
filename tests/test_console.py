import io
import sys
import time

import pytest

from minilm import console as consoles
from minilm.console import Console, short


class Terminal(io.TextIOWrapper):
    """A stream that says it is a terminal."""

    def __init__(self, encoding="utf-8"):
        super().__init__(io.BytesIO(), encoding=encoding, newline="")

    def isatty(self):
        return True

    def shown(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


def terminal(monkeypatch, encoding="utf-8"):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal(encoding)


def plain(encoding="utf-8"):
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")


NASTY = ["[bold]x[/bold]", "[/]", "[red", ":smile:", "\\[x]", "{0} %s", "", "a\n\nb", "<b>&"]


@pytest.mark.parametrize("text", NASTY)
def test_text_appears_as_it_is(monkeypatch, text):
    for stream in (terminal(monkeypatch), plain()):
        with Console(10, stream=stream) as console:
            console.say(text)
            console.sample(3, text)
        stream.flush()
        shown = stream.buffer.getvalue().decode()
        for line in text.split("\n"):
            assert shown.count(line) >= 2
        assert "sample at step 3" in shown


def test_control_characters_are_shown_not_obeyed(monkeypatch):
    stream = terminal(monkeypatch)
    with Console(10, stream=stream) as console:
        console.sample(1, "a\x1b]0;title\x07b\rc\x9b2Jd\x7f")
    assert "a␛]0;title␇b␍c\\x9b2Jd␡" in stream.shown()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_no_text_crashes_any_encoding(monkeypatch, encoding):
    for stream in (terminal(monkeypatch, encoding), plain(encoding)):
        with Console(10, stream=stream) as console:
            console.say("é 日本 🙂 \ud800 \x00")
            console.sample(1, "é 日本 🙂")
            console.table([("é", "日")])
            console.progress(5, loss=1.0, tokens_per_second=1e4)
        stream.flush()
        shown = stream.buffer.getvalue().decode(encoding)
        assert ("日本" if encoding == "utf-8" else "\\u65e5\\u672c") in shown


def test_plain_lines_come_now_and_then_and_at_the_end(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stream = plain()
    with Console(100, start=20, stream=stream) as console:
        for step in range(21, 101):
            clock[0] += 1.0
            console.progress(step, loss=step / 10, tokens_per_second=12345.0)
    lines = stream.buffer.getvalue().decode().splitlines()
    assert lines[0] == "step 21/100  loss 2.1000  12.3 k tokens/s  0:01:19 left"
    assert lines[1] == "step 26/100  loss 2.6000  12.3 k tokens/s  0:01:14 left"
    assert lines[-1] == "step 100/100  loss 10.0000  12.3 k tokens/s  0:00:00 left"
    assert len(lines) == 17
    assert "\x1b" not in "".join(lines)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    stream = terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    with Console(2, stream=stream) as console:
        console.progress(2, loss=float("nan"), tokens_per_second=500)
    assert stream.shown() == "step 2/2  loss nan  500 tokens/s  0:00:00 left\n"


def test_the_bar_is_live_below_the_text(monkeypatch):
    monkeypatch.setattr(consoles, "REDRAW_SECONDS", 0.0)
    stream = terminal(monkeypatch)
    with Console(10, stream=stream) as console:
        console.progress(5, loss=2.5, tokens_per_second=1000)
        console.say("in between")
        console.progress(6, loss=2.25, tokens_per_second=1000)
    shown = stream.shown()
    assert shown.index("loss 2.5000") < shown.index("in between") < shown.index("loss 2.2500")
    assert " 6/10" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is given back


def test_the_terminal_is_given_back_after_ctrl_c(monkeypatch):
    stream, out, err = terminal(monkeypatch), sys.stdout, sys.stderr
    with pytest.raises(KeyboardInterrupt), Console(10, stream=stream):
        raise KeyboardInterrupt
    assert (sys.stdout, sys.stderr) == (out, err)
    assert stream.shown().rstrip().endswith("\x1b[?25h")


def test_text_needs_no_with_block():
    stream = plain()
    Console(1, stream=stream).table([("model", "micro"), ("parameters", "0.8M")])
    assert stream.buffer.getvalue().decode() == "model       micro\nparameters  0.8M\n"


def test_progress_at_every_step_costs_nothing_to_speak_of(monkeypatch):
    with Console(10**9, stream=terminal(monkeypatch)) as console:
        console.progress(1, loss=1.0, tokens_per_second=1.0)
        began = time.perf_counter()
        for step in range(2, 1002):
            console.progress(step, loss=1.0, tokens_per_second=1.0)
        assert (time.perf_counter() - began) / 1000 < 2e-4


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (7.25, "7.25"),
        (999, "999"),
        (1234567, "1.23 M"),
        (2e9, "2 G"),
        (2.5e12, "2.5 T"),
        (float("nan"), "nan"),
    ],
)
def test_short_numbers(number, text):
    assert short(number) == text
