"""The command line: each choice composes, and a command holds what was said."""

import sys
from pathlib import Path

import hydra
import pytest
from conftest import ROOT
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from minilm.config import Command, script

GROUPS = (
    "model",
    "attention",
    "mask",
    "position",
    "data",
    "tokenizer",
    "optim",
    "schedule",
    "parallel",
    "recipe",
)


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
