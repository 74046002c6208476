"""What scripts/evaluate.py does: how well a model predicts a text."""

from dataclasses import dataclass
from typing import Any

from minilm.build import Name, check, restore
from minilm.console import bar
from minilm.data import TokenData, read_text
from minilm.errors import ConfigError
from minilm.evaluation import evaluate, perplexity
from minilm.runtime import Precision, autocast, resolve_device, resolve_precision, set_up_cpu
from minilm.trouble import machine_trouble


@dataclass(frozen=True)
class ScoreConfig:
    """configs/evaluate.yaml, but for its section data."""

    checkpoint: Name
    batch_size: int
    stride: int | None
    device: str
    precision: Precision
    threads: int | None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}: a positive whole number")


@dataclass(frozen=True)
class Source:
    """The section data."""

    path: str


def score(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values for a person. Raises ConfigError before anything is computed."""
    options = ScoreConfig(**check(ScoreConfig, {k: v for k, v in config.items() if k != "data"}, ""))
    source = Source(**check(Source, config["data"], "data"))
    set_up_cpu(options.threads)
    device = resolve_device(options.device)
    precision = resolve_precision(options.precision, device)
    text = read_text(source.path, key="data.path")
    model, tokenizer, saved = restore(options.checkpoint, device)
    size = model.config.block_size
    if options.stride is not None and not 1 <= options.stride <= size:
        raise ConfigError(
            f"stride={options.stride}: a whole number from 1 to the model's block_size={size}, or null"
        )
    if model.mask.lookahead > size:
        raise ConfigError("mask=none shows each token its own target: there is no perplexity")
    tokens = tokenizer.encode_array(text)
    given = max(1, int(model.mask.lookahead))  # tokens that the mask shows to one another
    if len(tokens) <= given:
        count = "1 token" if len(tokens) == 1 else f"{len(tokens)} tokens"
        first = (
            "the first one is" if given == 1 else f"the first {given}, which its mask shows the model, are"
        )
        raise ConfigError(f"data.path={source.path}: {count}, and {first} not predicted; give more")
    lower = f"batch_size={options.batch_size} and the context block_size={size}: lower batch_size"
    with machine_trouble(lower), bar("windows") as progress:
        loss = evaluate(
            model,
            tokens,
            block_size=size,
            batch_size=options.batch_size,
            stride=options.stride,
            autocast=autocast(device, precision),
            progress=progress,
        )
    data = TokenData(tokens[:0], tokens, len(text.encode()), None)
    return [
        ("checkpoint", f"{saved.path}"),
        ("text", f"{len(tokens):,} tokens, {data.val_bytes:,} bytes"),
        ("context", f"{size} tokens, {'without' if options.stride in (None, size) else 'with'} overlap"),
        ("nats per token", f"{loss:.4f}"),
        ("perplexity", f"{perplexity(loss):.4g}"),
        ("bits per byte", f"{data.bits_per_byte(loss):.4f}"),
    ]
