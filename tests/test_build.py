"""From plain dicts to objects: every choice there is builds, and nothing but our own classes ever does."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from conftest import ROOT, TEXT
from omegaconf import OmegaConf

from minilm import checkpoint
from minilm.attention.layer import Attention
from minilm.attention.masks import Mask, SlidingWindow
from minilm.attention.positions import Position
from minilm.build import build_corpus, build_model, check, construct, load_weights, restore
from minilm.data import Corpus
from minilm.errors import ConfigError
from minilm.model import GPT
from minilm.optim import Optim
from minilm.schedule import Schedule
from minilm.tokenizer import Char, Tokenizer
from minilm.tokenizer_files import to_json

SECTIONS = ("model", "attention", "mask", "position", "data", "tokenizer", "optim", "schedule")
DEFAULTS = dict(
    zip(
        SECTIONS,
        ("micro", "mha", "causal", "rope", "tales", "char", "adamw", "trapezoid"),
        strict=True,
    )
)
SMALL = {"n_layer": 1, "n_head": 2, "n_kv_head": None, "n_embd": 16, "block_size": 8}
CPU = torch.device("cpu")


def choice(section, name):
    """A YAML file of configs/ as it is. Where a path is missing, it is this file's."""
    options = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / section / f"{name}.yaml"))
    return {key: __file__ if value == "???" else value for key, value in options.items()}


def config(**choices):
    made = {section: choice(section, name) for section, name in (DEFAULTS | choices).items()}
    return made | {"model": made["model"] | SMALL}


def choices(section):
    return sorted(path.stem for path in (ROOT / "configs" / section).glob("*.yaml"))


# ---- every choice builds ----


@pytest.mark.parametrize(
    ("section", "name"),
    [(s, n) for s in ("model", "attention", "mask", "position") for n in choices(s)],
)
def test_every_choice_of_a_models_parts_builds_a_model_that_learns(section, name):
    model = build_model(config(**{section: name}), vocab_size=30)
    tokens = torch.randint(30, (2, 8))
    logits = model(tokens)
    assert logits.shape == (2, 8, 30)
    logits.sum().backward()


@pytest.mark.parametrize("name", choices("model"))
def test_every_shape_is_one_that_divides(name):
    """At its own size, without memory for it."""
    with torch.device("meta"):
        model = build_model(config() | {"model": choice("model", name)}, vocab_size=50257)
    assert sum(p.numel() for p in model.parameters()) > 100_000


@pytest.mark.parametrize(
    ("section", "kind"), [("optim", Optim), ("schedule", Schedule), ("position", Position)]
)
def test_every_other_choice_builds(section, kind):
    given = {"n_embd": 16, "n_head": 2, "head_dim": 8, "block_size": 8}
    for name in choices(section):
        built = construct(config(**{section: name}), section, kind, **given)
        assert isinstance(built, kind)
        if isinstance(built, Optim):
            assert built.build(build_model(config(), 30))
        if isinstance(built, Schedule):
            assert built(0, 1000) > 0


@pytest.mark.parametrize("name", choices("data"))
def test_every_corpus_builds_and_nothing_is_read(name):
    options = choice("data", name)
    if name == "mix":
        options["sources"] = [{"data": "tales"}, {"data": "folder", "path": "nowhere"}]
    assert isinstance(build_corpus({"data": options}), Corpus)


@pytest.mark.parametrize("name", choices("tokenizer"))
def test_every_tokenizer_takes_its_keys(name, monkeypatch, tmp_path):
    def fit(cls, texts: str, name: str):
        return Char.fit(texts + name)

    monkeypatch.setattr("minilm.tokenizer.Tiktoken.fit", classmethod(fit))  # would need a network
    options = choice("tokenizer", name)
    if "path" in options:
        options["path"] = str(tmp_path / "tokenizer.json")
        Path(options["path"]).write_text(to_json(Char.fit(TEXT)), encoding="utf-8")
    tokenizer = construct({"tokenizer": options}, "tokenizer", Tokenizer, method="fit", texts=TEXT * 4)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_what_the_code_knows_reaches_those_who_ask_for_it():
    model = build_model(
        config(mask="sliding", position="learned") | {"mask": choice("mask", "sliding") | {"window": 3}}, 30
    )
    assert model.mask == SlidingWindow(3)
    assert model.position.table.weight.shape == (8, 16)


# ---- nothing else ----


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "torch.load",
        "torch.nn.Linear",
        "minilm.attention.masks.math.prod",
        "minilm.attention.masks.Callable",
        "minilm.attention.positions.Rotary",
        "minilm.attention.masks.Mask.allows",
        "minilm.checkpoint.load",
        "minilm.attention.layer.Mask",
        "minilm.nowhere.Causal",
        "minilm.attention.masks.",
        "Causal",
        "",
        None,
        5,
    ],
)
def test_a_target_is_a_class_of_ours_and_of_the_right_kind(target):
    with pytest.raises(ConfigError) as refused:
        construct({"mask": {"_target_": target}}, "mask", Mask)
    assert str(refused.value) == f"mask._target_={target}: expected a Mask of minilm, by its module and name"


def test_a_section_without_a_target_is_refused():
    with pytest.raises(ConfigError, match=r"mask\._target_=None"):
        construct({"mask": {"window": 3}}, "mask", Mask)


def test_what_the_code_knows_cannot_be_said():
    options = choice("attention", "mha") | {"n_embd": 4}
    with pytest.raises(ConfigError, match=r"attention\.n_embd: no such key here"):
        construct({"attention": options}, "attention", Attention, n_embd=16, n_head=2)


# ---- values are checked against the constructor's own annotations ----


def takes(
    whole: int = 1,
    number: float = 1.0,
    truth: bool = True,
    text: str = "",
    pair: tuple[float, float] = (0.0, 1.0),
    texts: str | list[str] = "",
    maybe: int | None = None,
    mode: bool | str = False,
    word: Literal["on", "off"] = "on",
):
    raise AssertionError("only its signature is looked at")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"whole": "fast"}, "here.whole=fast: expected a whole number"),
        ({"whole": 1.5}, "here.whole=1.5: expected a whole number"),
        ({"whole": 1.0}, "here.whole=1.0: expected a whole number"),
        ({"whole": "3"}, "here.whole=3: expected a whole number"),
        ({"whole": True}, "here.whole=true: expected a whole number"),
        ({"whole": None}, "here.whole=null: expected a whole number"),
        ({"whole": [1]}, "here.whole=[1]: expected a whole number"),
        ({"number": "1e-4 "}, "here.number=1e-4 : expected a number"),
        ({"truth": 1}, "here.truth=1: expected true or false"),
        ({"truth": "yes"}, "here.truth=yes: expected true or false"),
        ({"text": 5}, "here.text=5: expected text"),
        ({"pair": [0.9]}, "here.pair=[0.9]: expected [a number, a number]"),
        ({"pair": [1, 2, 3]}, "here.pair=[1, 2, 3]: expected [a number, a number]"),
        ({"pair": 0.9}, "here.pair=0.9: expected [a number, a number]"),
        ({"texts": ["a", 5]}, 'here.texts=["a", 5]: expected text or [text, …]'),
        ({"maybe": "x"}, "here.maybe=x: expected a whole number or null"),
        ({"mode": 2}, "here.mode=2: expected true or false or text"),
        ({"wohle": 1}, "here.wohle: no such key here; did you mean here.whole?"),
        ({"zzz": 1}, "here.zzz: no such key here; it takes whole, number, truth"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_in_plain_words(options, says):
    with pytest.raises(ConfigError) as refused:
        check(takes, options, "here")
    assert str(refused.value).startswith(says)


def test_what_a_constructor_cannot_do_without_is_asked_for():
    def needs(given: str, width: int, *, depth: float = 1.0):
        raise AssertionError("only its signature is looked at")

    with pytest.raises(ConfigError, match=r"^here\.width has no value: expected a whole number$"):
        check(needs, {"depth": 2}, "here", exclude=("given",))
    with pytest.raises(ConfigError, match=r"did you mean here\.width\?"):
        check(needs, {"wdith": 2}, "here", exclude=("given",))


def test_a_value_of_the_right_type_is_kept():
    options = {"number": 1, "pair": [0, 0.5], "texts": ["a"], "maybe": None, "mode": "strict", "word": "off"}
    checked = check(takes, options, "here")
    assert checked == options | {"pair": (0.0, 0.5)}
    assert json.dumps(checked["number"]) == "1.0"


def test_the_top_level_has_no_prefix():
    with pytest.raises(ConfigError, match=r"^whole=x: expected a whole number$"):
        check(takes, {"whole": "x"}, "")


# ---- models from checkpoints ----


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    tokenizer = Char.fit("abcdef")
    model = build_model(config(), tokenizer.vocab_size)
    checkpoint.save(
        tmp_path, 3, weights=model.state_dict(), state={}, config=config(), tokenizer=tokenizer.to_dict()
    )
    return tmp_path, model, tokenizer


def test_a_restored_model_is_the_model(saved):
    path, model, tokenizer = saved
    again, its_tokenizer, found = restore(path, CPU)
    x = torch.tensor([tokenizer.encode("fade")])
    assert torch.equal(again(x), model.eval()(x))
    assert its_tokenizer.to_dict() == tokenizer.to_dict()
    assert found.step == 3
    assert not again.training


def test_weights_that_do_not_fit_are_refused_by_name(saved):
    path, model, _ = saved
    found = checkpoint.load(path, state=False)
    for change, name in [
        ({"n_layer": 2}, "blocks.1."),
        ({"n_embd": 32}, "embedding.weight"),
        ({"bias": True}, "bias"),
        ({"mlp": "swiglu"}, "gate"),
    ]:
        other = build_model(config() | {"model": config()["model"] | change}, 6)
        with pytest.raises(
            ConfigError, match=rf"the weights do not fit the configuration, first at .*{name}"
        ):
            load_weights(other, found)
    load_weights(model, found)


def test_a_checkpoint_whose_configuration_lacks_a_section_is_refused(saved, tmp_path):
    path, model, tokenizer = saved
    lacking = {key: value for key, value in config().items() if key != "mask"}
    checkpoint.save(
        path / "other", 3, weights=model.state_dict(), state={}, config=lacking, tokenizer=tokenizer.to_dict()
    )
    with pytest.raises(ConfigError, match=r"config\.yaml has no section 'mask'"):
        restore(path / "other", CPU)


def test_a_strangers_checkpoint_builds_nothing_but_a_model(saved):
    path, model, tokenizer = saved
    foreign = config() | {"mask": {"_target_": "os.system", "command": "true"}}
    checkpoint.save(
        path / "other", 3, weights=model.state_dict(), state={}, config=foreign, tokenizer=tokenizer.to_dict()
    )
    with pytest.raises(ConfigError, match=r"mask\._target_=os\.system: expected a Mask of minilm"):
        restore(path / "other", CPU)
    assert isinstance(model, GPT)
