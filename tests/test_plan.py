"""scripts/plan.py from end to end, and what it takes the vocabulary to be."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from minilm.bench.setting import CHAR, VOCABULARIES, resolve_vocab_size
from minilm.config import Command
from minilm.errors import ConfigError
from minilm.plan import plan as make_plan

ROOT = Path(__file__).resolve().parents[1]
TINY = [
    "model.n_layer=1",
    "model.n_embd=32",
    "model.n_head=2",
    "model.block_size=32",
    "device=cpu",
    "threads=1",
]


def plan(*words: str) -> None:
    """In this process."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = OmegaConf.to_container(compose("plan", overrides=list(words)), resolve=True)
    make_plan(Command(config, said=[], out_dir=Path("unused"), default_out_dir=False))


def test_the_script_says_all_of_it_and_leaves_nothing_behind(tmp_path):
    words = [*TINY, "tokenizer=byte", "train.batch_size=2", "train.max_steps=10", "seconds=0.1"]
    command = [sys.executable, str(ROOT / "scripts" / "plan.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "vocab_size=256" in shown
    count = (2 * 256 + 3 * 16384) * 32 + 4 * 32 * 32 + 2 * 32 * 128 + 3 * 32
    assert f"total {count:,}" in shown
    assert "one text of 32 tokens 8 KiB" in shown  # 1 layer × 32 numbers × 32 tokens × 2 × 4 bytes
    for heading in (
        "Parameters",
        "FLOPs per token",
        "Training memory, 2 windows",
        "Cache",
        "Time on this machine",
    ):
        assert heading in shown
    assert "10 steps" in shown
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())


def test_a_model_too_big_to_run_is_planned_all_the_same(capsys):
    words = ["model=gpt2", "tokenizer=gpt2", "attention=linear", "train.batch_size=512", "device=cpu"]
    plan(*words, "seconds=0.1")
    shown = capsys.readouterr().out
    assert "123,653,376" in shown
    assert "at least" in shown
    assert "and any longer one" in shown


APART = ["data=folder", "data.path=.", "data.document_mask=true", "tokenizer=byte"]


@pytest.mark.parametrize(
    "word", ["mask=prefix", "mask=none", "attention=linear"], ids=lambda word: word.partition("=")[2]
)
def test_what_cannot_keep_documents_apart_is_refused_as_in_training(word):
    with pytest.raises(ConfigError, match=r"data\.document_mask"):
        plan(*TINY, *APART, word, "seconds=0")


@pytest.mark.parametrize("apart", [True, False])
def test_steps_are_timed_with_documents_apart_where_they_are_to_be(monkeypatch, apart):
    timed = []
    monkeypatch.setattr("minilm.plan.TrainingStep", lambda setting: timed.append(setting) or (lambda: None))
    plan(*TINY, *(APART if apart else APART[:2]), "tokenizer=byte", "seconds=1000")
    (setting,) = timed
    assert (setting.model().end_token is not None) == setting.cost.documents == apart
    tokens = setting.tokens(200, 256)
    ends = (tokens == setting.end_token).sum().item()
    assert (
        abs(ends - 200 * (2 if apart else 1)) < 5 * 20
    )  # five standard deviations; one in 257 is drawn by chance
    assert 0 <= tokens.min() <= tokens.max() < setting.vocab_size


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("model.n_head=3", "model.n_head=3 must divide model.n_embd=128"),
        ("train.batch_size=0", "train.batch_size=0: a positive"),
        ("seconds=-1", "seconds=-1.0: a number"),
    ],
)
def test_mistakes_are_told(word, told):
    with pytest.raises(ConfigError, match=told):
        plan(word)


# The vocabulary


def resolve(kind, said=None, documents=False, **options):
    options = {"_target_": f"minilm.tokenizer.{kind}", **options}
    data = (
        {"_target_": "minilm.sources.Folder", "path": "."} if documents else {"_target_": "minilm.data.PyDoc"}
    )
    return resolve_vocab_size({"vocab_size": said, "tokenizer": options, "data": data})[0]


def test_a_tokenizer_that_needs_no_text_tells_its_size():
    assert resolve("Byte") == 256
    assert resolve("Byte", documents=True) == 257  # and an end token
    assert resolve("BPE", vocab_size=512) == 512
    assert resolve("Tiktoken", name="gpt2") == VOCABULARIES["gpt2"] == 50257
    assert resolve("Char") == CHAR
    assert resolve("Char", said=80) == resolve("Byte", said=80) == 80


@pytest.mark.parametrize("said", [0, -1, 2.5, "many", True])
def test_a_wrong_vocabulary_is_refused(said):
    with pytest.raises(ConfigError, match="a positive whole number"):
        resolve("Char", said=said)
