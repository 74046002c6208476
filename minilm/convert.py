"""What scripts/convert.py does: a model, or its tokenizer, from one format into another."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from minilm import checkpoint as checkpoints
from minilm import files, tokenizer_files
from minilm import tokenizer as tokenizers
from minilm.build import Name, check
from minilm.console import bar
from minilm.errors import ConfigError
from minilm.interop import export, import_model


@dataclass(frozen=True)
class ConvertConfig:
    """configs/convert.yaml, but for `from`, which Python keeps for itself."""

    to: Literal["hf", "tiktoken"] | None
    checkpoint: Name
    path: Name | None
    out: Name


def convert(config: dict[str, Any]) -> list[str]:
    """Convert as the configuration says; returns lines for a person. Raises ConfigError before anything is written."""
    source = config["from"]
    options = ConvertConfig(**check(ConvertConfig, {k: v for k, v in config.items() if k != "from"}, ""))
    if source not in (None, "hf"):
        raise ConfigError(f"from={source}: expected hf or null")
    if (source is None) == (options.to is None):
        raise ConfigError(
            "say either to=hf or to=tiktoken, with checkpoint=RUN out=FOLDER, or from=hf, with path=FOLDER out=FOLDER"
        )
    if source:
        if options.path is None:
            raise ConfigError("from=hf: say path=…, the folder that holds config.json and *.safetensors")
        with bar("tensors") as progress:
            name = import_model(options.path, options.out, progress)
        command = f"python scripts/generate.py checkpoint={quote(options.out)} prompt=…"
    elif options.path is not None:
        raise ConfigError(f"path={options.path}: goes with from=hf; to={options.to} reads checkpoint=…")
    elif options.to == "hf":
        with bar("tensors") as progress:
            name = export(options.checkpoint, options.out, progress)
        command = f"transformers.AutoModelForCausalLM.from_pretrained({options.out!r})"
    else:
        name = export_ranks(options.checkpoint, options.out)
        command = f"python scripts/train.py tokenizer=file tokenizer.path={quote(options.out)}"
    return [f"{name} in {options.out}", f"next: {command}"]


def export_ranks(checkpoint: str, out: str) -> str:
    """The byte pairs of a checkpoint's tokenizer as tiktoken reads them."""
    folder = checkpoints.find(checkpoint)
    if problem := checkpoints.damage(folder, [checkpoints.TOKENIZER]):
        raise ConfigError(f"checkpoint {folder}: {problem}")
    tokenizer = tokenizers.from_dict(checkpoints.read(folder / checkpoints.TOKENIZER))
    contents = tokenizer_files.to_tiktoken(tokenizer)
    with files.new_folder(Path(out)) as new:
        for name, content in contents.items():
            files.write_synced(new / name, content)
    return f"{tokenizer.vocab_size} tokens"
