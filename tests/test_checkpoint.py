import collections
import contextlib
import enum
import errno
import io
import json
import os
import pickle
import shutil
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


def nothing(*arguments):
    pass


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """No test cuts the power, so none has to wait for the disk."""
    monkeypatch.setattr(os, "fsync", nothing)


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


# ---- interruptions ----

FAULTS = [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]


class Calls:
    """Counts the calls by which a save changes the disk; the one numbered `fail_at` raises `fault`."""

    def __init__(self, monkeypatch, fail_at=None, fault=None, late=False, watch=nothing):
        self.fail_at, self.fault, self.late, self.watch = fail_at, fault, late, watch
        self.count, self.watching = 0, False
        system = ("fsync", "open", "mkdir", "rename", "replace", "symlink", "link", "unlink", "rmdir")
        for owner, name in [
            *[(os, name) for name in system],
            (torch, "save"),
            (checkpoints.tensors, "write"),
            (checkpoints.files, "write_synced"),
            (checkpoints.files, "sha256_of"),
        ]:
            monkeypatch.setattr(owner, name, self.wrap(getattr(owner, name)))

    def wrap(self, function):
        def call(*arguments, **options):
            if self.watching:
                return function(*arguments, **options)
            self.count += 1
            number = self.count
            self.watching = True
            self.watch()
            self.watching = False
            if number == self.fail_at and not self.late:
                raise self.fault
            result = function(*arguments, **options)
            if number == self.fail_at:
                raise self.fault
            return result

        return call


def three_saves(run):
    """A run with a best and a last checkpoint, and one that the next save pushes out."""
    save(run, 100, best=True)
    save(run, 200)
    save(run, 300)


def save_new(run):
    save(run, 400, best=True)


def save_again(run):
    save(run, 300, best=True)


def assert_whole(run):
    """Nothing half made is to be seen, and both links lead to what they promise."""
    for path in (run / "checkpoints").iterdir():
        assert not path.name.startswith("."), path
        assert checkpoints.damage(path, FILES) is None, path
    saved = load(run)
    assert_holds(saved, saved.step)


@pytest.mark.parametrize("saving", [save_new, save_again])
@pytest.mark.parametrize(("fault", "late"), [(FAULTS[0], False), (FAULTS[1], True)], ids=repr)
def test_no_failure_harms_what_was_saved(tmp_path, monkeypatch, fault, late, saving):
    three_saves(tmp_path / "model")
    for number in range(1, 1000):
        run = tmp_path / str(number)
        shutil.copytree(tmp_path / "model", run, symlinks=True)
        with monkeypatch.context() as patch:
            calls = Calls(patch, number, fault, late)
            with contextlib.suppress(type(fault)):
                saving(run)
        if calls.count < number:
            break  # the whole save has passed without the fault
        assert_whole(run)
        assert find(run).name in ("step_00000300", "step_00000400")
        if number % 5 == 0:
            save(run, 500, best=True)
            assert_whole(run)
    assert number > 30


@pytest.mark.parametrize("saving", [save_new, save_again])
def test_a_kill_at_any_moment_leaves_good_links_and_the_next_save_tidies_up(tmp_path, monkeypatch, saving):
    run = tmp_path / "run"
    three_saves(run)
    moments = []

    def watch():
        moments.append(tmp_path / f"moment{len(moments)}")
        shutil.copytree(run, moments[-1], symlinks=True)

    with monkeypatch.context() as patch:
        Calls(patch, watch=watch)
        saving(run)
    assert len(moments) > 30
    for moment in moments:
        for name in ("last", "best"):
            assert checkpoints.damage(moment / "checkpoints" / name, FILES) is None
        saved = load(moment)
        assert_holds(saved, saved.step)
        assert saved.step in (300, 400)
        save(moment, 500)
        assert_whole(moment)


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
@pytest.mark.parametrize("written", [0, 0.5, 1])
def test_a_full_disk_while_writing_state(tmp_path, monkeypatch, fault, written):
    save(tmp_path, 100)
    real = torch.save

    def torn(value, file):
        real(value, file)
        file.truncate(int(file.tell() * written))
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", torn)
        with pytest.raises(type(fault)):
            save(tmp_path, 200)
    assert names(tmp_path) == ["last", "step_00000100"]
    assert_holds(load(tmp_path), 100)
    save(tmp_path, 200)
    assert_holds(load(tmp_path), 200)


def test_a_full_disk_is_an_oserror():
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoints.write_state(values(1), Full())


def test_remains_of_a_killed_run_are_ignored_and_swept(tmp_path):
    save(tmp_path, 100)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step_00000100", folder / ".tmp-step_00000200")
    (folder / ".tmp-step_00000200" / "state.pt").write_bytes(b"half")
    (folder / ".tmp-last").symlink_to(".tmp-step_00000200")
    assert_holds(load(tmp_path), 100)
    save(tmp_path, 200)
    assert names(tmp_path) == ["last", "step_00000100", "step_00000200"]


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path, 100)
    save(tmp_path, 100, weights={"w": torch.full((2, 3), 7.0)})
    assert names(tmp_path) == ["last", "step_00000100"]
    assert (load(tmp_path).weights["w"] == 7).all()


# ---- damage ----


@pytest.mark.parametrize("name", [*FILES, SUMS])
def test_missing_files_are_named(tmp_path, name):
    good, path = save(tmp_path, 400), save(tmp_path, 500)
    (path / name).unlink()
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert str(caught.value) == f"checkpoint {path}: {name} is missing: use {good}"


@pytest.mark.parametrize("bits", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_file_cut_at_any_byte_or_with_any_bit_flipped_is_named_and_the_checkpoint_before_offered(
    tmp_path, bits
):
    """Every length and every byte, of which a bit is flipped, or each of them in turn."""
    good, path = save(tmp_path, 400), save(tmp_path, 500)
    cases = 0
    for name in (*FILES, SUMS):
        content = (path / name).read_bytes()
        for place in range(len(content)):
            for damaged in (content[:place], *(flipped(content, place, bit) for bit in range(bits))):
                (path / name).write_bytes(damaged)
                problem = checkpoints.damage(path, FILES) or ""
                # a bit of the checksums may make any of their files look wrong
                assert "damaged" in problem or "missing" in problem, (name, place)
                assert name in problem or name == SUMS, (name, place)
                cases += 1
                if cases % 500 == 0:
                    with pytest.raises(ConfigError) as caught:
                        load(tmp_path)
                    assert str(caught.value) == f"checkpoint {path}: {problem}: use {good}"
        (path / name).write_bytes(content)
    assert cases > 5000
    assert_holds(load(tmp_path), 500)


def flipped(content, place, bit):
    return content[:place] + bytes([content[place] ^ 1 << (place + bit) % 8]) + content[place + 1 :]


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    path = save(tmp_path, 500)

    def refuse(file):
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(checkpoints.files, "sha256_of", refuse)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read \(Permission denied\)"):
        load(path)


def test_a_damaged_good_checkpoint_is_not_recommended(tmp_path):
    good, bad, path = (save(tmp_path, step, keep=3) for step in (300, 400, 500))
    for damaged in (bad, path):
        (damaged / "state.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"use {good}"):
        load(tmp_path)


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
