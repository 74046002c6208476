"""safetensors files a tensor at a time, so that a model larger than memory can be read and written.

A folder holds its weights in model.safetensors, or in shards that model.safetensors.index.json names. The format: the
header's length in 8 bytes, the header as JSON, the tensors' bytes (https://github.com/huggingface/safetensors).
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import safetensors
import torch
from torch import Tensor

from minilm.errors import ConfigError, one_line

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

#: the format's names
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Folder:
    """The tensors of a folder of safetensors files. Raises ConfigError where there are none, or a shard is missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = [WHOLE]
        if (path / INDEX).is_file():
            try:
                files = sorted(
                    set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
                )
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise ConfigError(f"{path / INDEX}: not an index of shards; copy it again") from None
        self._file_of: dict[str, Path] = {}
        for name in files:
            file = path / Path(str(name)).name  # an index leads nowhere else
            with _open(file) as tensors:
                self._file_of |= dict.fromkeys(tensors.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        with _open(self._file_of[name]) as tensors:
            return tuple(tensors.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """A tensor in float32. Its file is closed again, so that what was read before is not kept in memory."""
        with _open(self._file_of[name]) as tensors:
            try:
                return tensors.get_tensor(name).to(torch.float32, copy=True)
            except RuntimeError as error:  # a shape or a type that torch has not
                raise ConfigError(
                    f"{self._file_of[name]}: {name} cannot be read ({one_line(error):.200})"
                ) from None


def _open(file: Path):
    if not file.is_file():
        raise ConfigError(
            f"{file}: there is no such file; a model's folder holds {WHOLE}, or shards and {INDEX}"
        )
    try:
        return safetensors.safe_open(file, framework="pt", device="cpu")
    except (safetensors.SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: not a safetensors file ({error}); copy it again") from None


def write(
    file: BinaryIO,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    about: Mapping[str, str],
    progress: Callable[[int, int], object] = lambda done, total: None,
    *,
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:
    """Write tensors of these shapes, each of them read when its turn comes, and let go of at once. The same ones make
    the same bytes.

    about: what the header says besides. progress: called with the bytes written and those there are. dtypes: of those
    that are not float32; TypeError for one that the format has not.
    """
    kinds = {name: dtypes.get(name, torch.float32) for name in shapes}
    for name, dtype in kinds.items():
        if dtype not in DTYPES:
            raise TypeError(f"{name} is {dtype}, and safetensors holds {', '.join(map(str, DTYPES))}")
    names = sorted(shapes, key=lambda name: -kinds[name].itemsize)  # each begins at a multiple of its width
    header: dict[str, object] = {"__metadata__": dict(about)}
    end = 0
    for name in names:
        start, end = end, end + kinds[name].itemsize * torch.Size(shapes[name]).numel()
        header[name] = {
            "dtype": DTYPES[kinds[name]],
            "shape": list(shapes[name]),
            "data_offsets": [start, end],
        }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)
    done = 0
    for name in names:
        tensor = read(name).detach()
        assert (tensor.dtype, tensor.shape) == (kinds[name], shapes[name])
        file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        done += tensor.nbytes
        progress(done, end)
