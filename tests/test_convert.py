"""scripts/convert.py: what it writes, what it says, and what people type wrong."""

import json

import pytest

from minilm import checkpoint
from minilm.tokenizer import BPE
from minilm.tokenizer_files import from_tiktoken


def test_to_hf_and_back(call, plain_run, tmp_path):
    result = call("convert", "to=hf", f"checkpoint={plain_run}", f"out={tmp_path / 'hf'}")
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith(f"ApertusForCausalLM in {tmp_path / 'hf'}\nnext: ")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }
    result = call("convert", "from=hf", f"path={tmp_path / 'hf'}", f"out={tmp_path / 'back'}")
    assert result.status == 0, result.err
    ours, back = (checkpoint.load(path, state=False) for path in (plain_run, tmp_path / "back"))
    assert all((ours.weights[name] == back.weights[name]).all() for name in ours.weights)
    assert call("generate", f"checkpoint={tmp_path / 'back'}", "prompt=The", "max_new_tokens=3").status == 0


def test_to_tiktoken(call, tmp_path):
    tokenizer = BPE.fit("the cat sat on the mat, the cat sat\n" * 9, 262)
    checkpoint.save(tmp_path / "run", 1, weights={}, state={}, config={}, tokenizer=tokenizer.to_dict())
    result = call("convert", "to=tiktoken", f"checkpoint={tmp_path / 'run'}", f"out={tmp_path / 'bpe'}")
    assert result.status == 0, result.err
    assert from_tiktoken(tmp_path / "bpe").to_dict() == tokenizer.to_dict()
    assert json.loads((tmp_path / "bpe" / "encoding.json").read_text())["special_tokens"] == {
        "<|endoftext|>": 261
    }


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("out=x", "say either to=hf or to=tiktoken, with checkpoint=RUN out=FOLDER, or from=hf"),
        ("to=hf from=hf out=x", "say either to=hf or to=tiktoken"),
        ("to=hf", "out has no value: say out=…"),
        ("to=onnx out=x", "to=onnx: expected hf or tiktoken or null"),
        ("from=onnx path=x out=y", "from=onnx: expected hf or null"),
        ("from=hf out=x", "from=hf: say path=…"),
        ("to=hf path=x out=y", "path=x: goes with from=hf; to=hf reads checkpoint=…"),
        ("from=hf path=nowhere out=x", "nowhere/config.json: cannot be read"),
        ("to=hf checkpoint=nowhere out=x", "no checkpoint at nowhere"),
        ("to=tiktoken checkpoint={run} out=x", "this model's tokenizer is char; byte pairs alone have ranks"),
        ("to=hf checkpoint={run} out={run}", "is there already: name a new folder"),
        ("too=hf out=x", "too: no such key; did you mean to?"),
    ],
)
def test_what_people_type_wrong_is_told_in_one_line(call, plain_run, tmp_path, monkeypatch, said, message):
    monkeypatch.chdir(tmp_path)
    result = call("convert", *said.format(run=plain_run).split())
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("convert: ")
    assert result.err.count("\n") == 1
    assert message in result.err
    assert list(tmp_path.iterdir()) == []
