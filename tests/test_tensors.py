"""safetensors a tensor at a time: the library that owns the format reads what is written, and the other way round."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from minilm.errors import ConfigError
from minilm.tensors import DTYPES, Folder, write

TENSORS = {
    "a": torch.randn(3, 5),
    "b.c": torch.arange(4.0),
    "turned": torch.randn(2, 7).T,
    "one": torch.ones(1),
}


def test_the_library_reads_what_is_written_and_each_tensor_is_asked_for_once(tmp_path):
    asked, seen = [], []

    def read(name):
        asked.append(name)
        return TENSORS[name]

    with open(tmp_path / "model.safetensors", "wb") as file:
        shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
        write(file, shapes, read, {"format": "pt"}, lambda done, total: seen.append((done, total)))
    back = load_file(tmp_path / "model.safetensors")
    assert back.keys() == TENSORS.keys()
    assert all(torch.equal(back[name], TENSORS[name]) for name in TENSORS)
    assert asked == list(TENSORS)
    assert seen[-1] == (4 * (15 + 4 + 14 + 1), 4 * (15 + 4 + 14 + 1))


def test_every_type_of_the_format_is_written_as_the_library_would(tmp_path):
    kept = {
        str(dtype): (torch.arange(3) % 2).to(dtype) for dtype in DTYPES
    }  # three bytes would put the next one askew
    kept |= {"none": torch.zeros(0, 4), "number": torch.tensor(2.5), "turned": torch.randn(2, 3).double().T}
    kept |= {"every other": torch.randn(9)[::2], "learned": torch.nn.Parameter(torch.randn(2))}
    shapes = {name: tuple(tensor.shape) for name, tensor in kept.items()}
    with open(tmp_path / "model.safetensors", "wb") as file:
        write(file, shapes, kept.get, {}, dtypes={name: tensor.dtype for name, tensor in kept.items()})
    back = load_file(tmp_path / "model.safetensors")
    assert back.keys() == kept.keys()
    for name, tensor in kept.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].double(), tensor.double())
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    for about in json.loads(raw[8 : 8 + length]).values():
        start, end = about.get("data_offsets", (0, 0))
        width = (end - start) // max(math.prod(about.get("shape", [])), 1)
        assert start % max(width, 1) == 0


def test_a_type_that_the_format_has_not_is_named(tmp_path):
    with (
        open(tmp_path / "x", "wb") as file,
        pytest.raises(TypeError, match=r"a is torch\.complex128, and safeten"),
    ):
        write(file, {"a": (2,)}, lambda name: None, {}, dtypes={"a": torch.complex128})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_folder_of_shards_is_read_in_float32(tmp_path, dtype):
    kept = {name: tensor.to(dtype).contiguous() for name, tensor in TENSORS.items()}
    for shard, names in {"x.safetensors": ["a", "b.c"], "y.safetensors": ["turned", "one"]}.items():
        save_file({name: kept[name] for name in names}, tmp_path / shard)
    index = {"a": "x.safetensors", "b.c": "x.safetensors", "turned": "y.safetensors", "one": "y.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    folder = Folder(tmp_path)
    assert set(folder.names()) == set(TENSORS)
    assert "a" in folder
    assert "d" not in folder
    for name, tensor in kept.items():
        assert folder.shape(name) == tensor.shape
        assert torch.equal(folder.read(name), tensor.float())


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "other.bin",
            b"",
            "model.safetensors: there is no such file; a model's folder holds model.safetensors, or",
        ),
        ("model.safetensors", b"torn", "model.safetensors: not a safetensors file"),
        ("model.safetensors.index.json", b"{}", "index.json: not an index of shards"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../../x"}}', "/x: there is no such file"),
    ],
    ids=["none", "torn", "index", "outside"],
)
def test_what_is_no_folder_of_weights_is_refused(tmp_path, file, content, message):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Folder(tmp_path)
