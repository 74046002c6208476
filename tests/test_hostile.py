"""Files that were made to do harm: refused in one line, without the memory that they ask for, and nothing is run.

Each case writes such a file into a checkpoint or a model's folder that is right otherwise, checksums included.
"""

import io
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import struct
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from minilm import build, files, interop, tokenizer_files
from minilm import checkpoint as checkpoints
from minilm.checkpoint import SUMS
from minilm.errors import ConfigError

MOST = 100 << 20  # bytes of memory that a refusal may take
DEEP = 100_000
CPU = torch.device("cpu")


def forge(folder, name, content):
    """Put `content` in the place of a checkpoint's file, and its checksum into the checksums."""
    (folder / name).write_bytes(content)
    sums = json.loads((folder / SUMS).read_text())
    sums[name] = {"size": len(content), "sha256": files.sha256_of(folder / name)}
    (folder / SUMS).write_text(json.dumps(sums))


# ---- files that would take the memory ----


def header(**tensors):
    raw = json.dumps({"__metadata__": {"step": "1", "tied": "{}"}, **tensors}).encode()
    return struct.pack("<Q", len(raw)) + raw


def tensor(shape, begin, end):
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def repacked(raw, change, how):
    """A file of torch.save with data.pkl changed, and all of it stored or packed."""
    old, buffer = zipfile.ZipFile(io.BytesIO(raw)), io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how, compresslevel=1) as new:
        for entry in old.infolist():
            content = old.read(entry)
            new.writestr(entry.filename, change(content) if entry.filename.endswith("data.pkl") else content)
    return buffer.getvalue()


def references(depth):
    value = [0]
    for _ in range(depth):
        value = [value, value]
    return value


def aliases(depth):
    lines = ["a0: &a0 [0, 0]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, depth)]
    return "\n".join([*lines, f"ngrams: *a{depth - 1}"])


# a claim of 2^40 numbers in the place of 7919; both are integers of pickle's
CLAIM = (pickle.dumps(7919, 2)[2:-1], pickle.dumps(2**40, 2)[2:-1])


def contents_of_files():
    """name of a file: {case: content}"""
    return {
        "model.safetensors": {
            "a header of 2^63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
            "a header of 2^40 bytes": struct.pack("<Q", 1 << 40) + b"{}" * 99,
            "a tensor of 2^40 numbers": header(x=tensor([1 << 40], 0, 1 << 42)),
            "a tensor larger than its bytes": header(x=tensor([1 << 40], 0, 4)) + bytes(4),
            "a shape that overflows": header(x=tensor([1 << 62, 1 << 62], 0, 4)) + bytes(4),
            "a shape that wraps around to nothing": header(x=tensor([1 << 32, 1 << 32], 0, 0)),
            "an empty tensor with a large side": header(x=tensor([0, 1 << 62], 0, 0)),
            "a deep header": struct.pack("<Q", 2 * DEEP) + b"[" * DEEP + b"]" * DEEP,
            "tensors that overlap": header(x=tensor([2], 0, 8), y=tensor([2], 4, 12)) + bytes(12),
        },
        "state.pt": {
            "packed zeros": repacked(saved(torch.zeros(MOST // 2)), lambda raw: raw, zipfile.ZIP_DEFLATED),
            "a view of one number as 2^40": saved({"x": torch.zeros(1).expand(1 << 40)}),
            "a storage that claims 2^40 numbers": repacked(
                saved({"x": torch.zeros(7919)}), lambda raw: raw.replace(*CLAIM), zipfile.ZIP_STORED
            ),
            "references to references": saved({"x": references(60)}),
            "a sparse tensor of any shape": saved(
                {"x": torch.sparse_coo_tensor(torch.zeros(1, 1), torch.ones(1), (1 << 40,))}
            ),
            "a tensor of no storage": saved({"x": torch.empty(1 << 40, device="meta")}),
            "the older format": saved({"x": 1}, _use_new_zipfile_serialization=False),
        },
        "config.yaml": {
            "aliases of aliases": aliases(60).encode(),
            "a deep list": b"a: " + b"[" * DEEP,
            "a deep mapping": b"".join(b" " * n + b"a:\n" for n in range(2000)),
            "a long one": b"a: [" + b"0, " * (1 << 20) + b"]",
            "a long number": b"a: " + b"9" * 500_000,
            "what refers to itself": b"a: &a [*a]",
            "a date": b"a: 2020-01-01",
        },
        "tokenizer.json": {
            "a deep list": b"[" * DEEP,
            "a deep mapping": b'{"a":' * DEEP,
            "a long number": b'{"kind": ' + b"9" * 500_000 + b"}",
            "a large id": json.dumps(
                {"kind": "bpe", "pattern": r"\s\S", "ranks": [], "specials": {"x": 10**9}}
            ).encode(),
            "a deep definition": json.dumps(
                {"kind": "pretrained", "definition": "[" * DEEP, "vocab_size": 9, "end_token": None}
            ).encode(),
            "a large vocabulary": json.dumps(
                {"kind": "pretrained", "definition": "{}", "vocab_size": 10**9, "end_token": None}
            ).encode(),
        },
    }


# keys of config.yaml whose values ask for a model that the weights are not
SIZES = {
    "model.n_layer": 10**9,
    "model.n_embd": 10**12,
    "model.n_inner": 10**15,
    "model.n_head": 10**18,
    "model.ngrams": [10**12],
    "model.norm": ["x"] * 9,
    "model": [],
    "attention": None,
    "mask": {"_target_": "os.system"},
    "position": {"_target_": "minilm.attention.positions.Learned"},
}

# the same in a config.json of others
THEIRS = {
    "num_hidden_layers": 10**9,
    "hidden_size": 10**12,
    "intermediate_size": 10**15,
    "vocab_size": 10**12,
    "num_attention_heads": 10**18,
    "hidden_act": ["silu"],
    "rope_parameters": {"rope_type": ["llama3"]},
    "model_type": {"x": []},
}


def hostile(run: Path, theirs: Path, work: Path):
    """Write all of these; (name of the case, how it is opened, its folder)"""
    step = checkpoints.find(run)
    for name, contents in contents_of_files().items():
        for case, content in contents.items():
            folder = shutil.copytree(step, work / f"{name} {case}")
            forge(folder, name, content)
            yield f"{name}: {case}", "load" if name == "state.pt" else "restore", folder
            if name == "tokenizer.json":
                yield f"tokenizer.path: {case}", "tokenizer", folder
    for key, value in SIZES.items():
        folder = shutil.copytree(step, work / key)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        section, _, name = key.partition(".")
        (config[section] if name else config)[name or section] = value
        forge(folder, "config.yaml", yaml.safe_dump(config).encode())
        yield f"config.yaml: {key}={value}", "restore", folder
    model = json.loads((theirs / "config.json").read_text())
    changes = [("config.json", json.dumps(model | {key: value}).encode()) for key, value in THEIRS.items()]
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        changes += [(name, content) for content in (b'{"a":' * DEEP, b"\xff" * 9, b"[1]")]
    for shards in ([1], {"x": ["y"]}, {"x": "../../other.safetensors"}, {"x": "\0"}, {"x": ".."}):
        changes += [("model.safetensors.index.json", json.dumps({"weight_map": shards}).encode())]
    for number, (name, content) in enumerate(changes):
        folder = shutil.copytree(theirs, work / f"theirs {number}")
        (folder / name).write_bytes(content)
        yield f"{name}: {content[:99].decode(errors='replace')}", "import", folder


OPEN = {
    "load": checkpoints.load,
    "restore": lambda folder: build.restore(folder, CPU),
    "tokenizer": lambda folder: tokenizer_files.TokenizerFile.fit("", str(folder)),
    "import": lambda folder: interop.import_model(folder, folder.with_name(f"made of {folder.name}")),
}


def in_little_memory(cases: list[tuple[str, str, Path]], report: Path) -> None:
    """In a process of its own: what comes of each case, and the memory that it took, to the file `report`."""
    lines = []
    room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 4 * MOST
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    for name, how, folder in cases:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            said = repr(OPEN[how](folder))
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        lines.append([name, said, taken])
    report.write_text(json.dumps(lines))


@pytest.fixture(scope="module")
def plain_hf(plain_run, tmp_path_factory):
    """A model in the format of others that can be imported; a model's weights, without state."""
    theirs = tmp_path_factory.mktemp("hf") / "theirs"
    interop.export(plain_run, theirs)
    return theirs


@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of a process as Linux tells it")
def test_what_asks_for_more_than_it_is_is_refused_without_the_memory(forked, plain_run, plain_hf, tmp_path):
    report, work = tmp_path / "report", tmp_path / "work"
    work.mkdir()
    cases = list(hostile(plain_run, plain_hf, work))
    process = multiprocessing.get_context("forkserver").Process(target=in_little_memory, args=(cases, report))
    process.start()
    process.join(timeout=600)
    assert process.exitcode == 0
    lines = json.loads(report.read_text())
    assert len(lines) == len(cases) > 50
    assert [
        line for line in lines if not line[1].startswith("ConfigError: ") or "\n" in line[1] or line[2] > MOST
    ] == []
    assert [path.name for path in work.iterdir() if path.name.startswith("made")] == []


# ---- files that would run something ----


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("sprung",))


TRAPS = {
    "state.pt": [saved({"x": Trap()}), saved(Trap()), pickle.dumps(Trap(), 2), repacked(
        saved({}), lambda raw: pickle.dumps(Trap(), 2), zipfile.ZIP_STORED)],
    "config.yaml": [
        b"!!python/object/apply:os.mkdir [sprung]",
        b"a: !!python/name:os.mkdir",
        b"model: {_target_: os.mkdir, path: sprung}",
        b"mask: {_target_: os.mkdir, path: sprung}\nmodel: {}\nattention: {}\nposition: {}",
        b"mask: {_target_: minilm.launch.train}\nmodel: {}\nattention: {}\nposition: {}",
    ],
    "tokenizer.json": [pickle.dumps(Trap()), b'{"kind": "bpe", "pattern": "(?{os.mkdir})"}'],
    "model.safetensors": [pickle.dumps(Trap()), saved({"x": Trap()})],
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_files_that_would_run_something_when_unpickled_or_built_run_nothing(
    call, plain_run, tmp_path, monkeypatch, tiny, name
):
    """However they are opened: to generate, to go on, to begin from, to read a tokenizer, to convert."""
    monkeypatch.chdir(tmp_path)
    for number, content in enumerate(TRAPS[name]):
        run = shutil.copytree(plain_run, tmp_path / f"run{number}", symlinks=True)
        forge(checkpoints.find(run), name, content)
        ways = [("train", *tiny, f"resume={run}", "train.max_steps=4")]
        if name != "state.pt":
            ways += [
                ("generate", f"checkpoint={run}", "device=cpu"),
                ("train", *tiny, f"init_from={run}", "out_dir=new"),
                ("convert", f"checkpoint={run}", "to=hf", "out=new"),
            ]
        if name == "tokenizer.json":
            ways += [
                ("train", *tiny, "tokenizer=file", f"tokenizer.path={checkpoints.find(run)}", "out_dir=new")
            ]
        for way in ways:
            result = call(*way)
            assert result.status == 2, way
            assert len(result.err.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {f"run{n}" for n in range(len(TRAPS[name]))}


def test_an_index_of_shards_leads_to_no_other_folder(plain_hf, tmp_path):
    theirs = shutil.copytree(plain_hf, tmp_path / "a" / "theirs")
    (theirs / "model.safetensors").rename(tmp_path / "other.safetensors")
    names = ["../../other.safetensors", str(tmp_path / "other.safetensors")]
    for name in names:
        (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(ConfigError, match=r"theirs/other\.safetensors: there is no such file"):
            interop.import_model(theirs, tmp_path / "out")
