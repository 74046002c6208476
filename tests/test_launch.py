"""From a command to a run: its folder, what a resume finds and may change, and refusals that leave nothing behind."""

import copy
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT
from omegaconf import OmegaConf

from minilm import checkpoint, launch, resume, training
from minilm.config import Command
from minilm.errors import ConfigError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder to work in, caches elsewhere, no pictures and no waiting for the disk."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr(launch, "ROOT", tmp_path / "root")
    monkeypatch.setattr(training, "plot_loss", lambda *args, **options: None)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def choice(section, name):
    return OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / section / f"{name}.yaml"))


@pytest.fixture
def command(text_file):
    """command({"train.max_steps": 3}, out_dir=…): what minilm.config makes of a command line."""
    top = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / "train.yaml"))
    groups = {group: name for entry in top["defaults"][:9] for group, name in entry.items()}
    base = {group: choice(group, name) for group, name in groups.items()}
    base |= {key: value for key, value in top.items() if key not in ("defaults", "hydra")}
    base["data"] = choice("data", "file") | {"path": str(text_file)}
    base["model"] |= {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16}
    base["train"] |= {
        "max_steps": 4,
        "batch_size": 2,
        "eval_interval": 2,
        "log_interval": 1,
        "sample_tokens": 3,
    }
    base["schedule"]["warmup"] = 1
    base |= {"threads": 1, "device": "cpu", "precision": "fp32"}

    def make(said=None, *, out_dir="run", default=False, resume=None) -> Command:
        made = copy.deepcopy(base)
        for key, value in (said or {}).items():
            section, _, name = key.rpartition(".")
            (made[section] if section else made)[name] = value
        made |= {"out_dir": out_dir, "resume": resume}
        keys = [*(said or {}), *([] if default else ["out_dir"]), *(["resume"] if resume else [])]
        return Command(made, keys, Path(out_dir), default)

    return make


def steps(run):
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def contents(folder):
    """Every file below a folder, with its bytes."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- folders ----


def test_a_run_leaves_its_configuration_as_plain_yaml(command, here):
    trainer = launch.train(command())
    written = yaml.safe_load((here / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert trainer.run == here / "run"
    assert written["out_dir"] == str(here / "run")
    assert written["model"]["n_embd"] == 16
    assert checkpoint.load("run").config == written


def test_runs_of_the_same_second_have_folders_of_their_own(command, here):
    made = [launch.train(command(out_dir="runs/day/time", default=True)).run for _ in range(3)]
    assert made == [here / "runs" / "day" / name for name in ("time", "time-2", "time-3")]
    assert all(checkpoint.load(run).step == 4 for run in made)


def test_runs_latest_leads_to_the_newest(command, here):
    for name in ("one", "two"):
        launch.train(command(out_dir=name))
        assert (here / "runs" / "latest").resolve() == here / name
    assert not Path((here / "runs" / "latest").readlink()).is_absolute()
    assert [path.name for path in (here / "runs").iterdir()] == ["latest"]


def test_where_no_link_can_be_made_the_run_goes_on(command, here):
    (here / "runs").write_text("a file")
    with pytest.warns(UserWarning, match="runs/latest was not set"):
        launch.train(command())
    assert checkpoint.load("run").step == 4


def test_a_named_folder_that_holds_a_run_is_refused(command, here):
    launch.train(command())
    before = contents(here)
    with pytest.raises(ConfigError, match="out_dir=run holds a run already: say resume=auto"):
        launch.train(command())
    assert contents(here) == before


def test_a_named_folder_that_holds_something_else_is_taken(command, here):
    (here / "run").mkdir()
    (here / "run" / "notes.txt").write_text("mine")
    launch.train(command())
    assert (here / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("out_dir", "default"), [("file", False), ("file/run", False), ("file/run", True), ("x" * 300, True)]
)
def test_a_folder_that_cannot_be_made_is_refused(command, here, out_dir, default):
    (here / "file").write_text("a file")
    with pytest.raises(ConfigError, match=f"out_dir={out_dir}"):
        launch.train(command(out_dir=out_dir, default=default))
    assert [path.name for path in here.iterdir()] == ["file"]


# ---- refusals ----


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seed": "x"}, "seed=x: expected a whole number"),
        ({"out_dir": ""}, "expected the name of a file or folder"),
        ({"schedule.warmup": 5}, "schedule.warmup=5 is longer than the run"),
        ({"precision": "fp16"}, "precision=fp16 needs a CUDA device"),
        ({"device": "cuda:7"}, "device=cuda:7"),
        ({"threads": 0}, "threads=0"),
        ({"compile": "maybe"}, "compile=maybe"),
        ({"train.sample_prompt": "日"}, "train.sample_prompt: "),
        ({"train.keep": 0}, "train.keep=0"),
        ({"optim.betas": [0.9, 1.0]}, "optim.betas"),
        ({"model.n_head": 3}, "model.n_head=3 must divide"),
        ({"model.block_size": 9999}, "model.block_size=9999 needs at least 10000"),
        ({"data.val_fraction": 0.001}, "the validation text has 6 tokens"),
        ({"data.path": "nowhere.txt"}, "data.path=nowhere.txt: cannot be read"),
        ({"mask": {"_target_": "os.system"}}, "mask._target_=os.system"),
        ({"wandb.mode": 1}, "wandb.mode=1: expected"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_refused_is_refused_before_anything_is_written(command, here, said, says):
    made = command(said, out_dir=said.get("out_dir", "run"))
    with pytest.raises(ConfigError) as refused:
        launch.train(made)
    assert says in str(refused.value)
    assert list(here.iterdir()) == []


def test_a_run_of_no_steps_is_a_run(command, here):
    launch.train(command({"train.max_steps": 0, "schedule.warmup": 0}))
    assert checkpoint.load("run").step == 0


def test_the_shortest_validation_text_that_is_taken_has_a_target_behind_every_prefix(command):
    prefix = {"_target_": "minilm.attention.masks.Prefix", "length": 16}  # block_size
    trainer = launch.train(command({"mask": prefix, "data.val_fraction": 17 / 6000}))
    assert len(trainer.data.val) == 17
    assert trainer.val_loss > 0


# ---- resuming ----


def test_auto_goes_on_where_something_was_saved_and_starts_where_nothing_was(command, here):
    launch.train(command(resume="auto"))
    assert steps(here / "run") == [1, 2, 3, 4]
    launch.train(command({"train.max_steps": 6}, resume="auto"))
    assert steps(here / "run") == [1, 2, 3, 4, 5, 6]
    assert checkpoint.load("run").step == 6


def test_auto_starts_anew_where_a_run_died_before_its_first_checkpoint(command, here):
    (here / "run").mkdir()
    (here / "run" / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    (here / "run" / "checkpoints").mkdir()
    launch.train(command(resume="auto"))
    assert steps(here / "run") == [1, 2, 3, 4]


def test_auto_finds_a_checkpoint_whose_link_was_lost(command, here):
    launch.train(command())
    (here / "run" / "checkpoints" / "last").unlink()
    launch.train(command({"train.max_steps": 6}, resume="auto"))
    assert steps(here / "run") == [1, 2, 3, 4, 5, 6]


def test_auto_refuses_a_damaged_checkpoint_instead_of_starting_anew(command, here):
    launch.train(command())
    (here / "run" / "checkpoints" / "last" / "state.pt").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"state\.pt is damaged"):
        launch.train(command(resume="auto"))


def test_auto_needs_a_name(command):
    with pytest.raises(ConfigError, match="resume=auto looks for checkpoints in out_dir: name it"):
        launch.train(command(out_dir="runs/day/time", default=True, resume="auto"))


def test_a_run_or_one_of_its_checkpoints_goes_on_in_its_own_folder(command, here):
    launch.train(command())
    elsewhere = {"out_dir": "runs/day/time", "default": True}
    launch.train(command({"train.max_steps": 6}, resume="run", **elsewhere))
    assert steps(here / "run") == [1, 2, 3, 4, 5, 6]
    launch.train(command({"train.max_steps": 5}, resume="run/checkpoints/step_00000004", **elsewhere))
    assert steps(here / "run") == [1, 2, 3, 4, 5]
    launch.train(command({"train.max_steps": 7}, resume="run", out_dir="run"))
    assert steps(here / "run") == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(path.name for path in here.iterdir()) == ["run", "runs"]


def test_a_resume_into_another_folder_is_refused(command, here):
    launch.train(command())
    with pytest.raises(ConfigError, match=r"out_dir=other: a resumed run goes on in its own folder, .*/run"):
        launch.train(command(resume="run", out_dir="other"))
    shutil.copytree(here / "run" / "checkpoints" / "step_00000004", here / "alone")
    with pytest.raises(ConfigError, match=r"resume=.*alone: not in the checkpoints folder of a run"):
        launch.train(command(resume="alone", out_dir="runs/day/time", default=True))
    assert not (here / "other").exists()


@pytest.mark.parametrize("resume", ["nowhere", "."])
def test_a_resume_from_nothing_is_refused(command, resume):
    with pytest.raises(ConfigError, match=f"no checkpoint at {resume}"):
        launch.train(command(resume=resume, out_dir="runs/day/time", default=True))


MAY = {
    "train.max_steps": 6,
    "train.batch_size": 3,
    "train.grad_clip": None,
    "train.keep": 5,
    "optim.lr": 0.5,
    "optim.weight_decay": 0.0,
    "schedule": {"_target_": "minilm.schedule.Constant", "warmup": 0},
    "schedule.final": 0.5,
    "threads": None,
    "device": "auto",
    "parallel": {"_target_": "minilm.parallel.FSDP", "timeout": 60.0},
    "wandb.project": "other",
}
MAY_NOT = {
    "seed": 7,
    "model.n_layer": 2,
    "model.dropout": 0.5,
    "model.n_kv_head": 1,
    "attention.scale": "none",
    "mask": {"_target_": "minilm.attention.masks.SlidingWindow", "window": 4},
    "position": {"_target_": "minilm.attention.positions.NoPosition"},
    "model.ngrams": [5],
    "data.val_fraction": 0.2,
    "tokenizer": {"_target_": "minilm.tokenizer.Byte"},
}


@pytest.fixture
def resumable(command, here):
    """A finished run of four steps; then resumable({key: value}) goes on with what was said anew."""
    launch.train(command())

    def go_on(said):
        # what is not said is as different as it can be: a resumed run takes it from its checkpoint
        made = command({"model.n_embd": 32, "train.log_interval": 9} | said, default=True, resume="run")
        return launch.train(Command(made.config, [*said, "resume"], made.out_dir, True))

    return go_on


@pytest.mark.parametrize("key", MAY)
def test_a_resumed_run_may_change(resumable, here, key):
    trainer = resumable({key: MAY[key]})
    written = yaml.safe_load((here / "run" / "config.yaml").read_text(encoding="utf-8"))
    section, _, name = key.rpartition(".")
    assert (written[section] if section else written)[name] == MAY[key]
    assert trainer.model.config.n_embd == 16
    assert trainer.config.log_interval == 1
    if key.startswith("optim."):
        assert trainer.optimizers[0].param_groups[0][name] == MAY[key] or name == "lr"
        assert trainer.rates[0][0] == written["optim"]["lr"]


@pytest.mark.parametrize("key", MAY_NOT)
def test_a_resumed_run_may_not_change(resumable, here, key):
    before = contents(here)
    with pytest.raises(ConfigError, match=rf"^{key}[\w.]*=.*: the run to resume has .*cannot change it"):
        resumable({key: MAY_NOT[key]})
    assert contents(here) == before


def test_saying_again_what_the_run_has_is_no_change(resumable):
    assert resumable({"seed": 1, "model.n_embd": 16, "mask": choice("mask", "causal")}).step == 4


def test_another_kind_of_optimizer_is_refused_before_anything_is_written(resumable, here):
    before = contents(here)
    with pytest.raises(ConfigError, match="may change its rates, but not which optimizer"):
        resumable({"optim": choice("optim", "adamw")})
    assert contents(here) == before


def test_another_text_under_the_same_name_is_refused(command, here):
    (here / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    launch.train(command({"data.path": "text.txt"}))
    (here / "text.txt").write_text("the lazy dog jumps over the quick brown fox\n" * 20)
    with pytest.raises(ConfigError, match="the text is not the one that the run to resume was trained on"):
        launch.train(command({"data.path": "text.txt"}, resume="auto"))


@pytest.mark.parametrize("key", ["resume", "init_from"])
def test_a_checkpoint_is_let_go_before_training(command, monkeypatch, key):
    """But for moments, which optimizers take as they are."""
    read, fits = [], []
    load, fit = checkpoint.load, training.Trainer.fit

    def noted(*args, **options):
        saved = load(*args, **options)
        read.extend(weakref.ref(it) for it in (saved, *saved.weights.values()))
        return saved

    def looked_at(trainer):
        kept = {id(v) for o in trainer.optimizers for state in o.state.values() for v in state.values()}
        fits.append([it() for it in read if it() is not None and id(it()) not in kept])
        fit(trainer)

    launch.train(command())
    monkeypatch.setattr(checkpoint, "load", noted)
    monkeypatch.setattr(training.Trainer, "fit", looked_at)
    said = {"train.max_steps": 6, "init_from": "run" if key == "init_from" else None}
    launch.train(
        command(
            said, out_dir="again" if key == "init_from" else "run", resume="run" if key == "resume" else None
        )
    )
    assert len(read) > 5
    assert fits == [[]]


@pytest.mark.parametrize("place", ["/model", "/models/mine", "/checkpoints"])
def test_a_checkpoint_that_lies_in_no_run_cannot_go_on_wherever_it_lies(command, monkeypatch, place):
    saved = checkpoint.Checkpoint(Path(place), 4, {}, {}, {}, {})
    monkeypatch.setattr(checkpoint, "load", lambda folder: saved)
    assert resume._load(saved.path) is saved
    with pytest.raises(ConfigError, match=f"resume={place}: not in the checkpoints folder of a run"):
        resume.folder_of(saved, command(resume=place))


def test_a_recipe_is_compared_as_a_whole(command, here):
    launch.train(command())
    again = command({"train.max_steps": 5}, resume="auto")
    assert launch.train(Command(again.config, ["recipe", "out_dir"], again.out_dir, False)).step == 5
    other = command({"model.n_layer": 2}, resume="auto")
    with pytest.raises(ConfigError, match=r"model\.n_layer=2: the run to resume has 1"):
        launch.train(Command(other.config, ["recipe", "out_dir"], other.out_dir, False))


def test_runs_do_not_depend_on_what_ran_before(command, here):
    """As the jobs of a sweep, one after another in one process."""
    first = launch.train(command(out_dir="one"))
    launch.train(command({"model.dropout": 0.5, "seed": 5}, out_dir="two"))
    torch.manual_seed(99)
    again = launch.train(command(out_dir="three"))
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
