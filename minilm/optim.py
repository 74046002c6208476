"""Which optimizer updates which parameter. Every trainable parameter is in exactly one group."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minilm.errors import ConfigError
from minilm.muon import BatchedMuon

#: what each optimizer keeps of a parameter, by name: the count of its steps, else a tensor of the parameter's shape
REMEMBERED = {torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"}, BatchedMuon: {"momentum_buffer"}}


class Optim(ABC):
    """Which optimizers, with which rates, for which parameters."""

    @abstractmethod
    def build(self, model: nn.Module) -> list[Optimizer]: ...


@dataclass(frozen=True)
class AdamW(Optim):
    """AdamW for everything (Loshchilov & Hutter 2019). Weight decay spares norms, biases and embeddings.

    decay_embeddings: decay them as well, as GPT-2's trainers do.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_embeddings: bool = False

    def __post_init__(self) -> None:
        check_rates("optim", lr=self.lr, weight_decay=self.weight_decay, eps=self.eps)
        check_shares("optim", betas=self.betas)

    def build(self, model: nn.Module) -> list[Optimizer]:
        matrices, stacks, tables, vectors = sort_parameters(model)
        plain = vectors if self.decay_embeddings else vectors + tables
        decayed = matrices + stacks + (tables if self.decay_embeddings else [])
        return [_adamw(self, [(decayed, self.weight_decay), (plain, 0.0)], self.lr)]


@dataclass(frozen=True)
class Muon(Optim):
    """Muon for the matrices inside the blocks, AdamW for embeddings, head, norms, biases and what has more dimensions.

    Muon (Jordan et al. 2024) steps along the orthogonalised momentum of a matrix, with a rate on the scale of
    AdamW's (Liu et al. 2025).
    """

    lr: float = 1e-2
    momentum: float = 0.95
    weight_decay: float = 0.1
    adam_lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_rates("optim", lr=self.lr, weight_decay=self.weight_decay, adam_lr=self.adam_lr, eps=self.eps)
        check_shares("optim", betas=self.betas, momentum=(self.momentum,))

    def build(self, model: nn.Module) -> list[Optimizer]:
        matrices, stacks, tables, vectors = sort_parameters(model)
        head = [p for name, p in model.named_parameters() if name.endswith("head.weight") and p.requires_grad]
        outer = {id(p) for p in head}
        inner = [p for p in matrices if id(p) not in outer]
        muon = BatchedMuon(inner, self.lr, self.momentum, self.weight_decay)
        rest = [p for p in matrices if id(p) in outer] + tables + vectors
        return [muon, _adamw(self, [(rest, 0.0), (stacks, self.weight_decay)], self.adam_lr)]


class Sorted(NamedTuple):
    """A model's trainable parameters, each once.

    stacks: of three dimensions or more. tables: what an embedding holds; a tied head counts as the table it is.
    vectors: scalars too.
    """

    matrices: list[nn.Parameter]
    stacks: list[nn.Parameter]
    tables: list[nn.Parameter]
    vectors: list[nn.Parameter]


def sort_parameters(model: nn.Module) -> Sorted:
    held = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    others = [p for p in parameters if id(p) not in held]
    return Sorted(
        matrices=[p for p in others if p.dim() == 2],
        stacks=[p for p in others if p.dim() > 2],
        tables=[p for p in parameters if id(p) in held],
        vectors=[p for p in others if p.dim() < 2],
    )


def _adamw(options: "AdamW | Muon", groups: list[tuple[list[nn.Parameter], float]], lr: float) -> Optimizer:
    return torch.optim.AdamW(
        [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters],
        lr=lr,
        betas=options.betas,
        eps=options.eps,
        fused=True,
    )


def load_states(optimizers: list[Optimizer], states: list[dict[str, Any]]) -> None:
    """What optimizers remembered of an earlier run; rates and other options stay those that they were built with."""
    try:
        for optimizer, state in zip(optimizers, states, strict=True):
            built = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, options in zip(optimizer.param_groups, built, strict=True):
                group.update(options)
            if not all(_fits(p, kept, REMEMBERED[type(optimizer)]) for p, kept in optimizer.state.items()):
                raise ValueError
    except torch.OutOfMemoryError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        raise ConfigError(
            "optim: a resumed run may change its rates, but not which optimizer updates which parameter"
        ) from None


def _fits(p: Any, kept: Any, names: set[str]) -> bool:
    """Whether this is what an optimizer that remembers `names` keeps of a parameter."""
    return (
        isinstance(p, Tensor)
        and kept.keys() == names
        and all(isinstance(value, Tensor) and value.is_floating_point() for value in kept.values())
        and all(value.shape == (() if name == "step" else p.shape) for name, value in kept.items())
    )


def check_rates(section: str, **rates: float) -> None:
    for key, rate in rates.items():
        if not 0 <= rate < float("inf"):
            raise ConfigError(f"{section}.{key}={rate}: a finite number, 0 or more")


def check_shares(section: str, **shares: tuple[float, ...]) -> None:
    """Of the past that a running mean keeps."""
    for key, values in shares.items():
        for share in values:
            if not 0 <= share < 1:
                raise ConfigError(f"{section}.{key}: {share} is not from 0 to below 1")
