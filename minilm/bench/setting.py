"""A configuration on this machine: what plans and benches start from."""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch

from minilm.attention.layer import MultiHeadAttention
from minilm.attention.linear import LinearAttention
from minilm.build import build_corpus, build_model, check, construct, keeps_apart
from minilm.cost import Cost, Memory
from minilm.errors import ConfigError
from minilm.model import GPT
from minilm.optim import Optim
from minilm.runtime import (
    DTYPES,
    MachineConfig,
    resolve_device,
    resolve_precision,
    set_up_cpu,
)
from minilm.schedule import Schedule
from minilm.tokenizer import BPE
from minilm.training import TrainConfig

#: what the published encodings hold; other tokenizers know their size, or learn it from the text
VOCABULARIES = {"gpt2": 50257, "cl100k_base": 100277, "o200k_base": 200019}
CHAR = 65  # the alphabet of tiny Shakespeare
DOCUMENT = 256  # tokens


@dataclass(frozen=True)
class Setting:
    """config: the whole configuration. vocab_size: tokens of its tokenizer. precision: fp32, bf16 or fp16."""

    config: dict[str, Any]
    vocab_size: int
    vocab_source: str
    device: torch.device
    precision: str

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        """Raises ConfigError for a device, precision or vocabulary that is not to be had."""
        options = MachineConfig(
            **check(MachineConfig, {key: config[key] for key in MachineConfig.__annotations__}, "")
        )
        set_up_cpu(options.threads)
        device = resolve_device(options.device)
        vocab_size, source = resolve_vocab_size(config)
        return cls(config, vocab_size, source, device, resolve_precision(options.precision, device))

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @cached_property
    def cost(self) -> Cost:
        """The costs of the model; what the configuration gets wrong is refused as when it is built."""
        with torch.device("meta"):  # shapes without numbers
            model = build_model(self.config, self.vocab_size, self.end_token)
        layer, options = model.blocks[0].attention, self.config["attention"]
        if not isinstance(layer, MultiHeadAttention | LinearAttention):
            raise ConfigError(f"attention._target_={options['_target_']}: its costs are not known")
        return Cost(
            model.config,
            mask=model.mask,
            position=type(model.position).__name__,
            qk_norm=options.get("qk_norm", False),
            backend=options.get("backend", "fused"),
            chunk=layer.chunk if isinstance(layer, LinearAttention) else None,
            device=self.device.type,
            documents=model.end_token is not None,
        )

    def model(self) -> GPT:
        """The model with fresh weights, the same ones each time."""
        torch.manual_seed(self.config["seed"])
        return build_model(self.config, self.vocab_size, self.end_token).to(self.device)

    @property
    def end_token(self) -> int:
        """What ends a document where the model is to keep documents apart; for costs any token will do."""
        return self.vocab_size - 1

    def tokens(self, *shape: int) -> torch.Tensor:
        """Random token ids; where the model keeps documents apart, of documents of DOCUMENT tokens on average."""
        ids = torch.randint(self.vocab_size, shape, device=self.device)
        if keeps_apart(self.config):
            ids[torch.rand(shape, device=self.device) < 1 / DOCUMENT] = self.end_token
        return ids


@dataclass(frozen=True)
class Run:
    """A training run that has not begun. windows: those that are in memory at a time."""

    setting: Setting
    train: TrainConfig
    optimizer: str

    @classmethod
    def of(cls, setting: Setting) -> Self:
        """The run that the configuration of a setting asks for. Raises ConfigError where it asks for none."""
        train = TrainConfig(**check(TrainConfig, setting.config["train"], "train"))
        construct(setting.config, "schedule", Schedule).check(train.max_steps)
        return cls(setting, train, type(construct(setting.config, "optim", Optim)).__name__)

    @property
    def windows(self) -> int:
        return min(self.train.micro_batch_size or self.train.batch_size, self.train.batch_size)

    @property
    def tokens(self) -> int:
        """A step's."""
        return self.train.batch_size * self.setting.cost.model.block_size

    @property
    def flops(self) -> float:
        """A step's, the optimizer's included."""
        cost = self.setting.cost
        one = cost.flops(cost.model.block_size, training=True).total
        return self.tokens * one + cost.optimizer_flops(self.optimizer)

    @property
    def memory(self) -> Memory:
        return self.setting.cost.memory(
            self.windows,
            optimizer=self.optimizer,
            precision=self.setting.precision,
            accumulates=self.windows < self.train.batch_size,
        )


def resolve_vocab_size(config: dict[str, Any]) -> tuple[int, str]:
    """The number of tokens and where it is known from: the key vocab_size, or else the tokenizer."""
    said, options = config["vocab_size"], config["tokenizer"]
    kind = str(options.get("_target_")).rpartition(".")[2]
    if said is not None:
        if type(said) is not int or said < 1:
            raise ConfigError(
                f"vocab_size={json.dumps(said)}: a positive whole number, or null for the tokenizer's own"
            )
        return said, "as given"
    if kind == "Char":
        return CHAR, "a guess: characters are counted in the text; vocab_size=… says better"
    if kind == "Byte":
        return (257, "all bytes and an end token") if build_corpus(config).documents else (256, "all bytes")
    if kind == "BPE":
        size = check(
            BPE.fit, {"vocab_size": options.get("vocab_size")}, "tokenizer", exclude=("texts", "end")
        )["vocab_size"]
        if size < 257:
            raise ConfigError(f"tokenizer.vocab_size={size}: 257 or more, all bytes and an end token")
        return size, "tokenizer.vocab_size"
    if options.get("name") in VOCABULARIES:
        return VOCABULARIES[options["name"]], f"that of {options['name']}"
    raise ConfigError(f"tokenizer={kind}: its size is not known without the text, say vocab_size=…")
