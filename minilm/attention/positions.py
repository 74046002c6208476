"""How order enters attention. Four hooks, each the identity unless a scheme says otherwise.

    embed(x, pos)               once, on the token embeddings
    rotation(pos), rotate(x, …) on queries and keys
    bias(head, q_pos, k_pos, …) added to the scaled scores

Shapes: B batch, H heads, T tokens, C model width, D head width; pos is (T,) or (B, T), −1 an empty slot.
Adding a scheme is a small class here and one file in configs/position/.
"""

import math

import torch
from torch import Tensor, nn

from minilm.errors import ConfigError

Rotation = tuple[Tensor, Tensor]


class Position(nn.Module):
    """No positions at all; the base of every scheme."""

    #: may run past block_size: nothing was learned or tabled for an absolute index
    relative = True
    #: adds `bias` to the scores
    biased = False

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        return x

    def rotation(self, pos: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation | None:
        """What `rotate` needs, made once for all layers."""
        return None

    def bias(self, head: Tensor, q_pos: Tensor, k_pos: Tensor, dtype: torch.dtype) -> Tensor:
        """Added to the scaled score of `head` between the two positions; broadcasts, made in `dtype`."""
        raise NotImplementedError


class NoPosition(Position):
    """Order unseen but for the mask (Kazemnejad et al. 2023 measure how far that goes)."""


class Sinusoidal(Position):
    """Fixed sines and cosines added to the embeddings (Vaswani et al. 2017, sec. 3.5)."""

    relative = False

    def __init__(self, *, n_embd: int, base: float = 10000.0) -> None:
        super().__init__()
        if n_embd % 2:
            raise ConfigError(
                f"model.n_embd={n_embd}: position=sinusoidal pairs the channels, take an even width"
            )
        self.base = base

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        cos, sin = _angles(pos, x.shape[-1], self.base)
        return x + torch.stack((sin, cos), dim=-1).flatten(-2).to(x.dtype)


class Learned(Position):
    """A trained vector for each of block_size positions, added to the embeddings (Radford et al. 2018)."""

    relative = False

    def __init__(self, *, n_embd: int, block_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(block_size, n_embd)

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        if pos.shape[-1] > self.table.num_embeddings:
            raise ConfigError(
                f"{pos.shape[-1]} tokens, but position=learned knows model.block_size={self.table.num_embeddings} "
                "positions: read fewer at a time, or choose position=rope, alibi, sinusoidal or none"
            )
        return x + self.table(pos.clamp(min=0))


class Rotary(Position):
    """Rotates pairs of query and key channels by angles that grow with position (Su et al. 2021, RoPE).

    Channel i pairs with i + D/2, as in GPT-NeoX and Llama.
    """

    def __init__(self, *, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ConfigError(
                f"head_dim={head_dim} (model.n_embd / model.n_head): position=rope rotates pairs of channels, "
                "choose an even head_dim"
            )
        if base <= 1:
            raise ConfigError(f"position.base={base}: the longest wavelength must exceed 1, 10000 is usual")
        self.base = base

    def rotation(self, pos: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
        cos, sin = _angles(pos, head_dim, self.base)  # (…, T, D/2)
        if pos.dim() == 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # a row's own positions, the same for its heads
        dtype = at_least_float32(dtype)  # rounded to bf16, an angle's sine is off by up to 0.2 %
        return cos.to(dtype), sin.to(dtype)


class Alibi(Position):
    """Scores fall off linearly with distance, each head at its own slope (Press et al. 2022)."""

    biased = True

    def __init__(self, *, n_head: int) -> None:
        super().__init__()
        self.power = 2 ** math.floor(math.log2(n_head))

    def bias(self, head: Tensor, q_pos: Tensor, k_pos: Tensor, dtype: torch.dtype) -> Tensor:
        # Head i of p, a power of two, falls off at 2^(−8i/p). Heads past p take every other slope of 2p's series.
        # A formula, not a table: FlexAttention calls it for one head at a time, and no cast can round it.
        i = torch.where(head < self.power, head + 1, head - self.power + 0.5)
        return -torch.exp2(i.to(dtype) * (-8 / self.power)) * (q_pos - k_pos).abs()


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def rotate(x: Tensor, rotation: Rotation | None) -> Tensor:
    """(B, H, T, D) -> (B, H, T, D), each pair of channels turned by its token's angles."""
    if rotation is None:
        return x
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _angles(pos: Tensor, width: int, base: float) -> Rotation:
    """Cosines and sines of pos · base^(−2i/width), (…, T) -> (…, T, width/2) each.

    Made afresh in at least float32, never stored in the model: a table that is cast down to bf16 with the
    weights puts distant positions on the wrong angle.
    """
    dtype = torch.float32 if pos.device.type == "mps" else torch.float64  # mps has no float64
    exponent = torch.arange(0, width, 2, device=pos.device, dtype=dtype) / width
    angle = pos.to(dtype).unsqueeze(-1) * base**-exponent
    return angle.cos(), angle.sin()
