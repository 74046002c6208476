import collections
import enum
import json
import os
import pickle
import tracemalloc

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from torch import nn

from minilm import checkpoint as checkpoints
from minilm.bench.measure import peak_bytes
from minilm.checkpoint import FILES, SUMS, clean_keys, find, load
from minilm.errors import ConfigError

CONFIG = {
    "model": {"n_layer": 2, "dropout": 0.1},
    "optim": {"lr": 1e-5, "betas": [0.9, 0.95]},
    "text": "é: [x]",
}
TOKENIZER = {"kind": "char", "characters": ["a", "\n", "日", '"']}


pytestmark = pytest.mark.usefixtures("quick_disk")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def values(step):
    """State such as a run has: moments, a random state, plain numbers, nested."""
    return {
        "step": step,
        "optimizer": {
            "state": {0: {"exp_avg": torch.full((3,), float(step))}},
            "param_groups": [{"betas": (0.9, 0.95)}],
        },
        "rng": {"torch": torch.get_rng_state(), "python": (3, (1, 2**63, 2**80), None)},
        "best": float("inf"),
        "scaler": collections.OrderedDict(scale=65536.0),
        "name": None,
        "on": True,
    }


def save(run, step, **options):
    given = {"weights": {"w": torch.full((2, 3), float(step))}, "state": values(step)}
    return checkpoints.save(run, step, config=CONFIG, tokenizer=TOKENIZER, **(given | options))


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def assert_holds(saved, step):
    assert saved.step == saved.state["step"] == step
    assert (saved.weights["w"] == step).all()
    assert saved.config == CONFIG
    assert saved.tokenizer == TOKENIZER


# ---- what is saved comes back ----


def test_everything_comes_back(tmp_path):
    path = save(tmp_path, 500)
    assert path == tmp_path / "checkpoints" / "step_00000500"
    assert sorted(os.listdir(path)) == sorted([*FILES, SUMS])
    assert os.readlink(tmp_path / "checkpoints" / "last") == "step_00000500"
    saved = load(path)
    assert_holds(saved, 500)
    assert saved.state["optimizer"]["state"][0]["exp_avg"].tolist() == [500.0] * 3
    assert saved.state["rng"]["python"] == (3, (1, 2**63, 2**80), None)
    assert saved.state["best"] == float("inf")
    assert torch.equal(saved.state["rng"]["torch"], torch.get_rng_state())


def test_plain_tools_read_the_files(tmp_path):
    path = save(tmp_path, 1)
    assert torch.load(path / "state.pt", weights_only=True)["step"] == 1
    assert yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8")) == CONFIG
    assert json.loads((path / "tokenizer.json").read_text(encoding="utf-8")) == TOKENIZER


def test_without_state_needs_no_state(tmp_path):
    path = save(tmp_path, 1)
    (path / "state.pt").unlink()
    saved = load(path, state=False)
    assert saved.state == {}
    assert (saved.weights["w"] == 1).all()
    with pytest.raises(ConfigError, match=r"state\.pt is missing"):
        load(path)


def test_tied_weights_are_stored_once_and_load_strictly(tmp_path):
    model, other = Tied(), Tied()
    path = save(tmp_path, 1, weights=model.state_dict())
    assert path.joinpath("model.safetensors").stat().st_size < 5 * 4 * 4 * 2 + 1000
    other.load_state_dict(load(path).weights, strict=True)
    assert torch.equal(other.head.weight, model.embed.weight)
    assert other.head.weight is other.embed.weight


def test_views_and_odd_layouts(tmp_path):
    base = torch.arange(12.0)
    weights = {
        "whole": base,
        "part": base[3:6],
        "shape": base.view(3, 4),
        "transposed": base.view(3, 4).T,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "parameter": nn.Parameter(torch.ones(2)),
        "flags": torch.tensor([True, False]),
    }
    loaded = load(save(tmp_path, 1, weights=weights)).weights
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight), name
        assert loaded[name].dtype == weight.dtype


def test_a_save_holds_one_more_tensor_at_a_time(tmp_path):
    """Of one that does not lie in order, and of no other."""
    weights = {f"{i}": torch.randn(512, 512) for i in range(16)}  # 1 MiB each
    weights["turned"], weights["tied"] = torch.randn(512, 512).T, weights["3"]
    assert peak_bytes(lambda: save(tmp_path, 1, weights=weights), torch.device("cpu")) < 1.1 * 2**20
    tracemalloc.start()  # bytes are of Python's memory, which is another
    try:
        save(tmp_path, 1, weights=weights)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert torch.equal(load(tmp_path).weights["turned"], weights["turned"])


def test_the_owner_of_the_format_reads_the_weights_and_the_same_ones_are_the_same_bytes(tmp_path):
    weights = {f"{i}": torch.randn(3, i) for i in range(20)} | {"half": torch.ones(3).half()}
    one, two = (save(tmp_path / run, 7, weights=weights) / "model.safetensors" for run in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    theirs = safetensors.torch.load_file(one)
    assert theirs.keys() == weights.keys()
    assert all(torch.equal(theirs[name], weight) for name, weight in weights.items())


# ---- names of wrapped models ----


@pytest.mark.parametrize(
    "name",
    [
        "a.b.weight",
        "_orig_mod.a.b.weight",
        "module.a.b.weight",
        "_orig_mod.module.a.b.weight",
        "module._orig_mod.a.b.weight",
        "_orig_mod._orig_mod.module.module.a.b.weight",
        "a._orig_mod.b.weight",
        "module.a._orig_mod.module.b._orig_mod.weight",
    ],
)
def test_prefixes_are_stripped_in_all_nestings(name):
    assert list(clean_keys({name: torch.zeros(1)})) == ["a.b.weight"]


def test_names_that_only_look_wrapped_stay():
    kept = ["my_module.weight", "modules.0.bias", "x.module", "_orig_model.w"]
    assert list(clean_keys(dict.fromkeys(kept, torch.zeros(1)))) == kept


def test_two_names_that_become_one_are_refused():
    with pytest.raises(ConfigError, match="'w'"):
        clean_keys({"w": torch.zeros(1), "module.w": torch.ones(1)})


class Wrapper(nn.Module):
    """Names its child as data-parallel wrappers do."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def compiled(model):
    return torch.compile(model, backend="eager")


def inner_compiled(model):
    model.body[1] = compiled(model.body[1])
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        compiled,
        Wrapper,
        lambda model: compiled(Wrapper(model)),
        lambda model: Wrapper(compiled(model)),
        inner_compiled,
        lambda model: Wrapper(compiled(inner_compiled(model))),
    ],
)
def test_wrapped_models_save_as_plain_ones(tmp_path, wrap):
    plain, other = Tied(), Tied()
    weights = wrap(plain).state_dict()
    assert weights.keys() != other.state_dict().keys()
    loaded = load(save(tmp_path, 1, weights=weights)).weights
    assert loaded.keys() == other.state_dict().keys()
    other.load_state_dict(loaded, strict=True)
    assert torch.equal(other.body[1].weight, loaded["body.1.weight"])


# ---- only plain values ----


class Colour(enum.StrEnum):
    RED = "red"


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "bad",
    [
        np.float64(1.0),
        np.zeros(2),
        Colour.RED,
        Pair(1, 2),
        {1, 2},
        b"x",
        object(),
        torch.float32,
        collections.Counter(),
    ],
    ids=lambda bad: type(bad).__name__,
)
@pytest.mark.parametrize("part", ["state", "config", "tokenizer"])
def test_other_values_are_refused_by_place_before_anything_is_written(tmp_path, part, bad):
    with pytest.raises(TypeError, match=rf"{part}\['a'\]\[1\]\['b'\] is a \S+: a checkpoint holds"):
        checkpoints.save(
            tmp_path,
            1,
            **({"weights": {}, "state": {}, "config": {}, "tokenizer": {}} | {part: {"a": [0, {"b": bad}]}}),
        )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("bad", [(1, 2), torch.zeros(1), collections.OrderedDict(), {1: 2}], ids=repr)
@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_configuration_holds_only_what_yaml_and_json_return_unchanged(tmp_path, part, bad):
    with pytest.raises(TypeError, match=rf"{part}\['a'\]"):
        checkpoints.save(
            tmp_path, 1, **({"weights": {}, "state": {}, "config": {}, "tokenizer": {}} | {part: {"a": bad}})
        )


@pytest.mark.parametrize(
    "text", ["1e-5", "null", "on", "é🙂", "\x85\u2028 \t\r\n", "- a: [", "\x07", "", " x ", "'", "0o7"]
)
def test_text_in_a_configuration_comes_back_unchanged(tmp_path, text):
    config = {text: text, "list": [text, 1e-5, float("inf"), -3, True, None]}
    saved = load(checkpoints.save(tmp_path, 1, weights={}, state={}, config=config, tokenizer={text: [text]}))
    assert saved.config == config
    assert saved.tokenizer == {text: [text]}


# ---- last, best, and what is kept ----


def test_old_checkpoints_go_but_best_and_last_stay(tmp_path):
    for step in range(100, 700, 100):
        save(tmp_path, step, best=step == 200)
    assert names(tmp_path) == ["best", "last", "step_00000200", "step_00000500", "step_00000600"]
    assert_holds(load(tmp_path), 600)
    assert_holds(load(tmp_path / "checkpoints" / "best"), 200)
    save(tmp_path, 700, best=True, keep=1)
    assert names(tmp_path) == ["best", "last", "step_00000700"]


def test_a_run_that_went_back_keeps_its_newest(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step, keep=3)
    save(tmp_path, 150, keep=2)
    assert_holds(load(tmp_path), 150)
    assert names(tmp_path) == ["last", "step_00000150", "step_00000300"]


def test_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 100, best=True)
    save(tmp_path, 100, weights={"w": torch.full((2, 3), 7.0)})
    assert names(tmp_path) == ["best", "last", "step_00000100"]
    assert (load(tmp_path / "checkpoints" / "best").weights["w"] == 7).all()


def test_a_run_can_be_moved(tmp_path):
    save(tmp_path / "a", 100, best=True)
    (tmp_path / "a").rename(tmp_path / "b")
    assert_holds(load(tmp_path / "b"), 100)


@pytest.mark.parametrize("jump", [-3600, 3600])
def test_a_clock_that_jumps_does_not_change_which_checkpoints_are_new(tmp_path, jump):
    """The checkpoints so far look an hour older or younger than a clock now says."""
    for step in (100, 200):
        save(tmp_path, step)
    for path in (tmp_path / "checkpoints").glob("step_*"):
        stamp = path.stat().st_mtime_ns - jump * 10**9
        os.utime(path, ns=(stamp, stamp))
    for step in (300, 400, 500):
        save(tmp_path, step)
        assert names(tmp_path) == ["last", f"step_{step - 100:08d}", f"step_{step:08d}"]
    (tmp_path / "checkpoints" / "last").unlink()
    assert find(tmp_path).name == "step_00000500"


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ConfigError, match="keep=0"):
        save(tmp_path, 1, keep=0)


# ---- finding ----


def test_every_name_of_a_run_leads_to_its_last_checkpoint(tmp_path):
    run = tmp_path / "runs" / "mine"
    save(run, 100)
    path = save(run, 200)
    (tmp_path / "runs" / "latest").symlink_to("mine")
    for name in (run, run / "checkpoints", path, run / "checkpoints" / "last", tmp_path / "runs" / "latest"):
        assert find(name) == find(str(name)) == path


def test_a_lost_link_falls_back_on_the_newest(tmp_path):
    save(tmp_path, 100)
    path = save(tmp_path, 200)
    last = tmp_path / "checkpoints" / "last"
    last.unlink()
    assert find(tmp_path) == path
    last.symlink_to("step_00000900")
    assert find(tmp_path) == path


def test_no_checkpoint_says_what_was_looked_for(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    for name, why in (("file", "this is a file"), ("nowhere", "no such folder"), ("run", "checkpoints/last")):
        with pytest.raises(ConfigError, match=why) as caught:
            find(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["\0", "x" * 300, "~nobody-of-this-name/run", "a/" * 3000, ""])
def test_a_name_that_no_folder_can_have_is_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint at"):
        find(name)


@pytest.mark.parametrize("link", ["checkpoints/last", "checkpoints/best", "checkpoints/step_00000900"])
def test_a_link_that_leads_out_of_its_run_is_refused(tmp_path, link):
    """In a run that came from elsewhere: to go on with it would write into the folder that the link leads to."""
    own, other = save(tmp_path / "run", 100), save(tmp_path / "other", 200)
    for path in (tmp_path / "run" / link, own.parent / "last"):
        path.unlink(missing_ok=True)
    (tmp_path / "run" / link).symlink_to(os.path.relpath(other, own.parent))
    for name in (tmp_path / "run" / link, tmp_path / "run") if "last" in link else (tmp_path / "run" / link,):
        with pytest.raises(ConfigError, match=f"leads out of its folder, to {other}"):
            find(name)


# ---- files that minilm did not write, with right checksums ----


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("sprung",))


def forge(path, name, content):
    (path / name).write_bytes(content)
    sums = json.loads((path / SUMS).read_text())
    sums[name] = {"size": len(content), "sha256": checkpoints.files.sha256_of(path / name)}
    (path / SUMS).write_text(json.dumps(sums))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.pt", pickle.dumps(Trap(), protocol=2)),
        ("state.pt", pickle.dumps([1], protocol=2)),
        ("state.pt", b""),
        ("config.yaml", b"!!python/object/apply:os.mkdir [sprung]"),
        ("config.yaml", b"- a\n- b\n"),
        ("config.yaml", b"a: [\n"),
        ("config.yaml", b"caf\xe9: 1\n"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b"{"),
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 100),
        ("model.safetensors", (10**12).to_bytes(8, "little") + b"{}"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"{}"),
        ("model.safetensors", pickle.dumps(Trap())),
    ],
)
def test_foreign_files_run_nothing_and_are_named(tmp_path, monkeypatch, name, content):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, 1)
    forge(path, name, content)
    with pytest.raises(ConfigError, match=f"{name} is not what minilm writes") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "sprung").exists()


def test_a_trap_in_a_torch_file_is_not_sprung(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, 1)
    torch.save({"a": Trap()}, tmp_path / "trap")
    forge(path, "state.pt", (tmp_path / "trap").read_bytes())
    with pytest.raises(ConfigError, match=r"state\.pt is not what minilm writes"):
        load(path)
    assert not (tmp_path / "sprung").exists()
