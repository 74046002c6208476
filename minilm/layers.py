"""The parts of a block that are not attention: norms and feed-forward layers, by name.

Shapes: (B, T, C) -> (B, T, C).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minilm.errors import ConfigError


class Dropout(nn.Dropout):
    """nn.Dropout (Srivastava et al. 2014); on a CPU the elements to drop are drawn ten times as fast.

    There an element is dropped where 16 random bits make a number below p · 2¹⁶, so p counts to the nearest 2⁻¹⁶. They
    come from PyTorch's own generator.
    """

    def forward(self, x: Tensor) -> Tensor:
        dropped = round(self.p * 2**16)
        few = not 0 < dropped < 2**16  # to drop or to keep, too few for 16 bits
        if not self.training or few or x.device.type != "cpu":
            return super().forward(x)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64)
        words.random_(torch.iinfo(torch.int64).min, None)  # 64 bits each
        bits = words.view(torch.int16)[: x.numel()].view_as(x)
        # numbers, as products with truth values are slow
        kept = torch.ge(bits, dropped - 2**15, out=torch.empty_like(x, requires_grad=False))
        return x * kept.mul_(2**16 / (2**16 - dropped))


def usual_width(name: str, n_embd: int) -> int:
    """Channels inside a feed-forward layer, unless said otherwise: every kind costs about as much."""
    if name == "swiglu":  # three matrices in place of two; a multiple of 8, for the hardware
        return -(-8 * n_embd // 3 // 8) * 8
    return 4 * n_embd


class GeluMLP(nn.Module):
    """Widen (four times, as a rule), GELU, narrow (Hendrycks & Gimpel 2016; Radford et al. 2019)."""

    def __init__(self, n_embd: int, width: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(n_embd, width, bias=bias)
        self.out = nn.Linear(width, n_embd, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x)))


class GeluTanhMLP(GeluMLP):
    """The same with GELU's tanh approximation, as in OpenAI's GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x), approximate="tanh"))


class ReluSquaredMLP(GeluMLP):
    """The same with ReLU² (So et al. 2021, Primer)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.up(x)).square())


class SwigluMLP(nn.Module):
    """A gated layer, 8/3 as wide as a rule (Shazeer 2020)."""

    def __init__(self, n_embd: int, width: int, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(n_embd, width, bias=bias)
        self.up = nn.Linear(n_embd, width, bias=bias)
        self.out = nn.Linear(width, n_embd, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(x)) * self.up(x))


class NoMLP(nn.Module):
    """None: a model of attention alone (Elhage et al. 2021)."""

    def __init__(self, n_embd: int, width: int, bias: bool) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


MLPS: dict[str, Callable[[int, int, bool], nn.Module]] = {
    "gelu": GeluMLP,
    "gelu_tanh": GeluTanhMLP,
    "relu2": ReluSquaredMLP,
    "swiglu": SwigluMLP,
    "none": NoMLP,
}
NORMS: dict[str, Callable[[int, bool, float | None], nn.Module]] = {
    "layernorm": lambda n_embd, bias, eps: nn.LayerNorm(n_embd, bias=bias, eps=1e-5 if eps is None else eps),
    "rmsnorm": lambda n_embd, bias, eps: nn.RMSNorm(n_embd, eps=eps),  # no bias (Zhang & Sennrich 2019)
}


def named(key: str, name: str, table: dict[str, Callable]) -> Callable:
    """The entry of a table of parts, or a ConfigError that lists the names it has."""
    if name not in table:
        raise ConfigError(f"{key}={name}: expected one of {', '.join(table)}")
    return table[name]
