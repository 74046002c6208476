"""Words of the command line: what was typed is what arrives."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from minilm import words
from minilm.errors import ConfigError


def test_flags_may_stand_anywhere():
    assert words.in_order(["a=1", "-m", "b=1,2"]) == ["-m", "a=1", "b=1,2"]
    assert words.in_order(["a=1", "--config-dir", "x", "b=2"]) == ["--config-dir", "x", "a=1", "b=2"]
    for plain in (["-m", "a=1", "b=1,2"], ["a=1", "b=1,2", "-m"], ["--help"], ["--cfg", "job", "a=1"], []):
        assert words.in_order(plain) == plain


def arrives(key, text):
    """The value that Hydra and OmegaConf make of key=text."""
    value = OverridesParser.create().parse_override(words.as_typed(f"{key}={text}")).value()
    return OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=True)["value"]


@settings(deadline=None)  # a busy machine
@given(st.text().filter(lambda text: text[:1] not in ("[", "'", '"') and text != "null"))
@example("Don't stop, é (now)? = {5} ~ #1 \\")
@example("costs ${5}, \\${6} and \\\\${7}\\")
@example("  led and trailed by blanks  ")
@example("1984")
@example("true")
@example("line\nbreak\ttab")
def test_a_prompt_arrives_as_it_was_typed(text):
    assert arrives("prompt", text) == text
    assert arrives("stop", text) == text
    assert arrives("train.sample_prompt", text) == text


@pytest.mark.parametrize(
    ("key", "typed", "value"),
    [
        ("prompt", "[Once,'The end']", ["Once", "The end"]),
        ("prompt", '"Once, or twice"', "Once, or twice"),
        ("prompt", "'Tis the season", "'Tis the season"),
        ("prompt", '"Ah," she said', '"Ah," she said'),
        ("train.sample_prompt", "null", None),
        ("data.path", "my text (2), é.txt", "my text (2), é.txt"),
        ("data.path", "~/text.txt", "~/text.txt"),
        ("data.path", "it's.txt", "it's.txt"),
        ("seed", "3", 3),
        ("optim.lr", "1e-4", 1e-4),
        ("optim.betas", "[0.9,0.95]", [0.9, 0.95]),
        ("train.grad_clip", "null", None),
        ("compile", "true", True),
        ("attention.scale", "none", "none"),
    ],
)
def test_other_values_are_read_by_hydra_unless_it_cannot(key, typed, value):
    assert arrives(key, typed) == value


@pytest.mark.parametrize("typed", ["prompt=naïve 日本 🙂", "stop=é", "train.sample_prompt=Été"])
def test_a_text_arrives_in_a_locale_that_does_not_know_it(typed):
    escaped = typed.encode().decode(
        "ascii", errors="surrogateescape"
    )  # as Python does in LC_ALL=C PYTHONUTF8=0
    assert words.in_utf8(escaped) == words.in_utf8(typed) == typed


@pytest.mark.parametrize(
    ("argument", "says"),
    [("data.path=\udcc3\udca9.txt", "set PYTHONUTF8=1"), ("prompt=caf\udce9", "not UTF-8")],
)
def test_a_path_or_bytes_that_no_locale_knows_are_refused(argument, says):
    with pytest.raises(ConfigError, match=says):
        words.in_utf8(argument)


def test_sweeps_stay_sweeps():
    for argument in ("seed=1,2", "seed=range(1,4)", "~seed", "--help", "-m", "seed"):
        assert words.as_typed(argument) == argument
