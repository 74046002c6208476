"""What generate.py prints, where prompts come from, and that nothing is printed before a refusal."""

import io
import sys

import pytest

from minilm.errors import ConfigError
from minilm.generation import Speed
from minilm.say import GenerateConfig, closing_line, read_prompts, say

DEFAULTS = {
    "checkpoint": "runs/latest",
    "prompt": "",
    "prompt_file": None,
    "samples": 1,
    "max_new_tokens": 12,
    "temperature": 0.8,
    "top_k": 50,
    "top_p": None,
    "min_p": None,
    "repetition_penalty": 1.0,
    "stop": [],
    "seed": 1,
    "cache": True,
    "overflow": "slide",
    "keep": 0.5,
    "device": "cpu",
    "precision": "fp32",
    "threads": 1,
    "compile": False,
}


@pytest.fixture
def said(tiny_run, capsys):
    """said(key=value, …): the text that a small model writes, and the closing line."""

    def run(**changes) -> tuple[str, str]:
        say(DEFAULTS | {"checkpoint": str(tiny_run[0])} | changes)
        return capsys.readouterr()

    return run


def prompts(**changes):
    return read_prompts(GenerateConfig(**DEFAULTS | changes))


def test_one_text_is_the_prompt_and_what_follows(said):
    out, err = said(prompt="Assignment")
    assert out.startswith("Assignment")
    assert out.endswith("\n")
    assert len(out) == len("Assignment") + 12 + 1
    assert "step_00000020; prefill 10 tokens" in err
    assert "decode 11 tokens" in err
    assert "cache" in err


def test_several_texts_are_set_apart(said):
    out, _ = said(prompt=["Assign", "The statement"], samples=2)
    texts = out.removesuffix("\n").split("\n---\n")
    assert [
        text[: len(start)] for text, start in zip(texts, ["Assign"] * 2 + ["The statement"] * 2, strict=True)
    ] == [
        "Assign",
        "Assign",
        "The statement",
        "The statement",
    ]
    assert texts[0] != texts[1]


def test_the_cache_changes_nothing_but_the_time(said):
    for options in ({}, {"temperature": 0.0}, {"max_new_tokens": 50, "prompt": ["As", "signment"]}):
        assert said(**options)[0] == said(**options, cache=False)[0]


def test_a_stop_string_may_hold_a_line_end_as_a_shell_passes_it(said):
    out, _ = said(max_new_tokens=60)
    assert "\n" in out[1:-1]
    before = out[: out.index("\n")]
    assert said(max_new_tokens=60, stop="\\n")[0] == said(max_new_tokens=60, stop=["\n"])[0] == before + "\n"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"samples": 0}, "samples=0"),
        ({"seed": -1}, "seed=-1"),
        ({"prompt": "café 日"}, "'日' (U+65E5)"),
        ({"prompt": ["As", "日"]}, "'日' (U+65E5)"),
        ({"prompt": []}, "prompt=[]: give at least one prompt"),
        ({"prompt": "a", "prompt_file": "x"}, "prompt and prompt_file are both given"),
        ({"prompt_file": "missing.txt"}, "prompt_file=missing.txt: cannot be read"),
        ({"prompt": "As", "overflow": "error", "max_new_tokens": 99}, "block_size=16"),
        ({"prompt": "As", "stop": [""]}, "stop="),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"checkpoint": "nowhere"}, "no checkpoint at nowhere"),
        ({"top_k": 1.5}, "top_k=1.5: expected a whole number or null"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ],
    ids=str,
)
def test_what_is_refused_is_refused_before_anything_is_printed(said, capsys, changes, says):
    with pytest.raises(ConfigError) as refused:
        said(**changes)
    assert says in str(refused.value)
    assert capsys.readouterr().out == ""


# ---- prompts ----


def test_line_ends_become_lf_as_in_a_training_text(tmp_path):
    assert prompts(prompt="a\r\nb\rc") == ["a\nb\nc"]
    assert prompts(prompt=["a\r\n", "b"]) == ["a\n", "b"]
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfOnce\r\n")
    assert prompts(prompt_file=str(tmp_path / "prompt.txt")) == ["Once\n"]


def test_a_prompt_may_come_from_standard_input(monkeypatch):
    def typed(raw):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="latin-1"))
        return prompts(prompt="-")

    assert typed("Été\r\n".encode()) == ["Été\n"]
    assert typed(b"\xef\xbb\xbfOnce") == ["Once"]
    assert typed(b"") == [""]
    with pytest.raises(ConfigError, match="prompt=-: standard input is not UTF-8 at byte 3"):
        typed(b"caf\xe9")


def test_the_closing_line_says_what_was_measured(tmp_path):
    speed = Speed(
        prefill_tokens=1000, prefill_seconds=0.5, decode_tokens=10, decode_seconds=2.0, cache_bytes=3 << 20
    )
    assert closing_line(tmp_path, speed) == (
        f"{tmp_path}; prefill 1000 tokens, 2,000 tokens/s; decode 10 tokens, 5 tokens/s; cache 3.00 MiB"
    )
    assert closing_line(tmp_path, Speed()) == str(tmp_path)
