"""How order enters attention. A scheme has one hook or more; what it lacks does nothing.

    embed(x, pos)                  the token embeddings with positions in them, once
    rotation(pos, …)               the angles by which `rotate` turns queries and keys
    bias(head, q_pos, k_pos, …)    what is added to the scaled scores

Shapes: B batch, H heads, T tokens, C model width, D head width; pos is (T,) or (B, T), −1 an empty slot.
Adding a scheme is a small class here and one file in configs/position/.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from minilm.errors import ConfigError

Rotation = tuple[Tensor, Tensor]


class Position(nn.Module):
    """No positions at all; the base of every scheme.

    biased: has the hook `bias`. relative: may run past block_size, as nothing hangs on an absolute index; so are all
    without the hook `embed`, and one with it that says `relative = True` in its class.
    """

    biased, relative = False, True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.biased = cls.bias is not Position.bias
        cls.relative = vars(cls).get("relative", cls.embed is Position.embed)

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        return x

    def rotation(self, pos: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation | None:
        """What `rotate` needs, made once for all layers."""
        return None

    def bias(self, head: Tensor, q_pos: Tensor, k_pos: Tensor, dtype: torch.dtype) -> Tensor:
        """Added to the scaled score of `head` between the two positions; broadcasts, made in `dtype`. Not asked of a
        scheme that is not `biased`.
        """
        raise NotImplementedError


class NoPosition(Position):
    """Order unseen but for the mask (Kazemnejad et al. 2023 measure how far that goes)."""


class Sinusoidal(Position):
    """Fixed sines and cosines added to the embeddings (Vaswani et al. 2017, sec. 3.5)."""

    def __init__(self, *, n_embd: int, base: float = 10000.0) -> None:
        super().__init__()
        if n_embd % 2:
            raise ConfigError(
                f"model.n_embd={n_embd}: position=sinusoidal pairs the channels, take an even width"
            )
        self.base = base

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        cos, sin = _angles(pos, _frequencies(x.shape[-1], self.base, pos))
        return x + torch.stack((sin, cos), dim=-1).flatten(-2).to(x.dtype)


class Learned(Position):
    """A trained vector for each of block_size positions, added to the embeddings (Radford et al. 2018)."""

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

    def frequencies(self, head_dim: int, like: Tensor) -> Tensor:
        """Radians a position, (D/2,)"""
        return _frequencies(head_dim, self.base, like)

    def rotation(self, pos: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
        cos, sin = _angles(pos, self.frequencies(head_dim, pos))  # (…, T, D/2)
        if pos.dim() == 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # a row's own positions, the same for its heads
        dtype = at_least_float32(dtype)  # rounded to bf16, an angle's sine is off by up to 0.2 %
        return cos.to(dtype), sin.to(dtype)


class StretchedRotary(Rotary):
    """Rotary for a longer context than a model was trained on, as in Llama 3.1 (Grattafiori et al. 2024, sec. 3.4.1).

    A pair of channels that turns less than low_turns times in original_block_size tokens turns `factor` times slower,
    one that turns more than high_turns times as before, and between the two the frequency is blended.
    """

    def __init__(
        self,
        *,
        head_dim: int,
        base: float = 500000.0,
        factor: float = 8.0,
        low_turns: float = 1.0,
        high_turns: float = 4.0,
        original_block_size: int = 8192,
    ) -> None:
        super().__init__(head_dim=head_dim, base=base)
        if factor < 1 or not 0 < low_turns < high_turns or original_block_size < 1:
            raise ConfigError(
                f"position.factor={factor}, position.low_turns={low_turns}, position.high_turns={high_turns}, "
                f"position.original_block_size={original_block_size}: a factor of 1 or more, low_turns "
                "above 0 and below high_turns, and a positive number of tokens"
            )
        self.factor, self.low_turns, self.high_turns = factor, low_turns, high_turns
        self.original_block_size = original_block_size

    def frequencies(self, head_dim: int, like: Tensor) -> Tensor:
        plain = super().frequencies(head_dim, like)
        turns = plain * (self.original_block_size / (2 * math.pi))
        share = ((turns - self.low_turns) / (self.high_turns - self.low_turns)).clamp(0, 1)
        return plain * (share + (1 - share) / self.factor)


class Alibi(Position):
    """Scores fall off linearly with distance, each head at its own slope (Press et al. 2022)."""

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


def _frequencies(width: int, base: float, like: Tensor) -> Tensor:
    """base^(−2i/width), (width/2,), on the device of `like`."""
    dtype = torch.float32 if like.device.type == "mps" else torch.float64  # mps has no float64
    return base ** -(torch.arange(0, width, 2, device=like.device, dtype=dtype) / width)


def _angles(pos: Tensor, frequencies: Tensor) -> Rotation:
    """Cosines and sines of pos · frequency, (…, T) and (F,) -> (…, T, F) each.

    Made afresh in at least float32, never stored in the model: a table that is cast down to bf16 with the
    weights puts distant positions on the wrong angle.
    """
    angle = pos.to(frequencies.dtype).unsqueeze(-1) * frequencies
    return angle.cos(), angle.sin()
