"""Everything that reads what others may have written, fed with what nobody would write: it succeeds, or there is one
ConfigError. Files are cut, flipped and spliced; values inside them are replaced by values of any kind.
"""

import copy
import json
import shutil
import types
from collections.abc import Callable
from pathlib import Path

import hydra
import pytest
import torch
import yaml
from conftest import ROOT, TEXT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_hostile import forge, saved
from test_training import make

from minilm import build, config, data, interop, launch, say, tokenizer_files
from minilm import checkpoint as checkpoints
from minilm import tokenizer as tokenizers
from minilm.errors import ConfigError
from minilm.generation import Generator, encode_prompt
from minilm.optim import load_states
from minilm.tokenizer import BPE, Byte, Char
from minilm.words import CONFIGS

CPU = torch.device("cpu")
NUMBERS = [0, 1, -1, 2, 7, 10**9, 2**31, 2**63, 10**30, 0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan")]
TEXTS = ["", " ", "\0", "a", "é", "日本🙂", "\ud800", "../..", "/", "null", "1", "os.system", "x" * 999]
VALUES = st.sampled_from(
    [*NUMBERS, *TEXTS, None, True, False, [], {}, [[]], [1, 2, 3], {"a": [None]}, [[[0]] * 3]]
)


@st.composite
def spliced(draw, raw: bytes) -> bytes:
    """Some bytes with up to four pieces cut out, flipped, doubled, or replaced."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(raw)))
        end = min(len(raw), start + draw(st.sampled_from([0, 1, 2, 8, 100, 10**6])))
        piece = raw[start:end]
        other = draw(
            st.sampled_from([b"", piece * 2, bytes(b ^ 1 for b in piece), bytes(b ^ 128 for b in piece)])
            | st.binary(max_size=9)
        )
        raw = raw[:start] + other + raw[end:]
    return raw


def places(value, path=()):
    """Where in a tree of lists and dicts there is something, (place, place, …)."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


@st.composite
def changed(draw, tree, values=VALUES):
    """A tree with one or two of its values replaced, taken away or moved to another key."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from([p for p in places(tree) if p] or [None]))
        if path is None:
            break
        holder = tree
        for key in path[:-1]:
            holder = holder[key]
        how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename"]))
        if how == "replace":
            # a copy: the next change would else be to what is drawn from
            holder[path[-1]] = copy.deepcopy(draw(values))
        else:
            value = holder.pop(path[-1])
            if how == "rename" and isinstance(holder, dict):
                holder[draw(st.sampled_from(TEXTS))] = value
    return tree


def as_json(value) -> bytes:
    return json.dumps(value).encode()  # with NaN and lone surrogates, as others write them


class Ground:
    """What is fuzzed: a checkpoint, a folder in the format of others, and the trees of their files."""

    def __init__(self, run: Path, work: Path) -> None:
        step = checkpoints.find(run)
        self.work = work
        self.own, self.theirs = work / "own", work / "theirs"
        shutil.copytree(step, self.own)
        interop.export(run, self.theirs)
        self.raw = {name: (step / name).read_bytes() for name in (*checkpoints.FILES, checkpoints.SUMS)}
        self.config = yaml.safe_load(self.raw["config.yaml"])
        self.tokenizer = json.loads(self.raw["tokenizer.json"])
        self.their_raw = {path.name: path.read_bytes() for path in self.theirs.iterdir()}
        self.bpe = BPE.fit(TEXT, vocab_size=300)
        self.trainer = make(work / "trainer", max_steps=2, sample_tokens=0, eval_interval=99)
        self.trainer.fit()
        self.state = checkpoints.load(work / "trainer").state
        definition = tokenizer_files.to_json(self.bpe)
        self.definitions = [definition, tokenizer_files.to_json(Char.fit(TEXT))]
        self.tokenizers = [Char.fit(TEXT), Byte(), self.bpe, tokenizers.Pretrained(definition)]

    def put(self, name: str, content: bytes) -> None:
        """In the checkpoint, with its checksum; the others as they were."""
        for other, raw in self.raw.items():
            (self.own / other).write_bytes(raw)
        forge(self.own, name, content) if name != checkpoints.SUMS else (self.own / name).write_bytes(content)


# Each takes the ground and what hypothesis draws from; what it raises but ConfigError is a fault.


def checkpoint_bytes(ground: Ground, draw: Callable) -> None:
    name = draw(st.sampled_from(sorted(ground.raw)))
    ground.put(name, draw(spliced(ground.raw[name])))
    checkpoints.load(ground.own)
    use(*build.restore(ground.own, CPU)[:2])


def checkpoint_config(ground: Ground, draw: Callable) -> None:
    ground.put("config.yaml", yaml.safe_dump(draw(changed(ground.config, no_surrogates))).encode())
    use(*build.restore(ground.own, CPU)[:2])


def checkpoint_tokenizer(ground: Ground, draw: Callable) -> None:
    tree = draw(st.sampled_from([t.to_dict() for t in ground.tokenizers]))
    ground.put("tokenizer.json", as_json(draw(changed(tree))))
    made = tokenizers.from_dict(checkpoints.read(ground.own / "tokenizer.json"))
    made.decode(made.encode("Some text."))


def checkpoint_state(ground: Ground, draw: Callable) -> None:
    """As a resumed run reads it."""
    content = saved(draw(changed(ground.state, VALUES | st.just(torch.zeros(3)))))
    run = ground.work / "resumed"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(ground.work / "trainer", run, symlinks=True)
    forge(checkpoints.find(run), "state.pt", content)
    found = checkpoints.load(run)
    trainer = make(run, max_steps=3, sample_tokens=0, eval_interval=99)
    load_states(trainer.optimizers, found.state.get("optimizers", []))
    trainer.restore(found)
    trainer.fit()


def tokenizer_bytes(ground: Ground, draw: Callable) -> None:
    file = ground.work / "tokenizer.json"
    whole = draw(st.sampled_from(ground.definitions))
    content = draw(spliced(whole.encode()) | st.deferred(lambda: changed(json.loads(whole)).map(as_json)))
    file.write_bytes(content)
    made = tokenizer_files.TokenizerFile.fit("", str(file))
    made.decode(made.encode("Some text."))


def tokenizer_ranks(ground: Ground, draw: Callable) -> None:
    folder = ground.work / "ranks"
    folder.mkdir(exist_ok=True)
    parts = {name: text.encode() for name, text in tokenizer_files.to_tiktoken(ground.bpe).items()}
    name = draw(st.sampled_from(sorted(parts)))
    for other, content in (parts | {name: draw(spliced(parts[name]))}).items():
        (folder / other).write_bytes(content)
    tokenizer_files.TokenizerFile.fit("", str(folder))


def folder_of_others(ground: Ground, draw: Callable) -> None:
    name = draw(st.sampled_from([*sorted(ground.their_raw), "config.json"]))
    raw = ground.their_raw[name]
    tree = json.loads(raw) if name.endswith(".json") else None
    content = draw(spliced(raw) if tree is None else spliced(raw) | changed(tree).map(as_json))
    for other, whole in (ground.their_raw | {name: content}).items():
        (ground.theirs / other).write_bytes(whole)
    out = ground.work / "imported"
    shutil.rmtree(out, ignore_errors=True)
    interop.import_model(ground.theirs, out)
    use(*build.restore(out, CPU)[:2])


def command_words(ground: Ground, draw: Callable) -> None:
    """As a person types them; what they make is checked, and nothing of it built."""
    keys = [
        "model",
        "model.n_layer",
        "mask",
        "mask.window",
        "optim.betas",
        "optim.lr",
        "data.path",
        "tokenizer",
    ]
    keys += [
        "train",
        "train.sample_prompt",
        "seed",
        "precision",
        "device",
        "out_dir",
        "schedule",
        "+x",
        "~x",
        "recipe",
    ]
    word = draw(st.sampled_from(keys)) + draw(st.sampled_from(["=", "", "==", "@"])) + draw(values_typed)
    composed = config.compose("train", ["data=file", f"data.path={ROOT / 'LICENSE'}", "device=cpu", word])
    launch.Parts.of(composed | {"threads": None})


values_typed = st.text(max_size=12) | st.text("[]{}'\"\\$,:=~ 01.eé-", max_size=12) | VALUES.map(json.dumps)
no_surrogates = VALUES.filter(lambda value: value != "\ud800")


def texts(ground: Ground, draw: Callable) -> None:
    file = ground.work / "text.txt"
    file.write_bytes(draw(st.binary(max_size=99) | spliced(TEXT[:500].encode())))
    corpus = data.TextFile(path=str(file))
    tokenizer = draw(st.sampled_from([Char, Byte])).fit(corpus.text)
    corpus.prepare(tokenizer, ground.work / "cache").check(16)
    shutil.rmtree(ground.work / "cache")


def prompts(ground: Ground, draw: Callable) -> None:
    file = ground.work / "prompt.txt"
    file.write_bytes(draw(st.binary(max_size=99)))
    given = draw(st.text() | st.text(st.characters(categories=["Cs", "Cc", "Zs", "So"])) | st.just(file))
    options = types.SimpleNamespace(prompt=given, prompt_file=None)
    if given == file:
        options = types.SimpleNamespace(prompt="", prompt_file=str(file))
    (prompt,) = say.read_prompts(options)
    tokenizer = draw(st.sampled_from(ground.tokenizers))
    ids = encode_prompt(tokenizer, prompt)
    assert prompt in tokenizer.decode(ids) or not prompt


FUZZERS = [
    checkpoint_bytes,
    checkpoint_config,
    checkpoint_tokenizer,
    checkpoint_state,
    tokenizer_bytes,
    tokenizer_ranks,
    folder_of_others,
    command_words,
    texts,
    prompts,
]
CASES = {"short": 16, "long": 2000}  # of each, in continuous integration and with -m slow
SLOW = {command_words: 6, checkpoint_state: 2}  # one that takes so many times as long has as many times fewer


def use(model, tokenizer) -> None:
    """A few tokens: what was accepted also works."""
    prompt = encode_prompt(tokenizer, "a") if "a" in tokenizer.decode(range(tokenizer.vocab_size)) else [0]
    for chosen in Generator(model).tokens([prompt], 2, seed=1):
        tokenizer.decode(chosen.tolist())


@pytest.fixture(scope="module")
def ground(plain_run, tmp_path_factory):
    torch.set_num_threads(1)
    with (
        pytest.MonkeyPatch.context() as patch,
        hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"),
    ):
        patch.setattr("os.fsync", lambda descriptor: None)
        patch.setattr("minilm.training.plot_loss", lambda *args, **options: None)
        yield Ground(plain_run, tmp_path_factory.mktemp("ground"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fuzzer", FUZZERS, ids=lambda fuzzer: fuzzer.__name__)
@pytest.mark.parametrize("cases", ["short", pytest.param("long", marks=pytest.mark.slow)])
def test_whatever_is_read_there_is_success_or_one_line(ground, fuzzer, cases):
    seen = {"taken": 0, "refused": 0}

    @settings(
        max_examples=CASES[cases] // SLOW.get(fuzzer, 1),
        derandomize=cases == "short",  # the same cases each time
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def fuzz(source):
        try:
            fuzzer(ground, source.draw)
            seen["taken"] += 1
        except ConfigError:
            seen["refused"] += 1

    fuzz()
    print(f"{fuzzer.__name__}: {seen}")
    assert seen["refused"] > 0
