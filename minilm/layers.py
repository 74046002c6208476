"""The parts of a block that are not attention: norms and feed-forward layers, by name.

Shapes: (B, T, C) -> (B, T, C).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minilm.errors import ConfigError


class GeluMLP(nn.Module):
    """Widen four times or to n_inner, GELU, narrow (Hendrycks & Gimpel 2016; Radford et al. 2019)."""

    def __init__(self, n_embd: int, bias: bool, n_inner: int | None = None) -> None:
        super().__init__()
        n_inner = n_inner or 4 * n_embd
        self.up = nn.Linear(n_embd, n_inner, bias=bias)
        self.out = nn.Linear(n_inner, n_embd, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x)))


class ReluSquaredMLP(GeluMLP):
    """The same with ReLU² (So et al. 2021, Primer)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.up(x)).square())


class SwigluMLP(nn.Module):
    """A gated layer, 8/3 as wide so that it costs what the others do (Shazeer 2020)."""

    def __init__(self, n_embd: int, bias: bool, n_inner: int | None = None) -> None:
        super().__init__()
        n_inner = n_inner or -(-8 * n_embd // 3 // 8) * 8  # a multiple of 8, for the hardware
        self.gate = nn.Linear(n_embd, n_inner, bias=bias)
        self.up = nn.Linear(n_embd, n_inner, bias=bias)
        self.out = nn.Linear(n_inner, n_embd, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(x)) * self.up(x))


class NoMLP(nn.Module):
    """None: a model of attention alone (Elhage et al. 2021)."""

    def __init__(self, n_embd: int, bias: bool, n_inner: int | None = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


MLPS: dict[str, Callable[[int, bool, int | None], nn.Module]] = {
    "gelu": GeluMLP,
    "relu2": ReluSquaredMLP,
    "swiglu": SwigluMLP,
    "none": NoMLP,
}
NORMS: dict[str, Callable[[int, bool], nn.Module]] = {
    "layernorm": lambda n_embd, bias: nn.LayerNorm(n_embd, bias=bias),
    "rmsnorm": lambda n_embd, bias: nn.RMSNorm(n_embd),  # has no bias (Zhang & Sennrich 2019)
}


def named(key: str, name: str, table: dict[str, Callable]) -> Callable:
    """The entry of a table of parts, or a ConfigError that lists the names it has."""
    if name not in table:
        raise ConfigError(f"{key}={name}: expected one of {', '.join(table)}")
    return table[name]
