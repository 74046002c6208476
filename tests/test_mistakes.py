"""What people type wrong, and the one line that each of them reads.

Each row is a command line of scripts/train.py or scripts/generate.py, after the arguments of a small run that is
right, and what the message must say: the key or file, the value found, and what would be right. Nothing may be
printed beside it, no file may be left where the script was started, and the exit status is 2.
"""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, script_as_typed

# {files} is a folder of bad files, {run} a trained model
TRAIN = {
    # keys
    "train.max_step=5": "train.max_step: no such key; did you mean train.max_steps?",
    "+train.max_step=5": "train.max_step: no such key; did you mean train.max_steps?",
    "lr=1e-3": "lr: no such key; did you mean optim.lr?",
    "modle=micro": "modle: no such key; did you mean model?",
    "prompt=Once": "prompt: no such key; the top level has",
    "mask.window=8": "mask.window: no such key; only mask=sliding has it",
    "hydra.job.nmae=x": "hydra.job.nmae: Key 'nmae' not in 'JobConf'",
    "~train.keep": "train.keep has been taken away",
    "wandb=online": "wandb is a section, no value: set one of its keys, such as wandb.mode=…",
    "train.max_steps": "train.max_steps: expected key=value",
    "--train.max_steps=5": "--train.max_steps=5: no such option; to set a key say it without dashes, train.max_steps=…",
    "--config-dir {files} recipe=unknown": "modle.n_layer: no such key; did you mean model.n_layer?",
    "--config-dir {files} recipe=misspelt": "train.max_step: no such key; did you mean train.max_steps?",
    "--config-dir {files} recipe=group": "positon: no such key; did you mean position?",
    "--config-dir {files} recipe=choice": "position=ropee: did you mean rope?",
    "--config-dir {files} recipe=torn": 'recipe/torn.yaml", line 2',
    # choices
    "position=ropee": "position=ropee: did you mean rope? expected one of alibi, learned, none, rope, rope_str",
    "mask=null": "mask=null: expected one of causal, none",
    "data=my.txt": "data=my.txt: expected one of file, ",
    "mask._target_=os.system": "mask._target_=os.system: expected a Mask of minilm",
    "attention.scale=big": "attention.scale=big: expected sqrt, none, inverse or a positive number",
    # types and ranges
    "optim.lr=fast": "optim.lr=fast: expected a number",
    "optim.betas=[0.9]": "optim.betas=[0.9]: expected [a number, a number]",
    "train.batch_size=1.5": "train.batch_size=1.5: expected a whole number",
    "train.max_steps=1e3": "train.max_steps=1000.0: expected a whole number",
    "seed=1,2": "seed=1,2: several runs need -m",
    "seed=-1": "seed=-1: a whole number from 0",
    "seed=${{nothing}}": "seed: Interpolation key 'nothing' not found",
    "compile=maybe": "compile=maybe: expected true, false or strict",
    # combinations
    "model.n_head=3 model.n_embd=64": "model.n_head=3 must divide model.n_embd=64; try model.n_head=",
    "schedule.warmup=30": "schedule.warmup=30 is longer than the run, train.max_steps=20",
    "model.block_size=9000": "the training text has 5400 tokens, model.block_size=9000 needs at least 9001",
    "train.sample_prompt=Été": "train.sample_prompt: tokenizer=char: 'É' (U+00C9)",
    # files
    "data.path=???": "data.path has no value: say data.path=…",
    "data.path=nowhere.txt": "data.path=nowhere.txt: cannot be read (No such file or directory)",
    "data.path={files}": "cannot be read (Is a directory)",
    "data.path={files}/empty.txt": "empty.txt: the file is empty",
    "data.path={files}/latin-1.txt": "latin-1.txt: not UTF-8 at byte 3 (0xe9)",
    "data.path={files}/short.txt": "the validation text has 2 tokens, model.block_size=16 needs at least 17",
    "out_dir={run}": "holds a run already: say resume=auto to go on with it, or name another",
    "resume=nowhere": "no checkpoint at nowhere: there is no such folder",
    "resume=auto": "resume=auto looks for checkpoints in out_dir: name it",
    "resume={run} model.n_layer=2": "model.n_layer=2: the run to resume has 1, and a resumed run cannot change it",
    "resume={files}/damaged": "model.safetensors is damaged",
    "init_from=nowhere": "no checkpoint at nowhere: there is no such folder",
    "init_from={files}/damaged": "model.safetensors is damaged",
    "init_from={run} model.n_embd=32": "has 16, and its weights fit nothing else; leave it out",
    "init_from={run} resume={run}": "a resumed run goes on from its own checkpoint",
    "tokenizer=file tokenizer.path=nowhere": "tokenizer.path=nowhere: nowhere cannot be read (No such file",
    # corpora of documents
    "data=folder data.path=nowhere": "data.path=nowhere: there is no such folder",
    "data=folder data.path={files}/none": "none: no file in it that data.glob=",
    "data=folder data.path={files}/latin-1.txt": "latin-1.txt: not UTF-8 at byte 3",
    "data=folder data.path={files}/rows.jsonl": "rows.jsonl: line 1 has no such column; it has body",
    "data=folder data.path={files}/rows.jsonl data.text_column=body": "data.val_fraction=0.1: of the 1 documents",
    "data=folder data.path={files} data.workers=0": "data.workers=0: a positive whole number",
    "data=folder data.path={files} data.glob=3": "data.glob=3: expected text or [text, …]",
    "data.document_mask=true": "data.document_mask: no such key; only data=",
    # trackers
    "wandb.mode=onlin": "wandb.mode=onlin: expected disabled or offline or online",
    "tensorboard=2": "tensorboard=2: expected true or false",
    # machines
    "device=cuda:99": "device=cuda:99: this machine has",
    "precision=fp16": "precision=fp16 needs a CUDA device, this is cpu",
    "threads=0": "threads=0: a positive whole number",
}  # fmt: skip
GENERATE = {
    "chekpoint=x": "chekpoint: no such key; did you mean checkpoint?",
    "max_tokens=5": "max_tokens: no such key; did you mean max_new_tokens?",
    "--temperature=1": "--temperature=1: no such option; to set a key say it without dashes, temperature=…",
    "checkpoint=nowhere": "no checkpoint at nowhere: there is no such folder",
    "checkpoint={files}": "no checkpoint at",
    "checkpoint={files}/empty.txt": "this is a file",
    "checkpoint={files}/damaged": "model.safetensors is damaged",
    "prompt=Hi_日本": "'日' (U+65E5), '本' (U+672C) not among the",
    "prompt=[]": "prompt=[]: give at least one prompt",
    "prompt=a prompt_file={files}/short.txt": "prompt and prompt_file are both given",
    "prompt_file=nowhere.txt": "prompt_file=nowhere.txt: cannot be read",
    "prompt_file={files}/latin-1.txt": "latin-1.txt: not UTF-8 at byte 3",
    "temperature=nan": "temperature=nan must be a number >= 0",
    "top_k=-1": "top_k=-1 must be a whole number >= 0",
    "overflow=wrap": "overflow=wrap: expected slide or error",
    "overflow=error max_new_tokens=99": "a prompt of 1 and max_new_tokens=99 exceed the context, block_size=16",
    "keep=1": "keep=1.0: a share of the context",
    "stop=": "stop=[''] must be texts of one character or more",
    "cache=2": "cache=2: expected true or false",
    "device=cuda:99": "device=cuda:99: this machine has",
}  # fmt: skip


@pytest.fixture(scope="session")
def files(tmp_path_factory, tiny_run):
    """A folder of files with something wrong about each."""
    folder = tmp_path_factory.mktemp("files")
    contents = {
        "empty.txt": b"",
        "latin-1.txt": b"caf\xe9",
        "short.txt": b"less than a window..",
        "rows.jsonl": b'{"body": "less"}\n',
        "none/.gitignore": b"",
        "recipe/unknown.yaml": b"# @package _global_\nmodle: {n_layer: 2}\n",
        "recipe/misspelt.yaml": b"# @package _global_\ntrain: {max_step: 2}\n",
        "recipe/group.yaml": b"# @package _global_\ndefaults:\n  - override /positon: rope\n",
        "recipe/choice.yaml": b"# @package _global_\ndefaults:\n  - override /position: ropee\n",
        "recipe/torn.yaml": b"# @package _global_\nmodel: {n_layer: 2",
    }
    for name, raw in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(raw)
    damaged = shutil.copytree(tiny_run[0], folder / "damaged", symlinks=True) / "checkpoints"
    for checkpoint in damaged.glob("step_*"):
        weights = checkpoint / "model.safetensors"
        raw = bytearray(weights.read_bytes())
        raw[-1] ^= 1
        weights.write_bytes(raw)
    return folder


ROWS = [("train", row, says) for row, says in TRAIN.items()] + [
    ("generate", row, says) for row, says in GENERATE.items()
]


@pytest.mark.parametrize(("name", "row", "says"), ROWS, ids=[f"{name} {row}" for name, row, _ in ROWS])
def test_a_mistake_is_one_line(call, monkeypatch, tmp_path, tiny, tiny_run, files, name, row, says):
    monkeypatch.chdir(tmp_path)
    right = tiny if name == "train" else [f"checkpoint={tiny_run[0]}", "threads=1", "device=cpu"]
    wrong = row.format(files=files, run=tiny_run[0]).split(" ")
    before = {path: path.stat().st_mtime_ns for path in tiny_run[0].rglob("*")}
    result = call(name, *right, *wrong)
    assert result.status == 2
    assert result.out == ""
    assert result.err.endswith("\n")
    assert len(result.err.splitlines()) == 1, result.err
    assert result.err.startswith(f"{name}: ")
    assert says in result.err
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in tiny_run[0].rglob("*")} == before


def test_without_a_model_the_message_says_where_it_was_looked_for(call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = call("generate", "prompt=Once")
    assert result.status == 2
    assert result.err.startswith("generate: no checkpoint at runs/latest: there is no such folder")


def test_as_typed_too(tmp_path, tiny_run):
    """In a process of its own, in a poor locale: é arrives, and nothing else is printed around the line."""
    poor = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"}
    result = script_as_typed("generate", "prompt=Hi? é", f"checkpoint={tiny_run[0]}", cwd=tmp_path, **poor)
    assert (result.status, result.out, len(result.err.splitlines())) == (2, "", 1)
    assert result.err.startswith(
        "generate: tokenizer=char: 'H' (U+0048), '?' (U+003F), 'é' (U+00E9) not among"
    )
    assert list(tmp_path.iterdir()) == []


BROKEN = """
import runpy, sys, types
module = types.ModuleType("minilm.launch")
module.train = lambda command: 1 / 0
sys.modules["minilm.launch"] = module
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("sweep", [[], ["-m", "out_dir=sweep"]])
def test_a_fault_of_ours_shows_where_it_happened(tmp_path, sweep):
    script = str(ROOT / "scripts" / "train.py")
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, script, *sweep], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "module.train = " in done.stderr or "<lambda>" in done.stderr
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
