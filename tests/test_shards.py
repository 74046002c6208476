"""Tokens on a disk: the right ones, in whole files, the same bytes however often the work was stopped."""

import copy
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import TEXT

from minilm import shards
from minilm.shards import PARTS, Encoder, Piece, Shards, open_part, path_of, prepare, total
from minilm.tokenizer import BPE, Byte, Char

DOCUMENTS = [TEXT[i : i + 100] for i in range(0, 3000, 100)]
TOKENIZER = BPE.fit(TEXT, vocab_size=300)


def pieces():
    """Every fifth document is for validation; each eighth comes in two pieces."""
    for i, text in enumerate(DOCUMENTS):
        part = "val" if i % 5 == 0 else "train"
        halves = [text[:50], text[50:]] if i % 8 == 0 else [text]
        for n, half in enumerate(halves, start=1):
            yield Piece(half, n == len(halves), i, part=part)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(shards, "BATCH", 150)


def made(folder, tokenizer=TOKENIZER, workers=1, shard_tokens=200, **options):
    facts = {"source": "test"}
    return prepare(
        pieces, encoder(tokenizer), folder, facts, workers=workers, shard_tokens=shard_tokens, **options
    )


def encoder(tokenizer=TOKENIZER):
    return Encoder(tokenizer, 0.1)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "tokenizer", [Char.fit(TEXT, end=True), Byte(end=True), TOKENIZER], ids=["char", "byte", "bpe"]
)
def test_an_end_token_stands_after_each_document(tmp_path, tokenizer):
    manifest = made(tmp_path, tokenizer)
    for part in PARTS:
        own = [text for i, text in enumerate(DOCUMENTS) if (i % 5 == 0) == (part == "val")]
        tokens = open_part(tmp_path, manifest, part)
        assert tokens.dtype == {258: "uint8", 257: "uint16", 300: "uint16"}.get(tokenizer.vocab_size, "uint8")
        texts = np.split(tokens[:], np.flatnonzero(tokens[:] == tokenizer.end_token) + 1)
        assert [tokenizer.decode(ids[:-1].tolist()) for ids in texts] == [*own, ""]
        assert total(manifest, part, "documents") == len(own)
        assert total(manifest, part, "tokens") == len(tokens)
        assert total(manifest, part, "bytes") == sum(len(text.encode()) for text in own)


def test_the_manifest_tells_what_is_in_each_file(tmp_path):
    manifest = made(tmp_path)
    assert manifest == json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["source"] == "test"
    assert len(manifest["shards"]) > 3
    for i, shard in enumerate(manifest["shards"]):
        for part in PARTS:
            raw = path_of(tmp_path, i, part).read_bytes()
            assert hashlib.sha256(raw).hexdigest() == shard[part]["sha256"]
            assert len(raw) == 2 * shard[part]["tokens"]
    assert all(sum(shard[part]["tokens"] for part in PARTS) >= 200 for shard in manifest["shards"][:-1])


def test_the_number_of_processes_changes_nothing(tmp_path):
    done = []
    made(tmp_path / "one")
    made(tmp_path / "two", workers=2, progress=done.append)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert done[-1] == len(DOCUMENTS) - 1
    assert done == sorted(done)


def test_what_is_whole_is_not_made_again(tmp_path):
    made(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    prepare(lambda: pytest.fail("read again"), encoder(), tmp_path, {}, workers=1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("damage", ["cut short", "gone", "changed", "no manifest"])
def test_what_is_damaged_is_made_again_and_the_rest_kept(tmp_path, damage):
    made(tmp_path)
    whole, second = files(tmp_path), path_of(tmp_path, 1, "train")
    kept = path_of(tmp_path, 0, "train").stat().st_mtime_ns
    manifest = json.loads(whole["manifest.json"])
    if damage == "cut short":
        second.write_bytes(whole[second.name][:-1])
    elif damage == "gone":
        second.unlink()
    elif damage == "changed":  # sums are looked at where the work goes on
        second.write_bytes(bytes(len(whole[second.name])))
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"whole": False}))
    else:
        (tmp_path / "manifest.json").unlink()
    made(tmp_path)
    assert files(tmp_path) == whole
    assert "manifest" in damage or path_of(tmp_path, 0, "train").stat().st_mtime_ns == kept


def places(tree, above=()):
    """The keys that lead to each value of plain JSON, at every depth."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from places(value, (*above, key))


def test_a_manifest_that_lacks_something_or_has_another_kind_in_its_place_is_none(tmp_path):
    manifest = made(tmp_path)
    manifest["shards"] = manifest["shards"][:2]
    assert shards.read(tmp_path) is not None
    needed = [place for place in places(manifest) if place != ("source",)]
    assert len(needed) == 3 + 2 * (1 + 1 + 2 + 2 * 4)
    for *above, last in needed:
        for value in ("gone", None, [], {}, [None], -1, 0.5):
            damaged = copy.deepcopy(manifest)
            inner = functools.reduce(lambda tree, key: tree[key], above, damaged)
            if value == [] and last == "shards":
                continue  # nothing is there yet
            if value != "gone":
                inner[last] = value
            elif isinstance(inner, dict):
                del inner[last]
            else:
                continue  # one shard less
            (tmp_path / "manifest.json").write_text(json.dumps(damaged))
            assert shards.read(tmp_path) is None, (*above, last, value)


@pytest.mark.parametrize(
    "text", ["", "{", "null", '{"whole": true}', '{"whole": true, "shards": []}', "[" * 100_000, "uint8"]
)
def test_a_damaged_manifest_is_noticed_and_all_is_made_anew(tmp_path, text):
    made(tmp_path)
    whole = files(tmp_path)
    if text == "uint8":
        text = whole["manifest.json"].decode().replace("uint16", "uint8")
    (tmp_path / "manifest.json").write_text(text)
    with pytest.warns(UserWarning, match="damaged, and made anew"):
        made(tmp_path)
    assert files(tmp_path) == whole


def test_a_lot_of_tokens_is_as_wide_as_they_are(tmp_path):
    for tokenizer in (Char.fit(TEXT, end=True), Byte(end=True), TOKENIZER):
        given = []
        encode = encoder(tokenizer)
        with pytest.MonkeyPatch.context() as patch:
            joined = np.concatenate
            patch.setattr(np, "concatenate", lambda runs: given.extend(runs) or joined(runs))  # noqa: B023
            encode([Piece("some text", True, 0, part="train")])
        assert {run.dtype for run in given} == {encode.dtype}


KILLED = """
import multiprocessing, sys, time

def slowly():
    for i, piece in enumerate(test_shards.pieces()):
        if i == 20:
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)
            time.sleep(600)
        yield piece

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])
    import test_shards
    from minilm import shards

    shards.BATCH = 150
    folder, facts = shards.Path(sys.argv[1]), {"source": "test"}
    shards.prepare(slowly, test_shards.encoder(), folder, facts, workers=2, shard_tokens=200)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_preparation_that_was_killed_goes_on_and_leaves_the_same_bytes(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, str(script), str(killed), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        process.send_signal(signal.SIGKILL)
    assert len(workers) == 2
    left = json.loads((killed / "manifest.json").read_text())
    assert not left["whole"]
    assert left["shards"]
    before = {path: path.stat().st_mtime_ns for path in killed.glob("*.bin")}
    rest = sum(shard["pieces"] for shard in left["shards"])
    made(killed)
    made(whole)
    assert files(killed) == files(whole)
    assert rest > 5
    for i in range(len(left["shards"])):  # the whole ones were left as they were
        for part in PARTS:
            path = path_of(killed, i, part)
            assert path.stat().st_mtime_ns == before[path]
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_several_arrays_are_read_as_one():
    parts = [np.arange(5), np.arange(0), np.arange(5, 6), np.arange(6, 20)]
    whole, one = Shards(parts), np.arange(20)
    assert len(whole) == 20
    for index in (0, 5, 19, slice(None), slice(4, 8), slice(18, 99), np.array([[0, 4, 5], [6, 19, 0]])):
        assert np.array_equal(whole[index], one[index])
    for outside in (20, -1, np.array([3, 20])):
        with pytest.raises(IndexError):
            whole[outside]
    assert len(Shards([])[:]) == 0


def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_what_was_read_does_not_stay_resident(tmp_path):
    size = 1 << 26
    with open(tmp_path / "tokens.bin", "wb") as file:
        file.truncate(size)
    mapped = np.memmap(tmp_path / "tokens.bin", np.uint16, mode="r")
    windows = np.arange(0, size // 2, 1024).reshape(-1, 64)  # a token of each half page
    before = resident()
    for rows in windows:
        Shards([mapped])[rows]
    assert resident() - before < size / 8
    mapped[windows]
    assert resident() - before > size / 2  # a check of the check: plainly mapped, it does
