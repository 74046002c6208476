"""The command line: what was typed is what arrives, each choice composes, and what nobody declared is refused."""

import sys
from pathlib import Path

import hydra
import pytest
from conftest import ROOT
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from minilm import config
from minilm.config import Command, script
from minilm.errors import ConfigError

GROUPS = ("model", "attention", "mask", "position", "data", "tokenizer", "optim", "schedule", "recipe")


def compose(name, *overrides):
    """The composed configuration as plain data."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return OmegaConf.to_container(hydra.compose(name, overrides=list(overrides)))


@pytest.fixture
def command(monkeypatch, tmp_path):
    """command(*arguments): what scripts/train.py, or another of its kind, is given to do."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, name="train") -> list[Command]:
        given: list[Command] = []
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        GlobalHydra.instance().clear()
        script(name)(given.append)()
        return given

    return run


# ---- every choice ----


def test_every_choice_of_every_group_composes():
    choices = {
        group: sorted(path.stem for path in (ROOT / "configs" / group).glob("*.yaml")) for group in GROUPS
    }
    assert all(choices.values())
    for i in range(max(map(len, choices.values()))):
        chosen = {group: names[i % len(names)] for group, names in choices.items() if group != "recipe"}
        made = compose("train", *(f"{group}={name}" for group, name in chosen.items()))
        for group in set(GROUPS) - {"recipe"}:
            alone = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / group / f"{chosen[group]}.yaml"))
            assert made[group] == alone, f"{group}={chosen[group]}"
    for name in choices["recipe"]:
        assert set(compose("train", f"recipe={name}")) == set(compose("train"))


def test_a_recipe_wins_over_train_yaml_and_the_command_line_over_both():
    made = compose("train", "recipe=nanogpt_char_cpu", "train.batch_size=7")
    assert made["optim"]["_target_"] == "minilm.optim.AdamW"
    assert made["model"]["block_size"] == 64
    assert made["train"]["max_steps"] == 2000
    assert made["train"]["batch_size"] == 7
    assert compose("train")["train"]["max_steps"] != 2000


def test_numbers_with_an_exponent_are_numbers_wherever_they_stand(command, tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\noptim: {lr: 1e-4, weight_decay: 2E-1}\n"
    )
    (made,) = command("--config-dir", str(tmp_path), "recipe=mine", "optim.eps=1e-7")
    assert (made.config["optim"]["lr"], made.config["optim"]["weight_decay"]) == (1e-4, 0.2)
    assert made.config["optim"]["eps"] == 1e-7


# ---- what a command holds ----


def test_a_command_knows_what_was_said_and_where_to_write(command, tmp_path):
    (made,) = command("seed=3", "optim=adamw", "++train.max_steps=5", "out_dir=here")
    assert made.said == ["seed", "optim", "train.max_steps", "out_dir"]
    assert made.out_dir == Path("here")
    assert not made.default_out_dir
    assert made.config["train"]["max_steps"] == 5
    assert "hydra" not in made.config
    assert list(tmp_path.iterdir()) == []


def test_by_default_a_run_lies_under_its_date(command):
    (made,) = command()
    assert made.said == []
    assert made.default_out_dir
    assert made.out_dir.parts[0] == "runs"
    assert str(made.out_dir) == made.config["out_dir"]


def test_a_sweep_is_a_command_for_each_job_in_a_folder_of_its_own(command, tmp_path):
    given = command("seed=1,2", "out_dir=sweep", "-m", "mask=causal,none")
    assert [(c.config["seed"], c.config["mask"]["_target_"].rpartition(".")[2]) for c in given] == [
        (1, "Causal"),
        (1, "Full"),
        (2, "Causal"),
        (2, "Full"),
    ]
    assert [c.out_dir.relative_to(tmp_path) if c.out_dir.is_absolute() else c.out_dir for c in given] == [
        Path("sweep") / str(i) for i in range(4)
    ]
    assert not any(c.default_out_dir for c in given)


def test_flags_may_stand_anywhere():
    assert config._in_order(["a=1", "-m", "b=1,2"]) == ["-m", "a=1", "b=1,2"]
    assert config._in_order(["a=1", "--config-dir", "x", "b=2"]) == ["--config-dir", "x", "a=1", "b=2"]
    for plain in (["-m", "a=1", "b=1,2"], ["a=1", "b=1,2", "-m"], ["--help"], ["--cfg", "job", "a=1"], []):
        assert config._in_order(plain) == plain


# ---- what was typed is what arrives ----


def arrives(key, text):
    """The value that Hydra and OmegaConf make of key=text."""
    value = OverridesParser.create().parse_override(config.as_typed(f"{key}={text}")).value()
    return OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=True)["value"]


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
    assert config._in_utf8(escaped) == config._in_utf8(typed) == typed


@pytest.mark.parametrize(
    ("argument", "says"),
    [("data.path=\udcc3\udca9.txt", "set PYTHONUTF8=1"), ("prompt=caf\udce9", "not UTF-8")],
)
def test_a_path_or_bytes_that_no_locale_knows_are_refused(argument, says):
    with pytest.raises(ConfigError, match=says):
        config._in_utf8(argument)


def test_sweeps_stay_sweeps():
    for argument in ("seed=1,2", "seed=range(1,4)", "~seed", "--help", "-m", "seed"):
        assert config.as_typed(argument) == argument


# ---- suggestions ----

KNOWN = [
    "seed",
    "optim.lr",
    "optim.betas",
    "optim",
    "train.max_steps",
    "train.keep",
    "train",
    "model.n_layer",
    "model",
]


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("sed", "did you mean seed?"),
        ("lr", "did you mean optim.lr?"),
        ("train.lr", "did you mean optim.lr?"),
        ("train.max_step", "did you mean train.max_steps?"),
        ("n_layers", "did you mean model.n_layer?"),
        ("modle.n_layer", "did you mean model.n_layer?"),
        ("train.zzz", "train has train.max_steps, train.keep"),
        ("zzz", "the top level has seed, optim, train, model"),
        ("zzz.qqq", "there are seed, optim, train, model"),
        ("mask.window", "only mask=sliding has it"),
        ("tokenizer.vocab_size", "only tokenizer=bpe has it"),
    ],
)
def test_a_misspelt_key_is_told_the_nearest(key, says):
    assert config._nearest(key, KNOWN, config._groups("train")) == says


def test_ctrl_c_is_no_fault_of_ours(capsys):
    with pytest.raises(SystemExit) as stop, config.mistakes_in_one_line("train", "train"):
        raise KeyboardInterrupt
    assert stop.value.code == 130
    assert capsys.readouterr().err == "train: interrupted\n"


def test_a_mistake_is_one_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as stop, config.mistakes_in_one_line("train", "train"):
        raise ConfigError("data.path=x:\n  no such   file")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "train: data.path=x: no such file\n"


def test_a_fault_of_ours_is_not_hidden():
    with pytest.raises(ZeroDivisionError), config.mistakes_in_one_line("train", "train"):
        raise ZeroDivisionError
