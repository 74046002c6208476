"""init_from: a run that begins with another's weights, what may be said otherwise, and what is refused."""

import copy

import pytest
import torch
import yaml
from test_launch import choice, command, contents, here  # noqa: F401 (fixtures)

from minilm import checkpoint, launch
from minilm.config import Command
from minilm.errors import ConfigError
from minilm.finetune import with_vocab_size

# ruff: noqa: F811


@pytest.fixture
def finetune(command, here):
    """finetune(said, …): a run of four steps, then a new one with its weights. recipe: what a recipe says there."""

    def start(said=None, position="rope", steps=0, recipe=None, **more):
        if not (here / "first").exists():
            launch.train(command({"position": choice("position", position)}, out_dir="first"))
        # what is not said is as different as it can be: the weights bring it along
        made = command(
            {"model.n_embd": 32, "attention.qk_norm": False} | (recipe or {}) | (said or {}),
            out_dir="second",
            **more,
        )
        config = copy.deepcopy(made.config) | {"init_from": "first"}
        config["train"]["max_steps"], config["schedule"]["warmup"] = steps, 0
        words = [*(said or {}), "init_from", "out_dir"]
        words += ["resume"] * bool(more.get("resume")) + ["recipe"] * (recipe is not None)
        return launch.train(Command(config, words, made.out_dir, False))

    return start


def test_a_run_begins_with_the_weights_the_shape_and_the_tokenizer_of_another(finetune, here):
    trainer = finetune({"tokenizer": choice("tokenizer", "char")})
    first, second = checkpoint.load("first"), checkpoint.load("second")
    assert (first.step, second.step) == (4, 0)
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    assert second.tokenizer == first.tokenizer
    for section in ("model", "attention", "mask", "position", "tokenizer"):
        assert second.config[section] == first.config[section]
    assert trainer.model.config.n_embd == 16
    written = yaml.safe_load((here / "second" / "config.yaml").read_text())
    assert written["init_from"] == str(here / "first" / "checkpoints" / "step_00000004")


def test_it_trains_and_can_be_resumed(finetune, command, here):
    launch.train(command(out_dir="first"))
    before = contents(here / "first")
    finetune(steps=3)
    config = command(resume="second").config
    config["train"]["max_steps"] = 5
    trainer = launch.train(Command(config, ["train.max_steps", "resume"], here / "second", True))
    assert (trainer.step, trainer.model.config.n_embd) == (5, 16)
    first, second = checkpoint.load("first"), checkpoint.load("second")
    assert all(not torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    assert contents(here / "first") == before


@pytest.mark.parametrize("position", ["rope", "none", "alibi", "sinusoidal"])
def test_positions_that_are_not_learned_take_any_context(finetune, position):
    assert finetune({"model.block_size": 24}, position).model.config.block_size == 24


def test_learned_positions_are_cut(finetune):
    trainer = finetune({"model.block_size": 12}, "learned")
    table = checkpoint.load("first").weights["position.table.weight"]
    assert torch.equal(trainer.model.position.table.weight, table[:12])
    assert trainer.model.config.block_size == 12


def test_learned_positions_do_not_grow(finetune, here):
    with pytest.raises(
        ConfigError, match=r"model.block_size=24: .*step_00000004 has learned positions for 16 tokens"
    ):
        finetune({"model.block_size": 24}, "learned")
    assert not (here / "second").exists()


@pytest.mark.parametrize(
    "said",
    [
        {"model.dropout": 0.5},
        {"attention.dropout": 0.5},
        {"attention.backend": "reference"},
        {"mask": {"_target_": "minilm.attention.masks.SlidingWindow", "window": 4}},
        {"position.base": 500.0},
    ],
    ids=str,
)
def test_what_no_weight_depends_on_may_be_said_otherwise(finetune, said):
    config = finetune(said).settings
    for key, value in said.items():
        section, _, name = key.partition(".")
        assert (config[section][name] if name else config[section]) == value


@pytest.mark.parametrize(
    "said",
    [
        {"model.n_layer": 2},
        {"model.mlp": "gelu"},
        {"model.tie_embeddings": True},
        {"attention.scale": "none"},
        {"attention.qk_norm": False},
        {"position": {"_target_": "minilm.attention.positions.NoPosition"}},
        {"position": {"_target_": "minilm.attention.positions.Rotary", "base": 500.0}},
        {"tokenizer": {"_target_": "minilm.tokenizer.Byte"}},
    ],
    ids=str,
)
def test_what_the_weights_do_not_fit_is_refused_by_its_key(finetune, here, said):
    with pytest.raises(ConfigError, match=rf"^{next(iter(said))}[\w.]*=.*: first has .*leave it out"):
        finetune(said)
    assert not (here / "second").exists()


def test_a_recipe_changes_nothing_of_what_comes_with_the_weights(finetune):
    """The fixture's configuration differs in n_embd and qk_norm, as a recipe may make it; so do these."""
    from_recipe = {"model.block_size": 12, "model.dropout": 0.5, "position.base": 500.0}
    from_recipe |= {"mask": {"_target_": "minilm.attention.masks.SlidingWindow", "window": 4}}
    from_recipe |= {"tokenizer": choice("tokenizer", "byte"), "train.batch_size": 3, "optim.lr": 0.125}
    trainer = finetune(recipe=from_recipe)
    first = checkpoint.load("first")
    for section in ("model", "attention", "mask", "position", "tokenizer"):
        assert trainer.settings[section] == first.config[section]
    assert (trainer.settings["train"]["batch_size"], trainer.settings["optim"]["lr"]) == (3, 0.125)


def test_what_is_said_beside_a_recipe_counts(finetune):
    trainer = finetune({"model.block_size": 12}, recipe={"model.dropout": 0.5})
    assert (trainer.settings["model"]["block_size"], trainer.settings["model"]["dropout"]) == (12, 0.0)


def test_a_recipe_is_no_excuse_for_what_the_weights_do_not_fit(finetune):
    with pytest.raises(ConfigError, match=r"^model.n_layer=2: .*leave it out"):
        finetune({"model.n_layer": 2}, recipe={"model.dropout": 0.5})


def test_a_resume_cannot_begin_with_other_weights(finetune, here):
    with pytest.raises(ConfigError, match=r"resume=first and init_from=first: .*say one of them"):
        finetune(resume="first")
    assert not (here / "second").exists()


def test_the_same_line_with_resume_auto_begins_and_goes_on(finetune, here):
    begun = finetune(steps=2, resume="auto")
    assert begun.step == 2
    weights = checkpoint.load("second").weights
    (here / "first").rename(here / "gone")  # the weights are needed no more
    (here / "first").mkdir()
    again = finetune(steps=2, resume="auto")
    assert (again.step, again.model.config.n_embd) == (2, 16)
    assert all(torch.equal(again.model.state_dict()[name], weights[name]) for name in weights)
    assert finetune(steps=3, said={"train.max_steps": 3}, resume="auto").step == 3


def test_so_does_one_with_a_recipe(finetune, here):
    recipe = {
        "model.block_size": 12,
        "mask": {"_target_": "minilm.attention.masks.SlidingWindow", "window": 4},
    }
    finetune(steps=2, recipe=recipe, resume="auto")
    again = finetune(steps=2, recipe=recipe, resume="auto")
    assert (again.step, again.model.config.block_size) == (2, 16)
    written = yaml.safe_load((here / "second" / "config.yaml").read_text())
    assert written["init_from"] == str(checkpoint.find("first"))


def test_plans_and_benches_have_the_shape_of_a_run_that_goes_on_too(finetune, here):
    made = finetune(steps=2, resume="auto")
    settings = made.settings | {"model": {}, "init_from": "first", "resume": "auto", "vocab_size": None}
    found = with_vocab_size(Command(settings, ["init_from", "resume"], here / "second", False))
    assert found["model"] == made.settings["model"]
    assert found["vocab_size"] == made.model.config.vocab_size


def test_weights_without_a_run_are_no_run_to_go_on_with(finetune, command, here):
    finetune()
    folder = checkpoint.find("second")
    sums = (folder / "checksums.json").read_text().replace('"state.pt"', '"gone"')
    (folder / "checksums.json").write_text(sums)
    (folder / "state.pt").unlink()
    with pytest.raises(
        ConfigError, match=r"no state.pt of a run to go on with; init_from=second begins another"
    ):
        launch.train(command(resume="second"))


def test_text_that_the_tokenizer_does_not_know_is_refused(finetune, here):
    (here / "other.txt").write_text("Ж" * 400)
    with pytest.raises(ConfigError, match=r"tokenizer=char: 'Ж' \(U\+0416\) not among"):
        finetune({"data.path": "other.txt"})
    assert not (here / "second").exists()
